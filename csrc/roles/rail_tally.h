// Credits of the final sum. Rows of one rail chunk come to several blocks, and between rows of other peers' chunks; the
// leader of a reduce group counts them here and tells the chunk's counter now and then, not stage by stage.
#pragma once
#include "common/bugs.h"
#include "roles/sum_feed.h"

namespace hep {

// Stages of a peer's chunk that are out of its slot, in shared memory.
struct alignas(16) Tally {
  uint32_t chunk, untold;
  uint32_t stages;  // that the chunk has
  uint32_t unused;
};

inline uint64_t rail_tally_bytes(uint64_t num_peers) {
  return align_up(2 * sizeof(Tally) * num_peers, 128);
}

template <Arch A, Transport<A> Net>
struct RailTally {
  A& a;
  Net& net;
  const RailSide& rail;
  Vec16* tallies;  // [num_peers][2]: of the chunk in work, and of the one before it where that is to be told
  bool due = false;

  // By one lane before the block meets.
  HEP_DEVICE static void clear(A& a, Vec16* tallies, uint32_t num_peers) {
    for (uint32_t i = 0; i < 2 * num_peers; ++i) a.st_shared(tallies + i, Vec16{});
  }
  // The leader is through with a stage out of a ring. A sum has one row of a peer at most.
  HEP_DEVICE void count(const SumHead& head) {
    Vec16* const at = tallies + 2 * head.peer;
    Tally t = std::bit_cast<Tally>(a.ld_shared(at));
    if (t.untold && t.chunk != head.chunk) {
      a.st_shared(at + 1, std::bit_cast<Vec16>(t));
      t.untold = 0;
      due = true;
    }
    t = {head.chunk, t.untold + 1, head.chunk_stages, 0};
    a.st_shared(at, std::bit_cast<Vec16>(t));
    due |= t.untold == t.stages || at_once();
  }
  // Behind a tile, for a transport's verb may be a call, over which sums would have to be kept. What is counted for a
  // peer is told when the chunk is complete or a later one has come, and at the end of the block's chunk of tokens
  // (`all`). With a ring of one slot at once: there the later chunk cannot come before (docs/design.md, flow control).
  HEP_DEVICE void tell(bool all) {
    if (!due && !all) return;
    due = false;
    for (uint32_t i = 0; i < 2 * rail.num_peers; ++i) {
      const uint32_t word = i ^ 1;  // the chunk before comes first
      Tally t = std::bit_cast<Tally>(a.ld_shared(tallies + word));
      if (!t.untold || !(word % 2 || all || at_once() || t.untold == t.stages)) continue;
      if (!injected(Bug::kCountedNeverCredited))
        RailReceiver::consume(a, net, rail.geometry, rail.peers[word / 2], t.chunk, t.untold, t.stages);
      t.untold = 0;
      a.st_shared(tallies + word, std::bit_cast<Vec16>(t));
    }
  }

 private:
  HEP_DEVICE bool at_once() const { return rail.geometry.num_slots == 1 && !injected(Bug::kOneSlotNotAtOnce); }
};

}  // namespace hep
