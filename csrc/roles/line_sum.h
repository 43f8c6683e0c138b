// Sums of what one lane has of a line of rows, in FP32: rows of In are added and rounded to P, rows of P are added and
// rounded to In. The bits are those of roles/slice_sum.h: a sum begins with -0, an empty one is 0.
#pragma once
#include <bit>
#include <cstring>
#include <type_traits>

#include "arch/concept.h"
#include "common/bugs.h"
#include "common/numeric.h"

namespace hep {

template <Arch A, class In, class P>
struct LineSum {
  static constexpr int kWords = A::kLineWords, kOfWord = 8 / int(sizeof(P)), kElems = kWords * kOfWord;
  static_assert(sizeof(In) == sizeof(P) || sizeof(In) == 2);
  // The elements of a word of P in a row of In: 8 bytes, or 4 of 16-bit rows.
  using InWord = std::conditional_t<sizeof(In) == sizeof(P), uint64_t, uint32_t>;

  float sums[kElems] = {};

  HEP_DEVICE void begin(bool empty) {
    HEP_UNROLL
    for (float& x : sums) x = empty ? 0.f : -0.f;
  }
  // Words m, m + 1, ... of a row of In, n of them.
  HEP_DEVICE void add_row(A& a, const unsigned char* row, uint32_t m, uint32_t n, bool scaled, float scale) {
    InWord words[kWords];
    HEP_UNROLL
    for (uint32_t i = 0; i < uint32_t(kWords); ++i)
      words[i] = i < n ? a.ld_global(reinterpret_cast<const InWord*>(row) + m + i) : InWord{};
    float v[kElems];
    widen<In>(words, v);
    HEP_UNROLL
    for (int e = 0; e < kElems; ++e) sums[e] += scaled ? v[e] * scale : v[e];
  }
  // Words of a partial row. Behind its last they may be anything, and so are the sums then.
  HEP_DEVICE void add(const uint64_t (&words)[kWords]) {
    float v[kElems];
    widen<P>(words, v);
    HEP_UNROLL
    for (int e = 0; e < kElems; ++e) sums[e] += v[e];
  }
  HEP_DEVICE void round_into(uint64_t (&words)[kWords]) const { round<P>(words); }
  HEP_DEVICE void store(A& a, unsigned char* row, uint32_t m, uint32_t n) const {
    InWord words[kWords];
    round<In>(words);
    HEP_UNROLL
    for (uint32_t i = 0; i < uint32_t(kWords); ++i)
      if (i < n) a.st_global(reinterpret_cast<InWord*>(row) + m + i, words[i]);
  }

 private:
  // A GPU has instructions for two elements; elsewhere loops over all of them are what compilers make vectors of.
  static constexpr bool kInPairs = A::kLanes == 32;

  template <class T, class Word>
  HEP_DEVICE static void widen(const Word (&words)[kWords], float* v) {
    if constexpr (kInPairs) {
      HEP_UNROLL
      for (int i = 0; i < kElems * int(sizeof(T)) / 4; ++i) {
        const uint32_t half = half_of(words, i);
        if constexpr (sizeof(T) == 4)
          v[i] = std::bit_cast<float>(half);
        else
          PairMath<A>::template widen<T>(half, v + 2 * i);
      }
    } else {
      T elements[kElems];
      std::memcpy(elements, words, sizeof elements);
      for (int e = 0; e < kElems; ++e) v[e] = to_float(elements[e]);
    }
  }
  template <class T, class Word>
  HEP_DEVICE void round(Word (&words)[kWords]) const {
    if constexpr (kInPairs) {
      HEP_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = 0;
      HEP_UNROLL
      for (int i = 0; i < kElems * int(sizeof(T)) / 4; ++i) {
        uint32_t half;
        if constexpr (sizeof(T) == 4)
          half = std::bit_cast<uint32_t>(from_float<float>(sums[i]));
        else
          half = PairMath<A>::template round<T>(sums[2 * i], sums[2 * i + 1]);
        constexpr int kHalves = int(sizeof(Word)) / 4;
        words[i / kHalves] |= Word(uint64_t(half) << (32 * (i % kHalves)));
      }
    } else {
      T elements[kElems];
      for (int e = 0; e < kElems; ++e) elements[e] = from_float<T>(sums[e]);
      std::memcpy(words, elements, sizeof elements);
    }
  }
  template <class Word>
  HEP_DEVICE static uint32_t half_of(const Word (&words)[kWords], int i) {
    constexpr int kHalves = int(sizeof(Word)) / 4;
    return uint32_t(uint64_t(words[i / kHalves]) >> (32 * (i % kHalves)));
  }
};

}  // namespace hep
