// The slabs of all ranks, for one step of the latency path, and who may write into them when.
//
// Credit. In step n a rank writes into slabs of parity n % 2, which were last used in step n - 2. It may: every step
// waits for a header of every rank, and this rank has ended step n - 1, so each of the others has begun that, hence has
// ended step n - 2, and with it all its looks at those slabs. No flag says so, and no step waits for a step behind the
// one before. A step that does not hear of every rank would break it, whatever its rows tell.
#pragma once
#include "common/bugs.h"
#include "common/numeric.h"
#include "common/world.h"
#include "layout/latency.h"
#include "pipeline/line_wait.h"

namespace hep {

// What all ranks must mean alike in a step, in the lower bits of its flags: lines of another call are no lines of this
// one, and whoever waits for them waits until the deadline. Sizes of a dispatch that routes are in its counts' header.
struct LatencyCall {
  enum Kind : uint64_t { kRoutes = 1, kDispatches, kCombines };
  static constexpr int kBits = 24;

  HEP_DEVICE static uint64_t word(Kind kind, uint32_t lines = 0, DType in = DType{}, DType partial = DType{}) {
    return (uint64_t(lines) << 6 | uint64_t(in) << 4 | uint64_t(partial) << 2 | kind) & ((1u << kBits) - 1);
  }
};

struct LatencyLink {
  World world;
  LatencySlabs slabs;
  const uint64_t* finished;    // steps of this rank before this one
  unsigned char* const* recv;  // [L] receive regions of the node's ranks, as mapped here
  uint64_t slabs_below;        // bytes from a rank's slabs to that region

  // Of the step, above what it is for.
  HEP_DEVICE uint64_t flag(uint64_t call) const { return (*finished + 1) << LatencyCall::kBits | call; }
  // Of `source`, in the segment of local rank `owner`.
  HEP_DEVICE Line* slab(uint64_t flag, int owner, int source) const {
    const uint64_t parity = injected(Bug::kOneSlabParity) ? 0 : flag >> LatencyCall::kBits & 1;
    return reinterpret_cast<Line*>(recv[owner] - slabs_below) + slabs.slab(parity, source);
  }
  HEP_DEVICE Line* slot(uint64_t flag, int owner, int source, uint32_t index) const {
    return slab(flag, owner, source) + slabs.slot(index);
  }
  // By all lanes of a warp together. A step is not to be taken for another: flags are compared whole.
  template <class A>
  HEP_DEVICE void wait(A& a, const Line* line, uint64_t flag, uint64_t* words, const WaitInfo& info) const {
    if (injected(Bug::kStaleStep) && a.ld_line(line, flag - (2ull << LatencyCall::kBits), words)) return;
    wait_line(a, line, flag, words, info);
  }
};

// One line a rank, from each to each: the header of a step that has no counts to tell.
template <Arch A>
struct LatencyHello {
  static constexpr int kAtOnce = int(LinePart<A>::kAtOnce);

  A& a;
  const LatencyLink& link;
  const uint64_t flag;

  // By all lanes of one warp.
  HEP_DEVICE void send() {
    const uint64_t words[A::kLineWords] = {};
    each([&](Line* line, int) { a.st_line(line, words, flag); }, true);
  }
  // Nobody is behind the step before this one any more.
  HEP_DEVICE void await() {
    if (injected(Bug::kEarlyCredit)) return;
    uint64_t words[A::kLineWords];
    each([&](Line* line, int rank) { link.wait(a, line, flag, words, {Site::kLatencyHeader, rank}); }, false);
  }

 private:
  template <class F>
  HEP_DEVICE void each(F&& f, bool theirs) {
    const int ranks = link.world.num_ranks(), own = link.world.rank;
    for (int first = 1; first < ranks; first += kAtOnce) {  // each begins behind itself
      const int i = first + a.lane() / A::kLineLanes, rank = (own + i) % ranks;
      f(i >= ranks ? nullptr : theirs ? link.slab(flag, rank, own) : link.slab(flag, own, rank), rank);
    }
  }
};

}  // namespace hep
