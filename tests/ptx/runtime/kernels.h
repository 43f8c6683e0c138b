// The PTX that the process's fat binaries hold: found when they register, decoded when a kernel is first asked for, so
// that a test may edit the text in between.
#pragma once
#include <string>
#include <vector>

#include "device.h"

namespace hep::ptxr {

struct Image {
  std::string text;
  uint32_t target = 0;  // 90, 100
  std::shared_ptr<const ptxm::Module> module;
};
struct FatBinary {
  std::vector<Image> images;
};
struct HostKernel {
  FatBinary* binary = nullptr;
  std::string name;                      // mangled
  const ptxm::Kernel* kernel = nullptr;  // once it was asked for
  int dynamic_limit = 48 << 10;
};

// Of all fat binaries with kernels, in the order in which they registered.
std::vector<FatBinary*>& fat_binaries();
// Under the devices' lock; null: the binary has no such kernel for this target, or its PTX does not load (which is
// said on stderr).
HostKernel* find_kernel(const void* entry);

}  // namespace hep::ptxr
