// The driver's calls: virtual memory that other processes map by file descriptors, a store in stream order; and the
// runtime's IPC handles. There are no fabric handles, as on a machine outside an NVLink domain.
#include "driver.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <set>

#include "capture.h"
#include "memory.h"

namespace hep::ptxr {
namespace {

constexpr size_t kGranularity = 2 << 20;

struct Physical {
  std::shared_ptr<MemoryFile> file;
  size_t bytes = 0;
};
struct Reserved {
  size_t bytes = 0;
  Physical* mapped = nullptr;
  bool accessible = false;
};

struct Driver {
  std::set<Physical*> physical;
  std::map<CUdeviceptr, Reserved> reserved;
  static Driver& get() {
    static auto* driver = new Driver;
    return *driver;
  }
};
Physical* find(CUmemGenericAllocationHandle handle) {
  auto* p = reinterpret_cast<Physical*>(handle);
  return Driver::get().physical.count(p) ? p : nullptr;
}

bool supported(const CUmemAllocationProp* p) {
  return p && p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
         p->location.id >= 0 && p->location.id < Devices::settings.num_devices;
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp* props, CUmemAllocationGranularity_flags) {
  if (!supported(props)) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* props,
                unsigned long long) {
  if (!supported(props) || bytes == 0 || bytes % kGranularity) return CUDA_ERROR_INVALID_VALUE;
  if (props->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_PERMITTED;
  Lock lock(Devices::get().mutex);
  if (refuse_while_capturing() != cudaSuccess) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  auto* p = new Physical{std::make_shared<MemoryFile>(bytes), bytes};
  if (p->file->fd() < 0) {
    delete p;
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Driver::get().physical.insert(p);
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(p);
  return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
  Lock lock(Devices::get().mutex);
  Physical* p = find(handle);
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  Driver::get().physical.erase(p);  // what is mapped of it stays
  delete p;
  return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  if (bytes == 0 || bytes % kGranularity) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(Devices::get().mutex);
  unsigned char* p = Memory::get().reserve(bytes);
  if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = CUdeviceptr(p);
  Driver::get().reserved[*at] = {bytes};
  return CUDA_SUCCESS;
}
CUresult unreserve(CUdeviceptr at, size_t bytes) {
  Lock lock(Devices::get().mutex);
  auto& all = Driver::get().reserved;
  const auto found = all.find(at);
  if (found == all.end() || found->second.bytes != bytes || found->second.mapped) return CUDA_ERROR_INVALID_VALUE;
  Memory::get().unreserve(reinterpret_cast<void*>(at), bytes);
  all.erase(found);
  return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  Lock lock(Devices::get().mutex);
  const auto found = Driver::get().reserved.find(at);
  Physical* p = find(handle);
  if (!p || offset || found == Driver::get().reserved.end() || found->second.mapped || bytes != found->second.bytes ||
      bytes > p->bytes)
    return CUDA_ERROR_INVALID_VALUE;
  if (::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, p->file->fd(), 0) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  found->second.mapped = p;
  return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  const auto found = Driver::get().reserved.find(at);
  if (found == Driver::get().reserved.end() || !found->second.mapped || bytes != found->second.bytes || count != 1 ||
      access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || access->location.id < 0 ||
      access->location.id >= d.count())
    return CUDA_ERROR_INVALID_VALUE;
  auto* base = reinterpret_cast<void*>(at);
  ::mprotect(base, bytes, PROT_READ | PROT_WRITE);
  Memory::get().lend(base, bytes, "cuMemMap", access->location.id);
  found->second.accessible = true;
  return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr at, size_t bytes) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  const auto found = Driver::get().reserved.find(at);
  if (found == Driver::get().reserved.end() || !found->second.mapped || bytes != found->second.bytes)
    return CUDA_ERROR_INVALID_VALUE;
  (void)d.wait_device(lock, current_device);  // as the driver does
  auto* base = reinterpret_cast<void*>(at);
  Memory::get().take_back(base);
  Memory::get().unreserve(base, bytes);
  Reserved& r = Driver::get().reserved.at(at);
  r.mapped = nullptr;
  r.accessible = false;
  return CUDA_SUCCESS;
}
CUresult export_handle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                       unsigned long long) {
  Lock lock(Devices::get().mutex);
  const Physical* p = find(handle);
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_PERMITTED;
  const int fd = ::fcntl(p->file->fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(out, &fd, sizeof fd);
  return CUDA_SUCCESS;
}
CUresult import_handle(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_PERMITTED;
  Lock lock(Devices::get().mutex);
  const int fd = ::fcntl(int(reinterpret_cast<intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  auto file = std::make_shared<MemoryFile>(fd);
  auto* p = new Physical{file, file->bytes()};
  Driver::get().physical.insert(p);
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(p);
  return CUDA_SUCCESS;
}

// A store in its stream's order. The fence that comes with it is nothing here: what came before on the stream is done.
CUresult write_value(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags) {
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT || at % sizeof value) return CUDA_ERROR_INVALID_VALUE;
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (d.dropped == "cuStreamWriteValue64") return CUDA_SUCCESS;
  auto* to = reinterpret_cast<cuuint64_t*>(at);
  if (!Memory::get().of_device(to, sizeof value)) return CUDA_ERROR_INVALID_VALUE;
  Op op;
  op.act = [=] {
    if (!Memory::get().of_device(to, sizeof value)) return cudaErrorIllegalAddress;  // freed since
    std::atomic_ref(*to).store(value);
    Devices::get().machine().host_wrote(to, sizeof value);
    return cudaSuccess;
  };
  const cudaError_t status = submit(stream, std::move(op));
  return status == cudaSuccess
             ? CUDA_SUCCESS
             : (status == cudaErrorInvalidResourceHandle ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_UNKNOWN);
}

CUresult context_state(CUdevice device, unsigned* flags, int* active) {
  if (device < 0 || device >= Devices::settings.num_devices) return CUDA_ERROR_INVALID_DEVICE;
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  *flags = 0;
  *active = int(d.contexts.count(device));
  return CUDA_SUCCESS;
}

// An IPC handle: the process, its descriptor, and the size.
struct Ipc {
  uint64_t magic, bytes;
  int32_t pid, fd;
};
static_assert(sizeof(Ipc) <= sizeof(cudaIpcMemHandle_t));
constexpr uint64_t kMagic = 0x6370495f78747068;

}  // namespace

void* driver_function(const char* name) {
  static const std::map<std::string, void*> functions{
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(unreserve)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(export_handle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(import_handle)},
      {"cuStreamWriteValue64", reinterpret_cast<void*>(write_value)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(context_state)}};
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

HEP_PTXR_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* p) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  const Block* block = Memory::get().find(p);
  if (!block || block->kind != Kind::kMalloc) return said(cudaErrorInvalidValue);
  const Ipc ipc{kMagic, block->bytes, int32_t(::getpid()), block->file->fd()};
  *handle = {};
  std::memcpy(handle, &ipc, sizeof ipc);
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t handle, unsigned flags) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  Ipc ipc;
  std::memcpy(&ipc, &handle, sizeof ipc);
  if (ipc.magic != kMagic || flags != cudaIpcMemLazyEnablePeerAccess) return said(cudaErrorInvalidValue);
  if (ipc.pid == ::getpid()) return said(cudaErrorDeviceUninitialized);  // what CUDA says of a process's own handle
  const std::string path = "/proc/" + std::to_string(ipc.pid) + "/fd/" + std::to_string(ipc.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return said(cudaErrorMapBufferObjectFailed);
  auto file = std::make_shared<MemoryFile>(fd);
  *p = Memory::get().attach(Kind::kPeer, std::move(file), ipc.bytes, current_device, "a peer's memory");
  return *p ? cudaSuccess : said(cudaErrorMapBufferObjectFailed);
}

HEP_PTXR_API cudaError_t cudaIpcCloseMemHandle(void* p) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  const Block* block = Memory::get().find(p);
  if (!block || block->kind != Kind::kPeer) return said(cudaErrorInvalidValue);
  const cudaError_t status = d.wait_device(lock, block->device);
  Memory::get().release(p);
  return said(status);
}

}  // namespace hep::ptxr
