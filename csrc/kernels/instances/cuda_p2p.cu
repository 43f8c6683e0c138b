// The CUDA executor whose rail is mapped memory.
#include "kernels/instances/cuda_executor.h"
#include "kernels/instances/cuda_makers.h"
#include "transport/p2p/p2p_device.h"

namespace hep::cuda {

std::unique_ptr<Executor> make_p2p(unsigned char* const* rail_segments, uint64_t seed) {
  return std::make_unique<CudaExecutor<P2PDevice>>(rail_segments, seed);
}

}  // namespace hep::cuda
