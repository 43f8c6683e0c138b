// Blocks of memory, and the calls that make, free, fill and copy them.
#include "memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "capture.h"

namespace hep::ptxr {

namespace {
constexpr size_t kPage = 4096;
size_t whole_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}
}  // namespace

MemoryFile::MemoryFile(size_t bytes) : fd_(::memfd_create("device memory", MFD_CLOEXEC)) {
  if (fd_ >= 0 && ::ftruncate(fd_, off_t(whole_pages(bytes)))) ::close(fd_), fd_ = -1;
}
MemoryFile::~MemoryFile() {
  if (fd_ >= 0) ::close(fd_);
}
size_t MemoryFile::bytes() const {
  struct stat s{};
  return ::fstat(fd_, &s) ? 0 : size_t(s.st_size);
}

Memory& Memory::get() {
  static Memory* memory = new Memory;
  return *memory;
}

Memory::Memory() {
  void* p = ::mmap(nullptr, kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("ptx machine: no room for the devices' addresses");
    std::abort();
  }
  span_ = static_cast<unsigned char*>(p);
}

unsigned char* Memory::reserve(size_t bytes) {
  const size_t next = taken_ + whole_pages(bytes) + kPage;
  if (next + kPage > kSpan) return nullptr;
  unsigned char* base = span_ + taken_ + kPage;
  taken_ = next;
  return base;
}

