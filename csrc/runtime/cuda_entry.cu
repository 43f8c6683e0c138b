// What the CUDA library offers through its one symbol.
#include "runtime/cuda_entry.h"

#include "kernels/instances/cuda_makers.h"
#include "kernels/instances/cuda_meet.h"
#include "kernels/instances/cuda_memory.h"

namespace hep::cuda {
namespace {

std::vector<DeviceInfo> devices(std::string& why_none) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    why_none = cudaGetErrorString(status);
    (void)cudaGetLastError();
    return {};
  }
  std::vector<DeviceInfo> all;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    check(cudaGetDeviceProperties(&p, i), "device properties");
    // Code for sm_90a runs on 9.0 alone; code for sm_100, on every 10.x (10.3: B300, GB300).
    const bool supported = (p.major == 9 && p.minor == 0) || p.major == 10;
    int order = 0;
    check(cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, i), "order of RDMA writes");
    all.push_back({p.name, p.major, p.minor, p.multiProcessorCount, supported, order});
  }
  if (all.empty()) why_none = "no device is visible";
  return all;
}

void set_device(int ordinal) {
  check(cudaSetDevice(ordinal), "choosing the device");
}

}  // namespace
}  // namespace hep::cuda

extern "C" __attribute__((visibility("default"))) const hep::cuda::Entry* hep_cuda_entry() {
  using namespace hep::cuda;
  static const Entry entry{kAbi,
                           devices,
                           set_device,
                           make_p2p,
                           make_loopback,
                           DeviceMemory::create,
                           DeviceMemory::attach,
                           run_at_once,
                           make_copy_stream,
                           make_counter_reader,
                           write_counter};
  return &entry;
}
