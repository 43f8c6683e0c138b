// Sums in fp32 of four elements at a time.
#pragma once
#include <bit>

#include "arch/concept.h"

namespace hep {

HEP_DEVICE Vec16 sum_of(Vec16 v, const Vec16& more) {
  HEP_UNROLL
  for (int k = 0; k < 4; ++k)
    v.w[k] = std::bit_cast<uint32_t>(std::bit_cast<float>(v.w[k]) + std::bit_cast<float>(more.w[k]));
  return v;
}

// A sum may begin at any element: those of Megatron's gradient buffers do. whole: it begins at a multiple of 16 bytes.
template <Lanes A>
HEP_DEVICE void add_to_sum(A& a, float* to, const Vec16& v, bool whole) {
  if (whole) {
    auto* const vector = reinterpret_cast<Vec16*>(to);
    a.st_global(vector, sum_of(a.ld_global(vector), v));
    return;
  }
  HEP_UNROLL
  for (int k = 0; k < 4; ++k) a.st_global(to + k, a.ld_global(to + k) + std::bit_cast<float>(v.w[k]));
}

}  // namespace hep
