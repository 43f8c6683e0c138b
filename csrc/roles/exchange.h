// All-gather of the count vectors, hierarchical: one put to each rail peer, then every rank hands the vectors
// of its rail to the ranks of its node. Two parities of the vectors alternate: a rank can be at most one
// exchange ahead of any other, because finishing exchange k needs everybody's vector k, which a rank sends
// only after it has finished with the vectors of k - 1. Flags of the rail alternate too: the vector of k + 1 may
// overtake that of k on its way to one rank, while the others' let their exchanges go on. Vectors of whatever layout,
// in whatever memory P says: those of a routed call, and those for which clones are planned.
#pragma once
#include "common/bugs.h"
#include "roles/params.h"

namespace hep {

template <Arch A, Transport<A> Net, class P = ExchangeParams>
struct ExchangeRole {
  static constexpr uint64_t kStride = BufferLayout::kFlagStride / 8;

  // By one lane of every warp of a block; this rank's vector is complete. Warps share the rail peers.
  HEP_DEVICE static void send(A& a, Net& net, const P& p) {
    const uint64_t bytes = p.layout.vector_bytes();
    const uint64_t at = p.parity_bytes() + p.world.rank * bytes, offset = p.counts_offset + at;
    const unsigned char* mine = p.counts + at;
    const uint64_t flag = p.rail_flag_offset + p.parity_flag_bytes(), sequence = p.sequence();
    const int own = p.world.node();
    for (int i = 1 + a.warp_idx(); i < p.world.num_nodes; i += a.num_warps()) {
      net.put_signal(a, node_behind(own, i, p.world.num_nodes), offset, mine, bytes, flag, sequence);
      a.count_rank(&p.traffic->count_bytes, bytes);
    }
  }
  // By all lanes of the same warps: vectors of this rail go to the node as they come. False: a lane has left in its
  // wait, and the warp must, for a vector that only some lanes copied would be announced as whole.
  HEP_DEVICE static bool forward(A& a, Net& net, const P& p) {
    const int own = p.world.node(), local = p.world.local_rank();
    for (int i = a.warp_idx(); i < p.world.num_nodes; i += a.num_warps()) {
      const int node = node_behind(own, i, p.world.num_nodes), source = p.world.rank_of(node, local);
      if (i > 0) {
        if (!injected(Bug::kCountsForwardedEarly))
          net.wait_signal(a, p.rail_flags + p.parity_flag_bytes() / 8 + node * kStride, p.sequence(),
                          {Site::kCountsFromRail, source, -1});
        if (!a.warp_whole()) return false;
      }
      hand_on(a, p, source);
    }
    return true;
  }
  // By all lanes of a block, which share the flags; what they acquired is the block's when it has met.
  HEP_DEVICE static void wait_all(A& a, const P& p) {
    const int first = a.warp_idx(), step = a.num_warps(), ranks = p.world.num_ranks();
    a.wait_ge_sys_warp(
        first < ranks ? (ranks - 1 - first) / step + 1 : 0,
        [&](int i) { return p.node_flags + (first + i * step) * kStride; },
        p.sequence() - injected(Bug::kCountsOneExchangeOld),
        [&](int i) {
          const int r = first + i * step;
          const int on_rail = p.world.rank_of(p.world.node(), r % p.world.num_local_ranks);  // who hands it on
          if (on_rail == p.world.rank && r != on_rail) return WaitInfo{Site::kCountsFromRail, r, -1};  // as forward()
          return WaitInfo{Site::kCountsFromNode, on_rail, r};
        });
  }

 private:
  // The i-th node from this rank's on, so that no node is everybody's first target.
  HEP_DEVICE static int node_behind(int own, int i, int num_nodes) {
    return own + i < num_nodes ? own + i : own + i - num_nodes;
  }
  // One rank's vector to every rank of the node, then the flags that say so.
  HEP_DEVICE static void hand_on(A& a, const P& p, int source) {
    const uint64_t bytes = p.layout.vector_bytes(), at = p.parity_bytes() + source * bytes;
    const int locals = p.world.num_local_ranks;
    const auto* src = reinterpret_cast<const Vec16*>(p.counts + at);
    if (injected(Bug::kFlagBeforeCounts)) announce(a, p, source);
    for (uint64_t i = a.lane(); i < bytes / sizeof(Vec16); i += A::kLanes) {
      const Vec16 words = a.ld_global(src + i);
      for (int l = 0; l < locals; ++l)
        if (l != p.world.local_rank()) a.st_global(reinterpret_cast<Vec16*>(p.peer_counts[l] + at) + i, words);
    }
    announce(a, p, source);
    if (a.elect_one()) a.count_rank(&p.traffic->count_bytes, bytes * uint64_t(locals - 1));
  }
  HEP_DEVICE static void announce(A& a, const P& p, int source) {
    a.st_release_sys_warp(
        p.world.num_local_ranks, [&](int l) { return p.peer_node_flags[l] + source * kStride; }, p.sequence());
  }
};

}  // namespace hep
