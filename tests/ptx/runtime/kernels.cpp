// Fat binaries, kernels and launches.
#include "kernels.h"

#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "capture.h"

namespace hep::ptxr {
namespace {

std::unordered_map<const void*, HostKernel>& kernels() {
  static auto* all = new std::unordered_map<const void*, HostKernel>;
  return *all;
}

template <class T>
T at(const unsigned char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint32_t target_of(const std::string& text) {
  const size_t found = text.find(".target sm_");
  return found == std::string::npos ? 0 : uint32_t(std::atoi(text.c_str() + found + 11));
}

// A fat binary: a header (its size at 6, that of the entries at 8), then entries, each a header (kind at 0, 1 being
// PTX; its size at 4, that of the contents at 8) and contents, here uncompressed.
std::vector<Image> images_of(const unsigned char* fat) {
  std::vector<Image> images;
  const unsigned char *entry = fat + at<uint16_t>(fat + 6), *end = entry + at<uint64_t>(fat + 8);
  while (entry < end) {
    const auto header = at<uint32_t>(entry + 4);
    const auto bytes = at<uint64_t>(entry + 8);
    if (at<uint16_t>(entry) == 1) {
      Image image;
      image.text.assign(reinterpret_cast<const char*>(entry + header), bytes);
      image.text.resize(std::strlen(image.text.c_str()));
      image.target = target_of(image.text);
      if (image.text.find(".entry") != std::string::npos) images.push_back(std::move(image));
    }
    entry += header + bytes;
  }
  return images;
}

}  // namespace

std::vector<FatBinary*>& fat_binaries() {
  static auto* all = new std::vector<FatBinary*>;
  return *all;
}

HostKernel* find_kernel(const void* entry) {
  const auto found = kernels().find(entry);
  if (found == kernels().end()) return nullptr;
  HostKernel& k = found->second;
  if (k.kernel) return &k;
  for (Image& image : k.binary->images) {
    if (image.target != Devices::settings.image_target()) continue;
    try {
      if (!image.module) image.module = ptxm::load(image.text, "sm_" + std::to_string(image.target));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "ptx machine: %s\n", error.what());
      return nullptr;
    }
    if ((k.kernel = image.module->find(k.name))) return &k;
  }
  return nullptr;
}

namespace {

cudaError_t launch(const void* entry, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (d.lost != cudaSuccess) return d.lost;
  const HostKernel* k = find_kernel(entry);
  if (!k) return cudaErrorInvalidDeviceFunction;
  cudaStream_t s = d.resolve(stream);
  if (!s || s->device != current_device) return cudaErrorInvalidResourceHandle;
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) return cudaErrorInvalidConfiguration;
  if (shared > size_t(k->dynamic_limit)) return cudaErrorInvalidValue;
  ptxm::Launch l;
  l.kernel = k->kernel;
  l.device = d.machine_device(s->device);
  l.gpu = Devices::settings.apart ? uint64_t(uintptr_t(s)) : 0;
  l.grid = grid.x;
  l.block = block.x;
  l.name = k->name;
  l.dynamic_shared = uint32_t(shared);
  l.params.resize(k->kernel->param_bytes);
  if (d.dropped == "shared memory" && shared >= 128) l.dynamic_shared -= 128;
  for (size_t i = 0; i < k->kernel->params.size(); ++i) {
    const ptxm::Param& p = k->kernel->params[i];
    std::memcpy(&l.params[p.offset], args[i], p.bytes);
  }
  if (const std::string why = d.machine().refusal(l); !why.empty()) {
    std::fprintf(stderr, "ptx machine: launch of %s refused: %s\n", k->name.c_str(), why.c_str());
    return cudaErrorInvalidConfiguration;
  }
  Op op;
  op.launch = std::move(l);
  return submit(stream, std::move(op));
}

// What the calls that name a kernel begin with; f is given it.
template <class F>
cudaError_t on_kernel(const void* entry, F&& f) {
  return on_device([&](Devices& d, Lock&) {
    HostKernel* k = find_kernel(entry);
    return k ? f(d, *k) : cudaErrorInvalidDeviceFunction;
  });
}

}  // namespace

HEP_PTXR_API void** __cudaRegisterFatBinary(void* wrapper) {
  auto* binary = new FatBinary;
  binary->images = images_of(at<const unsigned char*>(static_cast<unsigned char*>(wrapper) + 8));
  if (!binary->images.empty()) fat_binaries().push_back(binary);
  return reinterpret_cast<void**>(binary);
}
HEP_PTXR_API void __cudaRegisterFatBinaryEnd(void**) {}
HEP_PTXR_API void __cudaUnregisterFatBinary(void**) {}
HEP_PTXR_API void __cudaRegisterFunction(void** binary, const char* entry, char*, const char* name, int, void*, void*,
                                         void*, void*, int*) {
  kernels()[entry] = {.binary = reinterpret_cast<FatBinary*>(binary), .name = name};
}
// What kernel<<<>>> compiles to; this project launches by cudaLaunchKernel alone.
HEP_PTXR_API unsigned __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return 1;
}
HEP_PTXR_API cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) {
  return said(cudaErrorNotSupported);
}
HEP_PTXR_API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return said(cudaErrorNotSupported);
}

HEP_PTXR_API cudaError_t cudaLaunchKernel(const void* entry, dim3 grid, dim3 block, void** args, size_t shared,
                                          cudaStream_t stream) {
  return said(launch(entry, grid, block, args, shared, stream));
}

HEP_PTXR_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* entry) {
  return on_kernel(entry, [&](Devices&, const HostKernel& k) {
    *a = {};
    a->sharedSizeBytes = k.kernel->static_shared;
    a->maxThreadsPerBlock = int(k.kernel->max_threads);
    a->maxDynamicSharedSizeBytes = k.dynamic_limit;
    return cudaSuccess;
  });
}

HEP_PTXR_API cudaError_t cudaFuncSetAttribute(const void* entry, cudaFuncAttribute attribute, int value) {
  return on_kernel(entry, [&](Devices& d, HostKernel& k) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        uint32_t(value) + k.kernel->static_shared > d.model().shared_per_block)
      return cudaErrorInvalidValue;
    k.dynamic_limit = value;
    return cudaSuccess;
  });
}

}  // namespace hep::ptxr
