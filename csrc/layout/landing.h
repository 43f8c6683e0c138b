// Where the rows of one dispatch come to lie on a rank that receives them. The rank says so beside its ready flag,
// before it raises that, in the segments of all ranks of its node. So nothing of it need be agreed, and it may differ
// in every operation and on every rank. It names its operation and the sizes of its rows: a rank that did something
// else instead (its call was refused, say) has left an old one, and nobody may follow that into memory lent again.
#pragma once
#include <cstdint>

#include "layout/buffer.h"
#include "layout/message.h"

namespace hep {

enum class LandIn : uint32_t {
  kReceiveRow,  // one row a token, its receive row
  kEveryPair,   // one row for each of the token's pairs here, its permuted row: nothing is left to copy
  kFirstPair,   // one row a token, the permuted row of its first pair here that has one; its rank copies the others
};

// Offsets from the start of the receive region, which peers know as mapped by them. The arena lies behind it, or is
// memory of its own, said as if it did.
struct alignas(16) Landing {
  uint64_t x = 0, scales = 0;  // of row 0; rows follow each other without a gap
  LandIn in = LandIn::kReceiveRow;
  uint32_t rows = 0, row_bytes = 0, scale_bytes = 0;
  uint64_t epoch = 0;           // of the operation
  uint32_t metadata_bytes = 0;  // of an entry
  uint32_t followed = 0;        // 1: the rank wants to be told what has landed (pipeline/landed_rows.h)

  // Whether rows of such messages may be stored here in this operation. A rank is never ahead of an operation that
  // others are in, but memory that stands for one may say that it is.
  HEP_HOST_DEVICE bool is_for(uint64_t operation, const MessageLayout& m) const {
    return epoch >= operation && row_bytes == m.row_bytes && scale_bytes == m.scale_bytes &&
           metadata_bytes == m.metadata_bytes();
  }

  static constexpr uint64_t kAt = 16;  // bytes behind the flag, in its cache line
};
static_assert(sizeof(Landing) == 48 && Landing::kAt + sizeof(Landing) <= BufferLayout::kFlagStride);

}  // namespace hep
