// The start of a kernel. What is queued behind a kernel that died must not take part: its ready flag would license
// stores that nobody waits for, its waits may be over by chance, and its results would be announced as done. A block
// takes part as a whole or not at all.
#pragma once
#include "arch/concept.h"
#include "common/bugs.h"

namespace hep {

// By all lanes of a block, before anything is announced, in place of the block_sync that opens the kernel. False:
// return at once.
template <Arch A>
HEP_DEVICE bool enter_kernel(A& a) {
  if (!injected(Bug::kGivenUpRankStarts) && a.given_up()) return false;
  return a.block_whole();
}

}  // namespace hep
