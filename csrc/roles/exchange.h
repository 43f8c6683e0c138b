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
  // By all lanes of the same warps: vectors of this rail go to the node as they come, and who is late is counted.
  // False: a lane has left in its wait, and the warp must, for a vector that only some lanes copied would be announced
  // as whole.
  HEP_DEVICE static bool forward(A& a, Net& net, const P& p) {
    const int own = p.world.node(), local = p.world.local_rank();
    for (int i = a.warp_idx(); i < p.world.num_nodes; i += a.num_warps()) {
      const int node = node_behind(own, i, p.world.num_nodes), source = p.world.rank_of(node, local);
      if (i > 0) {
        const uint64_t begin = a.clock_ns();
        if (!injected(Bug::kCountsForwardedEarly))
          net.wait_signal(a, p.rail_flags + p.parity_flag_bytes() / 8 + node * kStride, p.sequence(),
                          {Site::kCountsFromRail, source, -1});
        if (!a.warp_whole()) return false;
        if (a.elect_one()) a.count_rank(p.waited + source, a.clock_ns() - begin);
      }
      hand_on(a, p, source);
    }
    return true;
  }
  // By all lanes of a block, which share the flags; what they acquired is the block's when it has met. counts: whom it
  // waits for goes into p.waited; of one block, for all of them wait. A vector of another node comes by a rank of this
  // one: who is late is told only when that rank's own is there, so every warp waits for its node first.
  HEP_DEVICE static void wait_all(A& a, const P& p, bool counts) {
    const int warp = a.warp_idx(), warps = a.num_warps();
    const int locals = p.world.num_local_ranks, begin = p.world.rank_of(p.world.node(), 0);
    if (p.world.num_nodes == 1)
      return wait_for(a, p, counts, (locals - 1 - warp + warps) / warps, [&](int i) { return warp + i * warps; });
    wait_for(a, p, counts && warp == 0, locals, [&](int i) { return begin + i; });
    const int others = p.world.num_ranks() - locals;
    wait_for(a, p, counts, (others - 1 - warp + warps) / warps, [&](int i) {
      const int other = warp + i * warps;
      return other < begin ? other : other + locals;
    });
  }

 private:
  // For the vectors of n ranks, by all lanes of a warp.
  template <class RankOf>
  HEP_DEVICE static void wait_for(A& a, const P& p, bool counts, int n, const RankOf& rank_of) {
    a.wait_ge_sys_warp(
        n, [&](int i) { return p.node_flags + rank_of(i) * kStride; },
        p.sequence() - injected(Bug::kCountsOneExchangeOld),
        [&](int i) {
          const int r = rank_of(i);
          const int on_rail = p.world.rank_of(p.world.node(), r % p.world.num_local_ranks);  // who hands it on
          if (on_rail == p.world.rank && r != on_rail) return WaitInfo{Site::kCountsFromRail, r, -1};  // as forward()
          return WaitInfo{Site::kCountsFromNode, on_rail, r};
        },
        [&](int i) {
          const int r = rank_of(i);
          return counts && r != p.world.rank ? p.waited + r : nullptr;  // what its own blocks take is no wait
        });
  }
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
