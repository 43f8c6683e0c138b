// Words of the count vector's header: what a rank says of its call. The caller names the rest of the words
// (hidden, dtype, ...) so that every rank can check that all mean the same call.
#pragma once

namespace hep {

inline constexpr int kHeaderNumTokens = 0;
inline constexpr int kHeaderTopk = 1;  // most pairs of a token of this rank
inline constexpr int kHeaderFirstFree = 2;

}  // namespace hep
