// Sums of the elements of one word (8 bytes) of rows, in FP32: rows of In are added and rounded to P, rows of P are
// added and rounded to In. The bits are those of roles/slice_sum.h: a sum begins with -0, an empty one is 0.
#pragma once
#include <bit>

#include "arch/concept.h"
#include "common/bugs.h"
#include "common/numeric.h"

namespace hep {

template <Arch A, class In, class P>
struct WordSum {
  static constexpr int kElems = 8 / int(sizeof(P)), kInBytes = kElems * int(sizeof(In));  // 8, or 4 of 16-bit rows
  static_assert(kInBytes == 8 || kInBytes == 4);
  using InWord = std::conditional_t<kInBytes == 8, uint64_t, uint32_t>;

  float sums[kElems];

  HEP_DEVICE void begin(bool empty) {
    HEP_UNROLL
    for (float& x : sums) x = empty ? 0.f : -0.f;
  }
  // The m-th word's elements of a row of In.
  HEP_DEVICE void add(A& a, const unsigned char* row, uint32_t m, bool scaled, float scale) {
    float v[kElems];
    widen<In>(a.ld_global(reinterpret_cast<const InWord*>(row) + m), v);
    HEP_UNROLL
    for (int e = 0; e < kElems; ++e) sums[e] += scaled ? v[e] * scale : v[e];
  }
  HEP_DEVICE void add(uint64_t partial) {
    float v[kElems];
    widen<P>(partial, v);
    HEP_UNROLL
    for (int e = 0; e < kElems; ++e) sums[e] += v[e];
  }
  HEP_DEVICE uint64_t partial() const { return round<P, uint64_t>(); }
  HEP_DEVICE void store(A& a, unsigned char* row, uint32_t m) const {
    a.st_global(reinterpret_cast<InWord*>(row) + m, round<In, InWord>());
  }

 private:
  template <class T, class Word>
  HEP_DEVICE static void widen(Word word, float* v) {
    HEP_UNROLL
    for (int i = 0; i < int(sizeof(Word) / 4); ++i) {
      const uint32_t half = uint32_t(uint64_t(word) >> (32 * i));
      if constexpr (sizeof(T) == 4)
        v[i] = std::bit_cast<float>(half);
      else
        PairMath<A>::template widen<T>(half, v + 2 * i);
    }
  }
  template <class T, class Word>
  HEP_DEVICE Word round() const {
    uint64_t word = 0;
    HEP_UNROLL
    for (int i = 0; i < int(sizeof(Word) / 4); ++i) {
      uint32_t half;
      if constexpr (sizeof(T) == 4)
        half = std::bit_cast<uint32_t>(from_float<float>(sums[i]));
      else
        half = PairMath<A>::template round<T>(sums[2 * i], sums[2 * i + 1]);
      word |= uint64_t(half) << (32 * i);
    }
    return Word(word);
  }
};

}  // namespace hep
