// The order in which workers go through what rail peers have for this node, or it for them.
#pragma once
#include "common/world.h"

namespace hep {

// The first token of every peer, then the second of every peer: all rails are in use at any time, and what a peer sent
// first is looked for first. Peers have different numbers of tokens, so that some positions have none.
struct RailTokens {
  World world;
  const uint32_t* counts;  // [N] by node
  uint32_t peers, most;

  HEP_DEVICE static RailTokens of(const World& w, const uint32_t* of_nodes) {
    uint32_t most = 0;
    for (int n = 0; n < w.num_nodes; ++n)
      if (n != w.node() && of_nodes[n] > most) most = of_nodes[n];
    return {w, of_nodes, uint32_t(w.num_nodes) - 1, most};
  }
  // Positions.
  HEP_DEVICE uint32_t count() const { return peers * most; }
  // Of the i-th: the peer's node, which of its tokens, and whether there is one.
  HEP_DEVICE int node(uint32_t i) const {
    return int((uint32_t(world.node()) + 1 + i % peers) % uint32_t(world.num_nodes));
  }
  HEP_DEVICE uint32_t index(uint32_t i) const { return i / peers; }
  HEP_DEVICE bool has(uint32_t i) const { return index(i) < counts[node(i)]; }
};

}  // namespace hep
