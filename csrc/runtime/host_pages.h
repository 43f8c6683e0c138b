// Large results of host operations are fresh memory, and touching it 4 KiB at a time can cost more than the copy.
#pragma once
#include <sys/mman.h>

#include <cstdint>

namespace hep {

// Asks for huge pages in [data, data + bytes). A hint: where the kernel does not do it nothing changes.
inline void prefer_huge_pages(void* data, uint64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uint64_t kHuge = 2u << 20;
  const uint64_t begin = (reinterpret_cast<uint64_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uint64_t end = (reinterpret_cast<uint64_t>(data) + bytes) / kHuge * kHuge;
  if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace hep
