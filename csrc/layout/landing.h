// Where the rows of one dispatch come to lie on a rank that receives them. The rank says so beside its ready flag,
// before it raises that, in the segments of all ranks of its node. So nothing of it need be agreed, and it may differ
// in every operation and on every rank.
#pragma once
#include <cstdint>

#include "layout/buffer.h"

namespace hep {

enum class LandIn : uint32_t {
  kReceiveRow,  // one row a token, its receive row
  kEveryPair,   // one row for each of the token's pairs here, its permuted row: nothing is left to copy
  kFirstPair,   // one row a token, the permuted row of its first pair here that has one; its rank copies the others
};

// Offsets from the start of the receive region, which peers know as mapped by them. The arena lies behind it.
struct alignas(16) Landing {
  uint64_t x = 0, scales = 0;  // of row 0; rows follow each other without a gap
  LandIn in = LandIn::kReceiveRow;
  uint32_t unused[3] = {};

  static constexpr uint64_t kAt = 16;  // bytes behind the flag, in its cache line
};
static_assert(sizeof(Landing) == 32 && Landing::kAt + sizeof(Landing) <= BufferLayout::kFlagStride);

}  // namespace hep
