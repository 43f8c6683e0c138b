// The memory that stands for the blocks' shared memory: 128-byte aligned, reused, never cleared.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>

namespace hep::host {

class SharedMemoryPool {
 public:
  static constexpr size_t kAlign = 128;
  static size_t padded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  SharedMemoryPool() = default;
  ~SharedMemoryPool() { std::free(base_); }
  SharedMemoryPool(const SharedMemoryPool&) = delete;
  SharedMemoryPool& operator=(const SharedMemoryPool&) = delete;

  // At least `bytes`; what was there before stays or is gone. Invalidates what it returned earlier.
  std::byte* get(size_t bytes) {
    if (bytes > size_) {
      std::free(base_);
      size_ = 0;
      base_ = static_cast<std::byte*>(std::aligned_alloc(kAlign, padded(bytes)));
      if (base_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return base_;
  }

 private:
  std::byte* base_ = nullptr;
  size_t size_ = 0;
};

}  // namespace hep::host
