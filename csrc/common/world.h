// The shape of an EP group: N nodes x L local ranks, numbered node by node.
#pragma once
#include <cstdint>

#include "common/macros.h"

namespace hep {

struct World {
  int32_t num_nodes = 1, num_local_ranks = 1, rank = 0;

  HEP_HOST_DEVICE int num_ranks() const { return num_nodes * num_local_ranks; }
  HEP_HOST_DEVICE int node() const { return rank / num_local_ranks; }
  HEP_HOST_DEVICE int local_rank() const { return rank % num_local_ranks; }
  HEP_HOST_DEVICE int rank_of(int node, int local) const { return node * num_local_ranks + local; }
  // The rank on `node` that shares this rank's rail.
  HEP_HOST_DEVICE int rail_peer(int node) const { return rank_of(node, local_rank()); }
};

HEP_HOST_DEVICE constexpr uint64_t align_up(uint64_t n, uint64_t to) {
  return (n + to - 1) / to * to;
}
HEP_HOST_DEVICE constexpr uint64_t div_up(uint64_t n, uint64_t by) {
  return (n + by - 1) / by;
}

}  // namespace hep
