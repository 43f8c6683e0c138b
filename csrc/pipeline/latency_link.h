// The slabs of the node's ranks, for one step of the latency path, and who may write into them when. Slabs of ranks of
// other nodes are written in their names: those at a rank by the rank of its own node that shares the other's local
// number. In a dispatch that is who had the row along the rail; in a combine it is who has a partial row for it, where
// the rail begins.
//
// Credit. In step n a rank writes into slabs of parity n % 2, which were last used in step n - 2. It may: every step
// waits for a header of every rank of the node, and this rank has ended step n - 1, so each of the others has begun
// that, hence has ended step n - 2, and with it all its looks at those slabs. No flag says so, and no step waits for a
// step behind the one before. A step that does not hear of every rank would break it, whatever its rows tell.
#pragma once
#include "common/bugs.h"
#include "common/numeric.h"
#include "common/world.h"
#include "layout/latency.h"
#include "pipeline/latency_rail.h"
#include "pipeline/line_wait.h"

namespace hep {

struct LatencyLink {
  World world;
  LatencySlabs slabs;
  const uint64_t* finished;    // steps of this rank before this one
  unsigned char* const* recv;  // [L] receive regions of the node's ranks, as mapped here
  uint64_t slabs_below;        // bytes from a rank's slabs to that region
  LatencyRailLink rail;

  // Of the step, above what it is for.
  HEP_DEVICE uint64_t flag(uint64_t call) const { return (*finished + 1) << LatencyCall::kBits | call; }
  // Of `source`, in the segment of local rank `owner`.
  HEP_DEVICE Line* slab(uint64_t flag, int owner, int source) const {
    return reinterpret_cast<Line*>(recv[owner] - slabs_below) + slabs.slab(LatencyCall::parity(flag), source);
  }
  HEP_DEVICE Line* slot(uint64_t flag, int owner, int source, uint32_t index) const {
    return slab(flag, owner, source) + slabs.slot(index);
  }
  // Whose slab local rank `from` of this node has for its partial rows for ranks of `node`, and, of one such rank,
  // where: at itself, or at the rank of this node that shares its rail.
  HEP_DEVICE int named(int node, int from) const { return world.rank_of(node, from); }
  template <class Net>
  HEP_DEVICE int own() const {
    return kHasRail<Net> ? world.local_rank() : world.rank;
  }
  template <class Net>
  HEP_DEVICE int rank_of(int local) const {
    return kHasRail<Net> ? world.rank_of(world.node(), local) : local;
  }
  template <class Net>
  HEP_DEVICE int owner(int source) const {
    return kHasRail<Net> ? source % world.num_local_ranks : source;
  }
  template <class Net>
  HEP_DEVICE int name_for(int source) const {
    return kHasRail<Net> ? named(source / world.num_local_ranks, world.local_rank()) : world.rank;
  }
  // By all lanes of a warp together. A step is not to be taken for another: flags are compared whole.
  template <class A, class Late = Untold>
  HEP_DEVICE void wait(A& a, const Line* line, uint64_t flag, uint64_t* words, const WaitInfo& info,
                       Late&& late = {}) const {
    if (injected(Bug::kStaleStep) && a.ld_line(line, flag - (2ull << LatencyCall::kBits), words)) return;
    wait_line(a, line, flag, words, info, late);
  }
};

// The header of a step that has no counts to tell: one line from each rank of the node to each, and a signal along the
// rail from each to each.
template <Arch A, Transport<A> Net>
struct LatencyHello {
  static constexpr int kAtOnce = int(LinePart<A>::kAtOnce);

  A& a;
  Net& net;
  const LatencyLink& link;
  const uint64_t flag;

  // By all lanes of one warp.
  HEP_DEVICE void send() {
    if constexpr (kHasRail<Net>)
      for (int i = 1; i < link.world.num_nodes; ++i) link.rail.send_header(a, net, flag, node_behind(i), 0);
    const uint64_t words[A::kLineWords] = {};
    each([&](int local) { a.st_line(local < 0 ? nullptr : link.slab(flag, local, link.world.rank), words, flag); });
  }
  // Nobody is behind the step before this one any more.
  HEP_DEVICE void await() {
    if (!injected(Bug::kEarlyCredit)) {
      uint64_t words[A::kLineWords];
      each([&](int local) {
        const int rank = link.world.rank_of(link.world.node(), local < 0 ? 0 : local);
        const Line* line = local < 0 ? nullptr : link.slab(flag, link.world.local_rank(), rank);
        link.wait(a, line, flag, words, {Site::kLatencyHeader, rank});
      });
    }
    if constexpr (kHasRail<Net>)
      for (int i = 1; i < link.world.num_nodes; ++i) link.rail.await_header(a, net, flag, node_behind(i));
  }

 private:
  HEP_DEVICE int node_behind(int i) const { return (link.world.node() + i) % link.world.num_nodes; }
  // f(local rank), -1 for lanes that have none.
  template <class F>
  HEP_DEVICE void each(F&& f) {
    const int ranks = link.world.num_local_ranks, own = link.world.local_rank();
    for (int first = 1; first < ranks; first += kAtOnce) {  // each begins behind itself
      const int i = first + a.lane() / A::kLineLanes;
      f(i >= ranks ? -1 : (own + i) % ranks);
    }
  }
};

}  // namespace hep
