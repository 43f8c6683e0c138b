// What the runtime says of its devices and of errors.
#include <cstring>

#include "capture.h"
#include "driver.h"

namespace hep::ptxr {

HEP_PTXR_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = Devices::settings.num_devices;
  return cudaSuccess;
}
HEP_PTXR_API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
HEP_PTXR_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= Devices::settings.num_devices) return said(cudaErrorInvalidDevice);
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  d.contexts.insert(current_device = device);
  return cudaSuccess;
}

// Every device maps the memory of every other, from the beginning.
HEP_PTXR_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const int n = Devices::settings.num_devices;
  if (device < 0 || device >= n || peer < 0 || peer >= n) return said(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}
HEP_PTXR_API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  if (peer < 0 || peer >= Devices::settings.num_devices || peer == current_device) return said(cudaErrorInvalidDevice);
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const ptxm::DeviceModel& model = Devices::get().model();
  if (device < 0 || device >= Devices::settings.num_devices) return said(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = int(model.sms); return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(model.shared_per_block); return cudaSuccess;
    case cudaDevAttrGPUDirectRDMAWritesOrdering: *value = 0; return cudaSuccess;  // it has no NIC
    default: return said(cudaErrorInvalidValue);
  }
}

HEP_PTXR_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= Devices::settings.num_devices) return said(cudaErrorInvalidDevice);
  const ptxm::DeviceModel& model = Devices::get().model();
  *p = {};
  std::strncpy(p->name, "PTX machine (a CPU)", sizeof p->name - 1);
  p->major = int(Devices::settings.target / 10);
  p->minor = int(Devices::settings.target % 10);
  p->multiProcessorCount = int(model.sms);
  p->sharedMemPerBlockOptin = model.shared_per_block;
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaGetLastError() {
  // An error of the device itself stays.
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

HEP_PTXR_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing stream";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "another error (PTX machine)";
  }
}

HEP_PTXR_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                          unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace hep::ptxr
