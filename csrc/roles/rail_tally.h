// Credits of the final sum. Rows of one rail chunk come to several blocks, and between rows of other peers' chunks; the
// leader of a reduce group counts them here and tells the chunk's counter now and then, not stage by stage.
#pragma once
#include "common/bugs.h"
#include "roles/sum_feed.h"

namespace hep {

// Of one peer, in shared memory.
struct alignas(16) Tally {
  uint32_t chunk, untold;  // stages of the chunk that are out of its slot
  uint32_t stages;         // that the chunk has
  uint32_t unused;
};

template <Arch A, Transport<A> Net>
struct RailTally {
  A& a;
  Net& net;
  const RailSide& rail;
  Vec16* tallies;  // [num_peers]

  // By one lane before the block meets.
  HEP_DEVICE static void clear(A& a, Vec16* tallies, uint32_t num_peers) {
    for (uint32_t i = 0; i < num_peers; ++i) a.st_shared(tallies + i, Vec16{});
  }
  // The leader is through with a stage. What is counted for a peer is told when the chunk is complete or a later one
  // comes, and at the end of the block's chunk of tokens. With a ring of one slot at once: there the later chunk cannot
  // come before (docs/design.md, flow control). Told in one place, for a transport's verb may be long code.
  HEP_DEVICE void take(const SumHead& head) {
    const bool row = head.is(SumHead::kRing), all = head.is(SumHead::kSettle);
    const bool at_once = rail.geometry.num_slots == 1 && !injected(Bug::kOneSlotNotAtOnce);
    const uint32_t mine = head.peer, end = all ? rail.num_peers : mine + 1;
    for (uint32_t i = all || !row ? 0 : mine; i < end;) {
      Tally t = std::bit_cast<Tally>(a.ld_shared(tallies + i));
      const bool is_mine = row && i == mine, later = is_mine && t.untold && t.chunk != head.chunk;
      if (is_mine && !later) t = {head.chunk, t.untold + 1, head.chunk_stages, 0};
      if (t.untold && (later || all || at_once || t.untold == t.stages)) {
        if (!injected(Bug::kCountedNeverCredited))
          RailReceiver::consume(a, net, rail.geometry, rail.peers[i], t.chunk, t.untold, t.stages);
        t.untold = 0;
      }
      a.st_shared(tallies + i, std::bit_cast<Vec16>(t));
      if (!later) ++i;
    }
  }
};

}  // namespace hep
