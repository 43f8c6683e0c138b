// Slabs of the latency path: where every rank of the group may write into a rank's segment without asking. One for
// each source rank, and all of them twice, for steps of either parity. A slab begins with lines of a header, behind
// them a slot of lines for each token that a rank may have; a dispatch fills slots with messages, a combine with
// partial rows. Slots are of one size, whatever the rows of a call: what a call of other sizes left behind is then
// overwritten by lines or not at all.
#pragma once
#include "layout/counts.h"
#include "layout/line.h"

namespace hep {

struct LatencySlabs {
  uint32_t num_ranks = 0, tokens = 0;  // tokens of a rank at most; 0: there are no slabs
  uint32_t header_lines = 0, token_lines = 0;

  // token_bytes: of the largest message or partial row.
  static LatencySlabs make(const CountsLayout& counts, uint64_t tokens, uint64_t token_bytes) {
    return {counts.num_ranks, uint32_t(tokens), Line::lines_of(counts.vector_bytes()), Line::lines_of(token_bytes)};
  }
  HEP_HOST_DEVICE uint64_t slab_lines() const { return header_lines + uint64_t(tokens) * token_lines; }
  HEP_HOST_DEVICE uint64_t bytes() const { return tokens ? 2 * num_ranks * slab_lines() * sizeof(Line) : 0; }
  // From the first slab on, in lines.
  HEP_HOST_DEVICE uint64_t slab(uint64_t parity, int source) const {
    return (parity * num_ranks + uint64_t(source)) * slab_lines();
  }
  HEP_HOST_DEVICE uint64_t slot(uint32_t index) const { return header_lines + uint64_t(index) * token_lines; }
};

}  // namespace hep
