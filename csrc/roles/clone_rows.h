// What rows of a routing over physical slots begin with, by all lanes of a warp, which meets before others of it store.
#pragma once
#include "arch/concept.h"

namespace hep {

// Zeros in bytes [begin, end), in words of 8 where these are whole.
template <Lanes A>
HEP_DEVICE void clear_bytes(A& a, unsigned char* bytes, uint64_t begin, uint64_t end) {
  const uint64_t base = reinterpret_cast<uint64_t>(bytes);
  const uint64_t first = (base + begin + 7) / 8 * 8 - base, last = (base + end) / 8 * 8 - base;
  const uint64_t head = first < end ? first : end, words = last > head ? (last - head) / 8 : 0, tail = head + 8 * words;
  const uint32_t me = uint32_t(a.lane());
  for (uint64_t i = begin + me; i < head; i += A::kLanes) a.st_global(bytes + i, uint8_t(0));
  auto* const whole = reinterpret_cast<uint64_t*>(bytes + head);
  for (uint64_t i = me; i < words; i += A::kLanes) a.st_global(whole + i, uint64_t(0));
  for (uint64_t i = tail + me; i < end; i += A::kLanes) a.st_global(bytes + i, uint8_t(0));
}

// The same row of `width` numbers `count` times.
template <Lanes A>
HEP_DEVICE void repeat_row(A& a, int64_t* HEP_RESTRICT rows, const int64_t* HEP_RESTRICT row, uint32_t width,
                           uint32_t count) {
  for (uint32_t t = 0; t < count; ++t, rows += width)
    for (uint32_t i = uint32_t(a.lane()); i < width; i += A::kLanes) a.st_global(rows + i, a.ld_global(row + i));
}

}  // namespace hep
