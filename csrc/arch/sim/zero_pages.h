// Memory that is zero and takes room only where it is touched. A timed world has ten thousands of blocks, each with
// a GPU's whole shared memory (227 KiB), and moves no rows: barriers and headers are all that is ever touched of it.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace hep::sim {

struct NoPages : std::bad_alloc {
  const char* what() const noexcept override {
    return "there is no room for another block's shared memory: it is a mapping of this process, of which the system "
           "grants vm.max_map_count (65530 where nobody changed it), each lane's stack takes two, and all lie in one "
           "address space, which ulimit -v may bound; take fewer ranks or blocks, or raise these";
  }
};

class ZeroPages {
 public:
  ZeroPages() = default;
  ~ZeroPages() { drop(); }
  ZeroPages(const ZeroPages&) = delete;
  ZeroPages& operator=(const ZeroPages&) = delete;

  std::byte* data() const { return data_; }

  // Has at least that many bytes from now on; what there was is gone where it had fewer. NoPages where mappings
  // or address space are short.
  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    drop();
    void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw NoPages();
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
