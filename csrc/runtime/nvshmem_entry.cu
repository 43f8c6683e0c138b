// What the NVSHMEM library offers through its one symbol.
#include "runtime/nvshmem_entry.h"

#include "kernels/instances/cuda_makers.h"
#include "kernels/instances/cuda_memory.h"

namespace hep::nvshmem {
namespace {

// Our waits poll with plain acquires and leave out the flush with which NVSHMEM's own wait guards against RDMA writes
// that reach the GPU out of order; so the device must promise their order, at least towards itself.
void set_device(int ordinal) {
  cuda::check(cudaSetDevice(ordinal), "choosing the device");
  int order = 0;
  cuda::check(cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, ordinal), "order of RDMA writes");
  if (order < cudaGPUDirectRDMAWritesOrderingOwner)
    throw std::runtime_error("NVSHMEM: device " + std::to_string(ordinal) +
                             " does not order RDMA writes (cudaDevAttrGPUDirectRDMAWritesOrdering is " +
                             std::to_string(order) + "), which the rail over a NIC relies on");
}

void zero(void* data, size_t bytes) {
  cuda::check(cudaMemset(data, 0, bytes), "memset of the symmetric heap");
  cuda::check(cudaDeviceSynchronize(), "memset of the symmetric heap");
}

void on_stream(void (*begin)(void* stream)) {
  const cuda::LentStream lent;
  begin(lent.stream);
  cuda::check(cudaGetLastError(), "quiet");  // NVSHMEM prints a launch that failed, and goes on
  cuda::check(cudaStreamSynchronize(lent.stream), "quiet");
}

}  // namespace
}  // namespace hep::nvshmem

extern "C" __attribute__((visibility("default"))) const hep::nvshmem::Entry* hep_nvshmem_entry() {
  using namespace hep::nvshmem;
  static const Entry entry{hep::cuda::kAbi, &calls(), hep::cuda::make_nvshmem, set_device, zero, on_stream};
  return &entry;
}
