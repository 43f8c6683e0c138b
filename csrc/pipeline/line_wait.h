// A warp's lanes and the lines that they handle at once: who has which word, and waiting until lines have come.
#pragma once
#include "arch/concept.h"
#include "common/bugs.h"

namespace hep {

// This lane's part of lines that lie behind each other: of kAtOnce at a time, the `group`-th.
template <Arch A>
struct LinePart {
  static constexpr uint32_t kAtOnce = A::kLanes / A::kLineLanes;
  const uint32_t group, first;  // and the first of the lane's words in a line

  HEP_DEVICE explicit LinePart(const A& a)
      : group(uint32_t(a.lane()) / A::kLineLanes), first(uint32_t(a.lane()) % A::kLineLanes * A::kLineWords) {}

  // How many of its words, from its first in the line on, lie below `end` among all that lines hold.
  HEP_DEVICE uint32_t count(uint32_t line, uint32_t end) const {
    constexpr uint32_t kWords = A::kLineWords;
    const uint32_t begin = word(line), most = first + kWords == uint32_t(Line::kWords) ? kWords - 1 : kWords;
    return begin >= end ? 0 : end - begin < most ? end - begin : most;
  }
  HEP_DEVICE uint32_t word(uint32_t line) const { return line * Line::kFlag + first; }
  // f(i, m) for each of its words, the i-th, that is payload: the m-th of what all lines hold.
  template <class F>
  HEP_DEVICE void each_word(uint32_t line, F&& f) const {
    HEP_UNROLL
    for (uint32_t i = 0; i < uint32_t(A::kLineWords); ++i)
      if (first + i < uint32_t(Line::kFlag)) f(i, line * Line::kFlag + first + i);
  }
};

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
