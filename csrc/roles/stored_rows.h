// What a lane has stored on ranks: tokens handed over, and their rows, of which one token may have several.
#pragma once
#include "roles/params.h"

namespace hep {

struct StoredRows {
  uint64_t tokens = 0, rows = 0;

  HEP_DEVICE void add(uint32_t stores) {
    ++tokens;
    rows += stores;
  }
  template <class A>
  HEP_DEVICE void count(A& a, const DispatchParams& p, uint64_t* to_tokens, uint64_t* to_bytes) const {
    const uint64_t row = p.message.scale_bytes + p.message.row_bytes;
    a.count_rank(to_tokens, tokens);
    a.count_rank(to_bytes, rows * row + tokens * p.message.metadata_bytes());
  }
};

}  // namespace hep
