// A copy that does not read what it overwrites. Rows that leave a rank are read next by another core, much later:
// pulling their old contents into this core's caches first would cost a third of the memory traffic.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hep::host {

// Not ordered with later stores until stream_fence(). dst 16-byte aligned.
inline void stream_copy(void* dst, const void* src, uint32_t bytes) {
#if defined(__SSE2__)
  if (bytes >= 1024 && reinterpret_cast<uintptr_t>(dst) % 16 == 0) {
    auto* to = static_cast<__m128i*>(dst);
    const auto* from = static_cast<const __m128i*>(src);
    uint32_t i = 0;
    for (; i + 4 <= bytes / 16; i += 4) {
      const __m128i a = _mm_loadu_si128(from + i), b = _mm_loadu_si128(from + i + 1);
      const __m128i c = _mm_loadu_si128(from + i + 2), d = _mm_loadu_si128(from + i + 3);
      _mm_stream_si128(to + i, a);
      _mm_stream_si128(to + i + 1, b);
      _mm_stream_si128(to + i + 2, c);
      _mm_stream_si128(to + i + 3, d);
    }
    std::memcpy(to + i, from + i, bytes - i * 16);
    return;
  }
#endif
  std::memcpy(dst, src, bytes);
}

inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace hep::host
