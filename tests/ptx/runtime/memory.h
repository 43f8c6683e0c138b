// Memory of the stand-in's devices: blocks with exact bounds that begin as garbage, are poisoned when they are freed,
// and can be handed to other processes, being files without a name.
#pragma once
#include <map>
#include <string>

#include "device.h"

namespace hep::ptxr {

// An anonymous file that holds memory; every mapping and handle of it keeps it.
class MemoryFile {
 public:
  explicit MemoryFile(size_t bytes);
  explicit MemoryFile(int fd) : fd_(fd) {}  // takes it over
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  int fd() const { return fd_; }
  size_t bytes() const;

 private:
  int fd_;
};

enum class Kind { kMalloc, kPinned, kPool, kPeer };
struct Block {
  Kind kind;
  size_t bytes = 0;  // exact; the mapping ends with a page
  int device = 0;
  std::shared_ptr<MemoryFile> file;
  bool freed = false;  // in stream order, and not carried out yet
};

// All under the devices' lock.
class Memory {
 public:
  static Memory& get();
  static constexpr unsigned char kGarbage = 0xCB, kFreed = 0xDB;

  // All addresses of devices lie in one span, and none is given out twice. Whole pages without access, one more on
  // either side; nullptr: there is none left.
  unsigned char* reserve(size_t bytes);
  void unreserve(void* base, size_t bytes);
  bool in_span(const void* at) const { return at >= span_ && at < span_ + kSpan; }
  unsigned char* span() const { return span_; }
  static constexpr size_t kSpan = size_t(4) << 40;

  // nullptr: there is none left.
  void* allocate(Kind kind, size_t bytes, int device, const std::string& name);
  void* attach(Kind kind, std::shared_ptr<MemoryFile> file, size_t bytes, int device, const std::string& name);
  Block* find(const void* base);              // that begins there
  const Block* around(const void* at) const;  // that holds this byte
  void release(void* base);
  uint64_t used(int device) const;

  // The caller's memory that stands for a device's, a tensor's: exact, and not ours.
  void lend(const void* base, size_t bytes, const std::string& name, int device);
  void take_back(const void* base);

  // Whether [at, at + bytes) is memory that kernels may touch; pinned memory of the host is, too.
  bool of_device(const void* at, size_t bytes) const;
  bool pinned(const void* at) const;

 private:
  Memory();
  std::map<uintptr_t, Block> blocks_;
  unsigned char* span_ = nullptr;
  size_t taken_ = 0;
};

}  // namespace hep::ptxr
