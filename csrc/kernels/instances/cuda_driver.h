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

}  // namespace hep::cuda
