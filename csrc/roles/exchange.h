// All-gather of the count vectors, hierarchical: one put to each rail peer, then every rank hands the vectors
// of its rail to the ranks of its node. Two parities of the vectors alternate: a rank can be at most one
// exchange ahead of any other, because finishing exchange k needs everybody's vector k, which a rank sends
// only after it has finished with the vectors of k - 1.
#pragma once
#include "roles/params.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct ExchangeRole {
  static constexpr uint64_t kStride = BufferLayout::kFlagStride / 8;

  // By one lane; this rank's vector is complete.
  HEP_DEVICE static void send(A& a, Net& net, const ExchangeParams& p) {
    const uint64_t bytes = p.layout.vector_bytes();
    const uint64_t at = p.parity_bytes() + p.world.rank * bytes, offset = p.counts_offset + at;
    const unsigned char* mine = p.counts + at;
    for (int i = 1; i < p.world.num_nodes; ++i) {
      const int node = (p.world.node() + i) % p.world.num_nodes;
      net.put_signal(a, node, offset, mine, bytes, p.rail_flag_offset, p.sequence());
      p.traffic->count_bytes += bytes;
    }
  }
  // By all lanes of one warp: vectors of this rail go to the node as they come. False: a lane has left in its wait, and
  // the warp must, for a vector that only some lanes copied would be announced as whole.
  HEP_DEVICE static bool forward(A& a, Net& net, const ExchangeParams& p) {
    for (int i = 0; i < p.world.num_nodes; ++i) {
      const int node = (p.world.node() + i) % p.world.num_nodes, source = p.world.rail_peer(node);
      if (i > 0) {
        if (kMutant != 28)
          net.wait_signal(a, p.rail_flags + node * kStride, p.sequence(), {Site::kCountsFromRail, source, -1});
        if (!a.warp_whole()) return false;
      }
      for (int l = 0; l < p.world.num_local_ranks; ++l) copy_vector(a, p, source, l);
    }
    return true;
  }
  HEP_DEVICE static void wait_all(A& a, const ExchangeParams& p) {
    for (int r = 0; r < p.world.num_ranks(); ++r) {
      const int via = p.world.rank_of(p.world.node(), r % p.world.num_local_ranks);
      a.wait_ge_sys(p.node_flags + r * kStride, p.sequence() - (kMutant == 44), {Site::kCountsFromNode, via, r});
    }
  }

 private:
  HEP_DEVICE static void copy_vector(A& a, const ExchangeParams& p, int source, int local) {
    const uint64_t bytes = p.layout.vector_bytes();
    if (kMutant == 38) a.st_release_sys(p.peer_node_flags[local] + source * kStride, p.sequence());
    if (local != p.world.local_rank()) {
      const auto* src = reinterpret_cast<const Vec16*>(p.counts + p.parity_bytes() + source * bytes);
      auto* dst = reinterpret_cast<Vec16*>(p.peer_counts[local] + p.parity_bytes() + source * bytes);
      for (uint64_t i = a.lane(); i < bytes / sizeof(Vec16); i += A::kLanes) a.st_global(dst + i, a.ld_global(src + i));
    }
    a.warp_sync();
    if (a.elect_one()) {
      if (local != p.world.local_rank()) p.traffic->count_bytes += bytes;
      a.st_release_sys(p.peer_node_flags[local] + source * kStride, p.sequence());
    }
  }
};

}  // namespace hep