void Memory::unreserve(void* base, size_t bytes) {
  ::mmap(base, whole_pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

void* Memory::allocate(Kind kind, size_t bytes, int device, const std::string& name) {
  void* p = attach(kind, std::make_shared<MemoryFile>(bytes), bytes, device, name);
  if (p) std::memset(p, kGarbage, whole_pages(bytes));
  return p;
}

// A page without access on either side: what the host's code writes beside a block ends the process, too.
void* Memory::attach(Kind kind, std::shared_ptr<MemoryFile> file, size_t bytes, int device, const std::string& name) {
  if (file->fd() < 0 || file->bytes() < bytes) return nullptr;
  unsigned char* base = reserve(bytes);
  if (!base) return nullptr;
  if (::mmap(base, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file->fd(), 0) == MAP_FAILED)
    return nullptr;
  Devices& d = Devices::get();
  d.machine().map({.base = base,
                   .bytes = bytes,
                   .name = name,
                   .space = kind == Kind::kPinned ? ptxm::Space::kHost : ptxm::Space::kDevice,
                   .device = d.machine_device(device)});
  d.machine().host_wrote(base, bytes);
  blocks_[uintptr_t(base)] = {.kind = kind, .bytes = bytes, .device = device, .file = std::move(file)};
  return base;
}

Block* Memory::find(const void* base) {
  const auto found = blocks_.find(uintptr_t(base));
  return found == blocks_.end() ? nullptr : &found->second;
}

const Block* Memory::around(const void* at) const {
  auto after = blocks_.upper_bound(uintptr_t(at));
  if (after == blocks_.begin()) return nullptr;
  --after;
  return uintptr_t(at) < after->first + after->second.bytes ? &after->second : nullptr;
}

void Memory::release(void* base) {
  const auto found = blocks_.find(uintptr_t(base));
  if (found == blocks_.end()) return;
  Devices::get().machine().unmap(base);
  // A peer that has it mapped may still read it, as on a GPU; then it must not look alive.
  if (found->second.kind != Kind::kPeer) std::memset(base, kFreed, whole_pages(found->second.bytes));
  unreserve(base, found->second.bytes);
  blocks_.erase(found);
}

uint64_t Memory::used(int device) const {
  uint64_t sum = 0;
  for (const auto& [base, block] : blocks_)
    if (block.device == device && block.kind != Kind::kPinned && block.kind != Kind::kPeer) sum += block.bytes;
  return sum;
}

void Memory::lend(const void* base, size_t bytes, const std::string& name, int device) {
  Devices& d = Devices::get();
  d.machine().map({.base = base, .bytes = bytes, .name = name, .device = d.machine_device(device)});
  d.machine().host_wrote(base, bytes);
}

void Memory::take_back(const void* base) {
  Devices::get().machine().unmap(base);
}

bool Memory::of_device(const void* at, size_t bytes) const {
  return Devices::get().machine().mapped(at, bytes);
}

bool Memory::pinned(const void* at) const {
  const Block* block = around(at);
  return block && block->kind == Kind::kPinned;
}

namespace {

// For calls that no stream orders.
template <class F>
cudaError_t uncaptured(F&& f) {
  return on_device([&](Devices& d, Lock& lock) {
    const cudaError_t status = refuse_while_capturing();
    return status == cudaSuccess ? f(d, lock) : status;
  });
}

cudaError_t make(void** p, size_t bytes, Kind kind, const char* name) {
  return uncaptured([&](Devices&, Lock&) {
    if (!p) return cudaErrorInvalidValue;
    *p = nullptr;
    if (bytes == 0) return cudaSuccess;
    *p = Memory::get().allocate(kind, bytes, current_device, name);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}

// Freed once the device is idle: the call waits for every kernel.
cudaError_t free_of_kind(void* p, Kind kind) {
  return uncaptured([&](Devices& d, Lock& lock) {
    if (!p) return cudaSuccess;
    const Block* block = Memory::get().find(p);
    if (!block || block->kind != kind) return cudaErrorInvalidValue;
    const cudaError_t status = d.wait_device(lock, block->device);
    Memory::get().release(p);
    return status;
  });
}

cudaError_t fill(void* p, int value, size_t bytes) {
  if (!Memory::get().of_device(p, bytes)) return cudaErrorIllegalAddress;
  std::memset(p, value, bytes);
  Devices::get().machine().host_wrote(p, bytes);
  return cudaSuccess;
}

// Either end is a device's, pinned or pageable memory; `snapshot` is what pageable memory held at the call.
cudaError_t copy(void* to, const void* from, size_t bytes, const std::shared_ptr<std::string>& snapshot, bool to_device,
                 bool from_device) {
  const Memory& memory = Memory::get();
  if ((to_device && !memory.of_device(to, bytes)) || (from_device && !memory.of_device(from, bytes)))
    return cudaErrorIllegalAddress;  // freed since
  std::memmove(to, snapshot ? snapshot->data() : from, bytes);
  if (to_device) Devices::get().machine().host_wrote(to, bytes);
  return cudaSuccess;
}

bool kind_fits(cudaMemcpyKind kind, bool to_device, bool from_device) {
  switch (kind) {
    case cudaMemcpyHostToDevice: return to_device;
    case cudaMemcpyDeviceToHost: return from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    default: return true;
  }
}

}  // namespace

HEP_PTXR_API cudaError_t cudaMalloc(void** p, size_t bytes) {
  return make(p, bytes, Kind::kMalloc, "cudaMalloc");
}
HEP_PTXR_API cudaError_t cudaFree(void* p) {
  return free_of_kind(p, Kind::kMalloc);
}
HEP_PTXR_API cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  return make(p, bytes, Kind::kPinned, "cudaHostAlloc");
}
HEP_PTXR_API cudaError_t cudaFreeHost(void* p) {
  return free_of_kind(p, Kind::kPinned);
}

HEP_PTXR_API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (!Memory::get().pinned(host)) return said(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

HEP_PTXR_API cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  return on_device([&](Devices& d, Lock&) {
    if (bytes == 0 || d.dropped == "cudaMemsetAsync") return cudaSuccess;
    if (!Memory::get().of_device(p, bytes)) return cudaErrorInvalidValue;
    Op op;
    op.act = [=] { return fill(p, value, bytes); };
    return submit(stream, std::move(op));
  });
}

HEP_PTXR_API cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  if (const cudaError_t status = cudaMemsetAsync(p, value, bytes, nullptr); status != cudaSuccess) return status;
  return cudaStreamSynchronize(nullptr);
}

HEP_PTXR_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                         cudaStream_t stream) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  if (d.lost != cudaSuccess) return said(d.lost);
  if (bytes == 0 || d.dropped == "cudaMemcpyAsync") return cudaSuccess;
  const Memory& memory = Memory::get();
  const bool to_device = memory.of_device(to, bytes), from_device = memory.of_device(from, bytes);
  if (!to && !from) return said(cudaErrorInvalidValue);
  if (!kind_fits(kind, to_device, from_device)) return said(cudaErrorInvalidValue);
  // A block of ours that is too small for the copy, at either end.
  if ((!to_device && memory.around(to)) || (!from_device && memory.around(from))) return said(cudaErrorInvalidValue);
  cudaStream_t s = d.resolve(stream);
  if (!s) return said(cudaErrorInvalidResourceHandle);
  // A graph would read pageable memory at every replay, when it may be gone: not in this project.
  if (s->capture && (!to_device || !from_device)) return said(spoil(s->capture, cudaErrorStreamCaptureUnsupported));
  Op op;
  op.copy = true;
  std::shared_ptr<std::string> snapshot;
  if (!from_device) snapshot = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
  op.act = [=] { return copy(to, from, bytes, snapshot, to_device, from_device); };
  if (const cudaError_t status = submit(s, std::move(op)); status != cudaSuccess) return said(status);
  return to_device ? cudaSuccess : said(d.wait(lock, s));  // pageable: the bytes are there when the call returns
}

HEP_PTXR_API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  *total = size_t(80) << 30;
  *free_bytes = *total - Memory::get().used(current_device);
  return cudaSuccess;
}

}  // namespace hep::ptxr
