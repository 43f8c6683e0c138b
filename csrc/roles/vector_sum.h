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

// A lane's vectors of the sum of several copies, copy after copy, kVectors of kCopies of them on their way together.
// next(j): the copy behind j, -1: none. source(j): its vectors. at(w): which of them; one that may be read, always.
template <int kCopies, int kVectors, Lanes A, class Next, class Source, class At>
HEP_DEVICE void sum_copies(A& a, Vec16 (&total)[kVectors], int first, const Next& next, const Source& source,
                           const At& at) {
  for (int j = first; j >= 0;) {
    Vec16 v[kCopies][kVectors];
    const bool begins = j == first;
    int found = 0;
    HEP_UNROLL
    for (int u = 0; u < kCopies; ++u) {
      if (j < 0) continue;
      const Vec16* const from = source(j);
      HEP_UNROLL
      for (int w = 0; w < kVectors; ++w) v[u][w] = a.ld_global(from + at(w));
      found = u + 1;
      j = next(j);
    }
    HEP_UNROLL
    for (int u = 0; u < kCopies; ++u) {
      if (u >= found) continue;
      HEP_UNROLL
      for (int w = 0; w < kVectors; ++w) total[w] = begins && u == 0 ? v[u][w] : sum_of(total[w], v[u][w]);
    }
  }
}

// Vectors added to what lies at to(w), null: none, of which all are read before one is written. A sum may begin at any
// element: those of Megatron's gradient buffers do. whole: all begin at multiples of 16 bytes.
template <int kVectors, Lanes A, class To>
HEP_DEVICE void add_to_sums(A& a, const Vec16 (&v)[kVectors], const To& to, bool whole) {
  Vec16 sums[kVectors];
  HEP_UNROLL
  for (int w = 0; w < kVectors; ++w)
    if (const float* const from = to(w)) {
      if (whole) {
        sums[w] = a.ld_global(reinterpret_cast<const Vec16*>(from));
        continue;
      }
      HEP_UNROLL
      for (int k = 0; k < 4; ++k) sums[w].w[k] = std::bit_cast<uint32_t>(a.ld_global(from + k));
    }
  HEP_UNROLL
  for (int w = 0; w < kVectors; ++w)
    if (float* const from = to(w)) {
      const Vec16 sum = sum_of(sums[w], v[w]);
      if (whole) {
        a.st_global(reinterpret_cast<Vec16*>(from), sum);
        continue;
      }
      HEP_UNROLL
      for (int k = 0; k < 4; ++k) a.st_global(from + k, std::bit_cast<float>(sum.w[k]));
    }
}

}  // namespace hep
