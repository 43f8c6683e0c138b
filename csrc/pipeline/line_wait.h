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
  // Of `all` words that lines hold, how many lie in the lines [begin, end).
  HEP_DEVICE static uint32_t words(uint32_t begin, uint32_t end, uint32_t all) {
    const uint32_t from = begin * Line::kFlag, to = end * Line::kFlag;
    return (to < all ? to : all) - (from < all ? from : all);
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

// How rows of `lines` lines are shared out among workers: by whole rows where there are enough of them, else several
// workers have parts of one. A row's lines take a warp a trip to memory for every few of them, so that a warp with a
// whole row would hold up all that have none. Four parts a worker: the last round is then short. A part has `least`
// such steps at least, for what a worker does before its first.
template <Arch A>
struct LineShare {
  uint32_t parts, lines_each, rows;

  HEP_DEVICE static LineShare of(uint32_t rows, uint32_t lines, uint32_t workers, uint32_t least, bool whole = false) {
    constexpr uint32_t kAtOnce = LinePart<A>::kAtOnce;
    const uint32_t steps = (lines + kAtOnce - 1) / kAtOnce, wanted = rows ? (4 * workers + rows - 1) / rows : 1;
    const uint32_t most = (steps + least - 1) / least, parts = whole || most == 0 ? 1 : wanted < most ? wanted : most;
    return {parts, (steps + parts - 1) / parts * kAtOnce, rows};
  }
  HEP_DEVICE uint32_t count() const { return rows * parts; }
  HEP_DEVICE uint32_t row(uint32_t i) const { return parts == 1 ? i : i / parts; }
  // The first line of the i-th, which has none where this is the row's end.
  HEP_DEVICE uint32_t first(uint32_t i) const { return parts == 1 ? 0 : i % parts * lines_each; }
  HEP_DEVICE uint32_t end(uint32_t first_line, uint32_t lines) const {
    return lines - first_line < lines_each ? lines : first_line + lines_each;
  }
};

// What a wait tells of itself, by all lanes of the warp that waits: that the first look has found something missing,
// and that all is there.
struct Untold {
  HEP_DEVICE void begin() {}
  HEP_DEVICE void end() {}
};

// By all lanes of a warp together, see Arch::ld_line; `info` may differ between them.
template <Arch A, class Late = Untold>
HEP_DEVICE void wait_line(A& a, const Line* src, uint64_t flag, uint64_t* words, const WaitInfo& info,
                          Late&& late = {}) {
  if (a.ld_line(src, flag, words)) return;
  late.begin();
  do {
    const bool has_flag = src && a.lane() % A::kLineLanes == A::kLineLanes - 1;
    a.poll_idle(info, flag, has_flag ? words[A::kLineWords - 1] : 0);
  } while (!a.ld_line(src, flag, words));
  a.poll_reset();
  late.end();
}

}  // namespace hep
