// What all ranks must mean alike in a step of the latency path, in the lower bits of its flags: lines of another call
// are no lines of this one, and whoever waits for them waits until the deadline. Sizes of a dispatch that routes are in
// its counts' header.
#pragma once
#include "common/bugs.h"
#include "common/numeric.h"

namespace hep {

struct LatencyCall {
  enum Kind : uint64_t { kRoutes = 1, kDispatches, kCombines };
  static constexpr int kBits = 24;

  // words: of a row.
  HEP_DEVICE static uint64_t word(Kind kind, uint32_t words = 0, DType in = DType{}, DType partial = DType{}) {
    return (uint64_t(words) << 6 | uint64_t(in) << 4 | uint64_t(partial) << 2 | kind) & ((1u << kBits) - 1);
  }
  // Of the step that the flag is of.
  HEP_DEVICE static uint64_t parity(uint64_t flag) { return injected(Bug::kOneSlabParity) ? 0 : flag >> kBits & 1; }
};

}  // namespace hep
