// Eight elements between shared memory and FP32 registers, in 16-byte accesses. Rows are multiples of 16 bytes, so
// the last octet of an fp32 row may be half there: `left` says how many elements are.
#pragma once
#include <bit>

#include "arch/concept.h"
#include "common/numeric.h"

namespace hep {

inline constexpr int kOctet = 8;

template <class T>
struct alignas(16) OctetWord {
  static constexpr int kElems = 16 / sizeof(T);
  T e[kElems];
};

template <Arch A, class T>
HEP_DEVICE void load_octet(A& a, const T* at, uint32_t left, float* v) {
  using Word = OctetWord<T>;
  const auto* words = reinterpret_cast<const Vec16*>(at);
  for (int w = 0; w < kOctet / Word::kElems; ++w) {
    const bool there = uint32_t(w * Word::kElems) < left;
    const Word word = there ? std::bit_cast<Word>(a.ld_shared(words + w)) : Word{};
    for (int e = 0; e < Word::kElems; ++e) v[w * Word::kElems + e] = to_float(word.e[e]);
  }
}

template <Arch A, class T>
HEP_DEVICE void store_octet(A& a, T* at, uint32_t left, const float* v) {
  using Word = OctetWord<T>;
  auto* words = reinterpret_cast<Vec16*>(at);
  for (int w = 0; w < kOctet / Word::kElems && uint32_t(w * Word::kElems) < left; ++w) {
    Word word;
    for (int e = 0; e < Word::kElems; ++e) word.e[e] = from_float<T>(v[w * Word::kElems + e]);
    a.st_shared(words + w, std::bit_cast<Vec16>(word));
  }
}

}  // namespace hep
