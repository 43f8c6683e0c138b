// One maker per executor, each in its own translation unit: instances compile in parallel.
#pragma once
#include "kernels/instances/executor.h"

namespace hep {

std::unique_ptr<Executor> make_host_plain(unsigned char* const* rail_segments, uint64_t seed);
std::unique_ptr<Executor> make_host_checked(unsigned char* const* rail_segments, uint64_t seed);
std::unique_ptr<Executor> make_host_checked_lanes4(unsigned char* const* rail_segments, uint64_t seed);
std::unique_ptr<Executor> make_host_checked_mapped(unsigned char* const* rail_segments, uint64_t seed);
// As wide as a GPU's warp: the very divisions of work that the CUDA instances make.
std::unique_ptr<Executor> make_host_checked_lanes32(unsigned char* const* rail_segments, uint64_t seed);

}  // namespace hep
