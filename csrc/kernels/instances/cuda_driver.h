// The driver's functions are looked up at run time, so that this library loads on a machine without a driver.
#pragma once
#include <cuda.h>

#include "kernels/instances/cuda_memory.h"

namespace hep::cuda {

template <class F>
void find_driver(const char* name, F& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess || !address)
    throw std::runtime_error(std::string("CUDA: this driver has no ") + name);
  function = reinterpret_cast<F>(address);
}

inline void check_driver(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(std::string("CUDA: ") + what + " failed with driver error " + std::to_string(int(status)));
}

// Makes a device this thread's, and at its end the one from before again, unless that has no context: choosing it would
// make one, hundreds of MiB of its memory.
class OnDevice {
 public:
  explicit OnDevice(int ordinal) {
    int now = 0;
    check(cudaGetDevice(&now), "current device");
    if (now == ordinal) return;
    if (has_context(now)) before_ = now;
    check(cudaSetDevice(ordinal), "choosing the device");
  }
  ~OnDevice() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  static bool has_context(int ordinal) {
    static const auto state = [] {
      decltype(&cuDevicePrimaryCtxGetState) f = nullptr;
      find_driver("cuDevicePrimaryCtxGetState", f);
      return f;
    }();
    unsigned flags = 0;
    int active = 0;
    return state(ordinal, &flags, &active) == CUDA_SUCCESS && active;
  }
  int before_ = -1;
};

}  // namespace hep::cuda
