// Slabs of the latency path: where every rank of the group may write into a rank's segment without asking. One for
// each source rank, and all of them twice, for steps of either parity. A slab begins with lines of a header, behind
// them a slot of lines for each token that a rank may have; a dispatch fills slots with messages, a combine with
// partial rows. Slots are of one size, whatever the rows of a call: what a call of other sizes left behind is then
// overwritten by lines or not at all.
//
// Between nodes nothing keeps a line together. There a token's row, or a node's sum for it, travels along the rail as
// plain bytes with a signal of its own; the rank that it comes to, on the same rail, has a place for each of them.
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

// What a rank has for each of its rail peers, twice, for steps of either parity: a header and a place for each token,
// in the memory that it sends from as in that which it receives into, and a word for the signal of each.
struct LatencyRail {
  uint32_t num_peers = 0, tokens = 0;
  uint64_t header_bytes = 0, token_bytes = 0;

  static LatencyRail make(const CountsLayout& counts, uint64_t tokens, uint64_t token_bytes) {
    if (tokens == 0 || counts.num_nodes <= 1) return {};
    // A place holds what a slot does: whatever fits into its lines.
    return {counts.num_nodes - 1, uint32_t(tokens), align_up(counts.vector_bytes(), 128),
            align_up(uint64_t(Line::lines_of(token_bytes)) * Line::kPayloadBytes, 128)};
  }
  HEP_HOST_DEVICE uint64_t bytes() const { return 2 * num_peers * peer_bytes(); }
  HEP_HOST_DEVICE uint64_t signal_bytes() const { return 2 * num_peers * peer_words() * sizeof(uint64_t); }
  HEP_HOST_DEVICE uint64_t counter_bytes() const { return uint64_t(num_peers) * tokens * sizeof(uint64_t); }
  // In the memory of the rank on node `own`, what it has of `node`.
  HEP_HOST_DEVICE uint64_t header(uint64_t parity, int own, int node) const {
    return entry(parity, own, node) * peer_bytes();
  }
  HEP_HOST_DEVICE uint64_t token(uint64_t parity, int own, int node, uint32_t index) const {
    return header(parity, own, node) + header_bytes + index * token_bytes;
  }
  // Words from the first on; the header's, and behind it those of tokens.
  HEP_HOST_DEVICE uint64_t header_signal(uint64_t parity, int own, int node) const {
    return entry(parity, own, node) * peer_words();
  }
  HEP_HOST_DEVICE uint64_t token_signal(uint64_t parity, int own, int node, uint32_t index) const {
    return header_signal(parity, own, node) + 1 + index;
  }

 private:
  HEP_HOST_DEVICE uint64_t peer_bytes() const { return header_bytes + tokens * token_bytes; }
  HEP_HOST_DEVICE uint64_t peer_words() const { return 1 + uint64_t(tokens); }
  HEP_HOST_DEVICE uint64_t entry(uint64_t parity, int own, int node) const {
    return parity * num_peers + uint64_t(node < own ? node : node - 1);
  }
};

}  // namespace hep
