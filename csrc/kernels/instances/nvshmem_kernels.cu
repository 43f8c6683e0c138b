// The CUDA executor whose rail is a NIC: a library of its own, linked with NVSHMEM (scripts/build_cuda.py --nvshmem).
#include "kernels/instances/cuda_executor.h"
#include "kernels/instances/cuda_makers.h"
#include "transport/nvshmem/nvshmem_device.h"

namespace hep::cuda {

std::unique_ptr<Executor> make_nvshmem(unsigned char* const* rail_segments, uint64_t seed) {
  return std::make_unique<CudaExecutor<NvshmemDevice>>(rail_segments, seed);
}

}  // namespace hep::cuda
