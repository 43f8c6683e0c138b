// Memory that is zero and takes room only where it is touched. A timed world has ten thousands of blocks, each with
// a GPU's whole shared memory (227 KiB), and moves no rows: barriers and headers are all that is ever touched of it.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace hep::sim {

class ZeroPages {
 public:
  ZeroPages() = default;
  ~ZeroPages() { drop(); }
  ZeroPages(const ZeroPages&) = delete;
  ZeroPages& operator=(const ZeroPages&) = delete;

  std::byte* data() const { return data_; }

  // Has at least that many bytes from now on; what there was is gone where it had fewer. std::bad_alloc where address
  // space is short.
  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    drop();
    void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(p);
    bytes_ = bytes;
  }

 private:
  void drop() {
    if (data_) ::munmap(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace hep::sim
