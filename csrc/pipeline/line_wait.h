// Waiting for a line: looks until it has come, or the deadline.
#pragma once
#include "arch/concept.h"
#include "common/bugs.h"

namespace hep {

// By all lanes of a warp together, see Arch::ld_line; `info` may differ between them.
template <Arch A>
HEP_DEVICE void wait_line(A& a, const Line* src, uint64_t flag, uint64_t* words, const WaitInfo& info) {
  if (a.ld_line(src, flag, words)) return;
  do {
    const bool has_flag = src && a.lane() % A::kLineLanes == A::kLineLanes - 1;
    a.poll_idle(info, flag, has_flag ? words[A::kLineWords - 1] : 0);
  } while (!a.ld_line(src, flag, words));
  a.poll_reset();
}

}  // namespace hep
