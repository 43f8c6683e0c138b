// cudaMalloc for memory of one process and for IPC, cuMemCreate for fabric handles and file descriptors.
#include "runtime/cuda_memory.h"

#include <unistd.h>

#include <cstring>
#include <new>

#include "kernels/instances/cuda_driver.h"

namespace hep::cuda {
namespace {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) unreserve;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;

  static const Driver& get() {
    static const Driver d = [] {
      Driver f{};
      find_driver("cuMemGetAllocationGranularity", f.granularity);
      find_driver("cuMemCreate", f.create);
      find_driver("cuMemRelease", f.release);
      find_driver("cuMemAddressReserve", f.reserve);
      find_driver("cuMemAddressFree", f.unreserve);
      find_driver("cuMemMap", f.map);
      find_driver("cuMemUnmap", f.unmap);
      find_driver("cuMemSetAccess", f.set_access);
      find_driver("cuMemExportToShareableHandle", f.export_handle);
      find_driver("cuMemImportFromShareableHandle", f.import_handle);
      return f;
    }();
    return d;
  }
};

// std::bad_alloc with words: becomes Python's MemoryError.
struct OutOfDeviceMemory : std::bad_alloc {
  std::string text;
  explicit OutOfDeviceMemory(size_t bytes) {
    const auto mib = [](size_t b) { return std::to_string((b + (1 << 20) - 1) >> 20) + " MiB"; };
    size_t free = 0, total = 0;
    const bool known = cudaMemGetInfo(&free, &total) == cudaSuccess;
    (void)cudaGetLastError();
    text = "registered memory of " + mib(bytes) + " does not fit on the device" +
           (known ? " (" + mib(free) + " of " + mib(total) + " free)" : "");
  }
  const char* what() const noexcept override { return text.c_str(); }
};

// Of calls that make memory.
void check_room(CUresult status, size_t bytes, const char* what) {
  if (status == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfDeviceMemory(bytes);
  check_driver(status, what);
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  return device;
}

// cudaMalloc, or another process's mapped by its IPC handle.
class PlainMemory final : public DeviceMemory {
 public:
  explicit PlainMemory(size_t bytes) {
    bytes_ = bytes;
    const cudaError_t status = cudaMalloc(reinterpret_cast<void**>(&data_), bytes);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();  // not sticky
      throw OutOfDeviceMemory(bytes);
    }
    check(status, "registered memory (cudaMalloc)");
  }
  PlainMemory(size_t bytes, const ShareHandle& handle) : attached_(true) {
    bytes_ = bytes;
    cudaIpcMemHandle_t ipc;
    if (handle.bytes.size() != sizeof ipc) throw std::runtime_error("CUDA: not an IPC handle");
    std::memcpy(&ipc, handle.bytes.data(), sizeof ipc);
    check(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&data_), ipc, cudaIpcMemLazyEnablePeerAccess),
          "mapping a peer's memory (cudaIpcOpenMemHandle)");
  }
  ~PlainMemory() override {
    const OutsideCaptures outside;
    attached_ ? (void)cudaIpcCloseMemHandle(data_) : (void)cudaFree(data_);
  }
  ShareHandle share() const override {
    cudaIpcMemHandle_t ipc;
    check(cudaIpcGetMemHandle(&ipc, data_), "sharing memory (cudaIpcGetMemHandle)");
    return {std::string(reinterpret_cast<const char*>(&ipc), sizeof ipc)};
  }

 private:
  bool attached_ = false;
};

// cuMemCreate, or an import of it; mapped for this device.
class MappedMemory final : public DeviceMemory {
 public:
  MappedMemory(Share kind, size_t bytes) : kind_(kind) {
    open(bytes);
    CUmemAllocationProp prop = properties();
    try {
      check_room(Driver::get().create(&handle_, bytes_, &prop, 0), bytes_, "registered memory (cuMemCreate)");
      map();
    } catch (...) {
      close();
      throw;
    }
  }
  MappedMemory(Share kind, size_t bytes, const ShareHandle& from) : kind_(kind) {
    open(bytes);
    void* source = reinterpret_cast<void*>(uintptr_t(from.fd));
    if (kind == Share::kFabric) {
      if (from.bytes.size() != sizeof(CUmemFabricHandle)) throw std::runtime_error("CUDA: not a fabric handle");
      source = const_cast<char*>(from.bytes.data());
    }
    try {
      check_driver(Driver::get().import_handle(&handle_, source, type()), "mapping a peer's memory (import)");
      map();
    } catch (...) {
      close();
      throw;
    }
  }
  ~MappedMemory() override { close(); }

  ShareHandle share() const override {
    ShareHandle out;
    if (kind_ == Share::kFabric) {
      out.bytes.resize(sizeof(CUmemFabricHandle));
      check_driver(Driver::get().export_handle(out.bytes.data(), handle_, type(), 0), "sharing memory (fabric handle)");
    } else {
      check_driver(Driver::get().export_handle(&out.fd, handle_, type(), 0), "sharing memory (file descriptor)");
    }
    return out;
  }

 private:
  CUmemAllocationHandleType type() const {
    return kind_ == Share::kFabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  }
  CUmemAllocationProp properties() const {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device_;
    prop.requestedHandleTypes = type();
    return prop;
  }
  void open(size_t bytes) {
    device_ = current_device();
    check(cudaFree(nullptr), "context");  // the driver's functions need the runtime's context
    size_t unit = 0;
    const CUmemAllocationProp prop = properties();
    check_driver(Driver::get().granularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "granularity");
    bytes_ = size_t(align_up(bytes, unit));
  }
  void map() {
    const Driver& d = Driver::get();
    CUdeviceptr address = 0;
    check_room(d.reserve(&address, bytes_, 0, 0, 0), bytes_, "address space");
    data_ = reinterpret_cast<unsigned char*>(address);
    check_room(d.map(address, bytes_, 0, handle_, 0), bytes_, "map");
    mapped_ = true;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device_;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check_driver(d.set_access(address, bytes_, &access, 1), "access to mapped memory");
  }
  void close() {
    const OutsideCaptures outside;
    const Driver& d = Driver::get();
    const auto address = reinterpret_cast<CUdeviceptr>(data_);
    if (mapped_) (void)d.unmap(address, bytes_);
    if (data_) (void)d.unreserve(address, bytes_);
    if (handle_) (void)d.release(handle_);
    mapped_ = false;
    data_ = nullptr;
    handle_ = 0;
  }

  Share kind_;
  int device_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  bool mapped_ = false;
};

}  // namespace

std::shared_ptr<DeviceMemory> DeviceMemory::create(Share kind, size_t bytes) {
  const OutsideCaptures outside;
  std::shared_ptr<DeviceMemory> memory;
  if (kind == Share::kNone || kind == Share::kIpc)
    memory = std::make_shared<PlainMemory>(bytes);
  else
    memory = std::make_shared<MappedMemory>(kind, bytes);
  const LentStream own;  // the device's own stream must not be waited for while any other captures
  check(cudaMemsetAsync(memory->data(), 0, memory->bytes(), own.stream), "memset");
  check(cudaStreamSynchronize(own.stream), "memset");
  return memory;
}

std::shared_ptr<DeviceMemory> DeviceMemory::attach(Share kind, size_t bytes, const ShareHandle& handle) {
  const OutsideCaptures outside;
  if (kind == Share::kIpc) return std::make_shared<PlainMemory>(bytes, handle);
  return std::make_shared<MappedMemory>(kind, bytes, handle);
}

}  // namespace hep::cuda
