// Makers of the CUDA executors, each in its own translation unit.
#pragma once
#include "kernels/instances/executor.h"

namespace hep::cuda {

std::unique_ptr<Executor> make_p2p(unsigned char* const* rail_segments, uint64_t seed);
std::unique_ptr<Executor> make_loopback(unsigned char* const* rail_segments, uint64_t seed);
// In the NVSHMEM library.
std::unique_ptr<Executor> make_nvshmem(unsigned char* const* rail_segments, uint64_t seed);

}  // namespace hep::cuda
