// Eight elements between shared memory and FP32 registers, in 16-byte accesses. Rows are multiples of 16 bytes, so
// the last vec8 of an fp32 row may be half there: `left` says how many elements are, kWhole that all of them are.
#pragma once
#include <bit>

#include "arch/concept.h"
#include "common/numeric.h"

namespace hep {

inline constexpr int kVec8 = 8;

// As it lies in memory. Loads of several vec8s come first and are widened then, so that they wait together.
template <class T>
struct Vec8 {
  static constexpr int kWords = kVec8 * int(sizeof(T)) / 16, kWordElems = kVec8 / kWords;
  Vec16 w[kWords];

  template <bool kWhole, Arch A>
  HEP_DEVICE void load(A& a, const T* at, int left) {
    for (int i = 0; i < kWords; ++i)
      w[i] = kWhole || i * kWordElems < left ? a.ld_shared(reinterpret_cast<const Vec16*>(at) + i) : Vec16{};
  }
  template <Arch A>
  HEP_DEVICE void store(A& a, T* at, int left) const {
    for (int i = 0; i < kWords; ++i)
      if (i * kWordElems < left) a.st_shared(reinterpret_cast<Vec16*>(at) + i, w[i]);
  }
  template <Arch A>
  HEP_DEVICE void widen(float* v) const {
    for (int i = 0; i < kWords; ++i)
      for (int k = 0; k < 4; ++k) {
        float* to = v + i * kWordElems + k * kWordElems / 4;
        if constexpr (sizeof(T) == 4)
          *to = std::bit_cast<float>(w[i].w[k]);
        else
          PairMath<A>::template widen<T>(w[i].w[k], to);
      }
  }
  template <Arch A>
  HEP_DEVICE void round(const float* v) {
    for (int i = 0; i < kWords; ++i)
      for (int k = 0; k < 4; ++k) {
        const float* from = v + i * kWordElems + k * kWordElems / 4;
        if constexpr (sizeof(T) == 4)
          w[i].w[k] = std::bit_cast<uint32_t>(from_float<float>(*from));
        else
          w[i].w[k] = PairMath<A>::template round<T>(from[0], from[1]);
      }
  }
};

}  // namespace hep
