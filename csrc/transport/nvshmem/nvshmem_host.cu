// NVSHMEM's host functions behind plain ones. Host code alone: tests compile it with g++ against a stand-in.
//
// Which call makes NVSHMEM known to our kernels: nvshmemi_init_thread, the function that libnvshmem_device.a brings
// into this library together with the device code that it serves. It gives the host library the addresses of *this*
// library's copy of the device state (cudaGetSymbolAddress on nvshmemi_device_state_d and on IBGDA's), and the host
// library fills them now and after every later change. nvshmemx_cumodule_init and nvshmemx_culibrary_init do the same
// for code that the driver loaded as a module by itself (a cubin, Triton, NVRTC); our kernels are registered by the
// runtime with this library, so a second registration would only be a second copy of the same state.
// nvshmemx_hostlib_init_attr would start the host library and leave our device state empty.
// nvshmemx_init_attr, the documented name, is an inline wrapper of this call that ends the process on failure; here a
// failure is a status.
#include "transport/nvshmem/nvshmem_host.h"

#include <nvshmem_host.h>

#include <cstdlib>
#include <cstring>

namespace hep::nvshmem {
namespace {

static_assert(sizeof(nvshmemx_uniqueid_t) == kUniqueIdBytes);

Version built_with() {
  return {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
}

Version running() {
  Version v;
  nvshmemx_vendor_get_version_info(&v.major, &v.minor, &v.patch);
  return v;
}

bool started() {
  return nvshmemx_init_status() != NVSHMEM_STATUS_NOT_INITIALIZED;
}

int unique_id(unsigned char* out) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = nvshmemx_get_uniqueid(&id);
  std::memcpy(out, &id, sizeof id);
  return status;
}

int start(const unsigned char* from, int pe, int n) {
  // Puts issued by the GPU itself, without a proxy thread on the host, unless the user said otherwise.
  ::setenv("NVSHMEM_IB_ENABLE_IBGDA", "1", 0);
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  std::memcpy(&id, from, sizeof id);
  nvshmemx_init_attr_t attr = NVSHMEMX_INIT_ATTR_INITIALIZER;
  if (const int status = nvshmemx_set_attr_uniqueid_args(pe, n, &id, &attr)) return status;
  const Version v = built_with();
  int provided = 0;
  if (const int status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID, &attr,
                                              {v.major, v.minor, v.patch}))
    return status;
  // Without a context NVSHMEM puts the rest off until a later call, and reports success.
  return nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED ? kNoDevice : 0;
}

// nvshmem_quiet of the host waits for what the host itself began; puts of kernels are waited for by a kernel.
void quiet(void* stream) {
  nvshmemx_quiet_on_stream(static_cast<cudaStream_t>(stream));
}

}  // namespace

const Calls& calls() {
  static const Calls table{built_with,    running,        started, unique_id,    start,       nvshmem_my_pe,
                           nvshmem_n_pes, nvshmem_malloc, quiet,   nvshmem_free, nvshmem_ptr, nvshmemi_finalize};
  return table;
}

}  // namespace hep::nvshmem
