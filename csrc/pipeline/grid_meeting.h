// All blocks of a rank's kernel meet, which must be resident together. What any of them stored before, all see behind.
//
// Ordering. The block meets first, so its arrival (add_acq_rel_rank, by one lane) carries the accesses of all its
// lanes; the same lane waits until every block has arrived, and the block's second meeting hands on what it acquired.
#pragma once
#include "arch/concept.h"
#include "common/bugs.h"

namespace hep {

// By all lanes of all blocks, for the `round`-th time in this kernel. `arrived` is zero when the kernel starts; the
// last to leave makes it so again. False: a lane of this block has left in its wait, and so must all.
template <Arch A>
HEP_DEVICE bool meet_blocks(A& a, uint64_t* arrived, int round = 1) {
  a.block_sync();
  if (a.num_blocks() == 1) return true;
  if (a.warp_idx() == 0 && a.elect_one()) {
    a.add_acq_rel_rank(arrived, 1);
    if (!injected(Bug::kBlocksDoNotMeet))
      a.wait_ge_sys(arrived, uint64_t(round) * uint64_t(a.num_blocks()), {Site::kGridMeeting, -1, a.block_idx()});
  }
  return a.block_whole();
}

}  // namespace hep
