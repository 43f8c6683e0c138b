// Words of the count vector's header: what a rank says of its call. The caller names the rest of the words
// (hidden, dtype, ...) so that every rank can check that all mean the same call.
#pragma once
#include "common/macros.h"

namespace hep {

inline constexpr int kHeaderNumTokens = 0;
inline constexpr int kHeaderTopk = 1;  // most pairs of a token of this rank. Where the host gets a mail, the upper half
                                       // counts choices that cannot be kept: no such expert, or more than topk
inline constexpr int kHeaderFirstFree = 2;
inline constexpr unsigned kMostTopk = 0xFFFF;  // so that the upper half is free

// What no plan can hold, for the upper half of the topk word.
HEP_HOST_DEVICE unsigned header_excess(unsigned long long choices) {
  return unsigned(choices < kMostTopk ? choices : kMostTopk) << 16;
}

}  // namespace hep
