// A stand-in for libhybrid_ep_nvshmem.so: the product's own nvshmem_host.cu over the stand-in library, memory of the
// host, and no kernels; and for what libnvshmem_device.a links into it.
#include <cstdlib>
#include <cstring>

#include "nvshmem_host.h"
#include "runtime/nvshmem_entry.h"

extern "C" {
int stand_in_init(const nvshmemx_init_attr_t* attr);
void stand_in_finalize();
void nvshmemi_finalize() {
  stand_in_finalize();
}
}
int nvshmemi_init_thread(int requested, int* provided, unsigned flags, nvshmemx_init_attr_t* attr,
                         nvshmemi_version_t v) {
  if (flags != NVSHMEMX_INIT_WITH_UNIQUEID || v.major != NVSHMEM_VENDOR_MAJOR_VERSION) return 5;
  *provided = requested;
  return stand_in_init(attr);
}

extern "C" const hep::nvshmem::Entry* hep_nvshmem_entry() {
  static hep::nvshmem::Entry entry{0,
                                   &hep::nvshmem::calls(),
                                   nullptr,
                                   [](int) {},
                                   [](void* data, size_t bytes) { std::memset(data, 0, bytes); },
                                   [](void (*begin)(void*)) { begin(nullptr); }};
  const char* text = std::getenv("STAND_IN_NVSHMEM");
  entry.abi = hep::cuda::kAbi + (text && !std::strcmp(text, "other build"));
  return &entry;
}
