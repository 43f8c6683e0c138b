// The CUDA executor for tests: virtual ranks of one device over a rail that delays and scatters.
#include "kernels/instances/cuda_executor.h"
#include "kernels/instances/cuda_makers.h"
#include "transport/loopback/loopback_device.h"

namespace hep::cuda {

std::unique_ptr<Executor> make_loopback(unsigned char* const* rail_segments, uint64_t seed) {
  return std::make_unique<CudaExecutor<LoopbackDevice>>(rail_segments, seed);
}

}  // namespace hep::cuda
