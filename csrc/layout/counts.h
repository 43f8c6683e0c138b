// The count vector: the only metadata that ranks exchange. One rank publishes R + N + E integers and a
// header of call parameters; R ranks together O(R * E). The routing map itself never travels.
#pragma once
#include <cstdint>

#include "common/world.h"

namespace hep {

inline constexpr int kCountHeaderWords = 16;

// Without ranks and nodes, tokens by expert alone: what clones are planned for.
struct CountsLayout {
  uint32_t num_ranks = 1, num_nodes = 1, num_experts = 1;

  HEP_HOST_DEVICE uint32_t rows_at() const { return kCountHeaderWords; }                // [R] tokens for rank r
  HEP_HOST_DEVICE uint32_t node_tokens_at() const { return rows_at() + num_ranks; }     // [N] tokens for node n
  HEP_HOST_DEVICE uint32_t experts_at() const { return node_tokens_at() + num_nodes; }  // [E] pairs for expert e
  HEP_HOST_DEVICE uint32_t words() const { return experts_at() + num_experts; }
  HEP_HOST_DEVICE uint64_t vector_bytes() const { return align_up(4ull * words(), 64); }
};

// All ranks' vectors as one rank sees them.
struct CountsView {
  CountsLayout layout;
  const unsigned char* base;

  HEP_HOST_DEVICE const uint32_t* vector(int rank) const {
    return reinterpret_cast<const uint32_t*>(base + rank * layout.vector_bytes());
  }
  HEP_HOST_DEVICE uint32_t header(int rank, int word) const { return vector(rank)[word]; }
  HEP_HOST_DEVICE uint32_t rows(int src, int dst) const { return vector(src)[layout.rows_at() + dst]; }
  HEP_HOST_DEVICE uint32_t node_tokens(int src, int node) const { return vector(src)[layout.node_tokens_at() + node]; }
  HEP_HOST_DEVICE uint32_t pairs(int src, int expert) const { return vector(src)[layout.experts_at() + expert]; }
};

}  // namespace hep
