// Lines on every executor: whole, each with its flag, by groups of lanes. On the checked ones late and in any order.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "common/bugs.h"
#include "pipeline/line_wait.h"
#include "test_arch_host.h"

namespace hep::host::test {
namespace {

constexpr uint64_t word_of(uint64_t line, uint64_t step, int i) {
  return (line * 1000 + step) * 100 + uint64_t(i);
}

// This lane's words of a line, of which `number` says which it is.
template <class A>
struct Words {
  std::array<uint64_t, size_t(A::kLineWords)> w{};
  int first;

  explicit Words(A& a) : first(a.lane() % A::kLineLanes * A::kLineWords) {}
  void fill(uint64_t line, uint64_t step) {
    for (int i = 0; i < A::kLineWords; ++i) w[size_t(i)] = word_of(line, step, first + i);
  }
  bool are(uint64_t line, uint64_t step) const {
    for (int i = 0; i < A::kLineWords; ++i)
      if (first + i != Line::kFlag && w[size_t(i)] != word_of(line, step, first + i)) return false;
    return true;
  }
};

template <class A>
constexpr int kGroups = A::kLanes / A::kLineLanes;

// Two blocks that take turns, line by line, over many steps on the same memory; the answer is the licence to go on.
template <class A>
void lines_come_whole() {
  constexpr uint64_t kLines = 7, kSteps = 12;
  const auto there = std::make_unique<Line[]>(kLines), back = std::make_unique<Line[]>(kLines);
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    std::fill_n(there.get(), kLines, Line{});
    std::fill_n(back.get(), kLines, Line{});
    launch<A>(grid(2, 1, 0, seed), [&](A& a, std::byte*) {
      Words<A> words(a);
      const bool writes = a.block_idx() == 0;
      for (uint64_t step = 1; step <= kSteps; ++step)
        for (const bool sends : {writes, !writes})
          for (uint64_t first = 0; first < kLines; first += uint64_t(kGroups<A>)) {
            const uint64_t line = first + uint64_t(a.lane() / A::kLineLanes);
            Line* at = line < kLines ? (sends == writes ? there.get() : back.get()) + line : nullptr;
            words.fill(line, step);
            if (sends) a.st_line(at, words.w.data(), step);
            if (sends) continue;
            words.w.fill(0);
            wait_line(a, at, step, words.w.data(), kSite);
            CHECK(!at || words.are(line, step));
          }
    });
  }
}
ON_ALL(lines_come_whole);

template <class A>
void a_line_that_does_not_come_has_a_deadline() {
  const auto line = std::make_unique<Line>();
  LaunchConfig config = grid(1, 1);
  config.timeout_s = 0.05;
  std::array<uint64_t, size_t(A::kLineWords)> words{};
  try {
    launch<A>(config, [&](A& a, std::byte*) {
      auto own = words;
      wait_line(a, line.get(), 5, own.data(), {Site::kTestSite, 3, 4});
    });
    throw check::Failure("nothing was thrown");
  } catch (const DeadlineError& e) {
    CHECK(e.timeout_report().site == Site::kTestSite);
    CHECK_EQ(e.timeout_report().peer, 3);
    CHECK_EQ(e.timeout_report().expected, 5u);
  }
}
ON_ALL(a_line_that_does_not_come_has_a_deadline);

// Another flag, lower or higher, is no licence, for any lane of the warp, whichever of its lines it is.
template <class A>
void only_the_very_flag_counts() {
  const auto lines = std::make_unique<Line[]>(size_t(kGroups<A>));
  const auto at = [&](A& a) { return lines.get() + a.lane() / A::kLineLanes; };
  launch<A>(grid(1, 1), [&](A& a, std::byte*) {
    Words<A> words(a);
    words.fill(1, 1);
    a.st_line(at(a), words.w.data(), 7);
  });
  launch<A>(grid(1, 1), [&](A& a, std::byte*) {
    Words<A> words(a);
    CHECK(!a.ld_line(at(a), 6, words.w.data()));
    CHECK(!a.ld_line(at(a), 8, words.w.data()));
    CHECK(!a.ld_line(at(a), a.lane() / A::kLineLanes == 0 ? 8 : 7, words.w.data()));
    CHECK(a.ld_line(a.lane() / A::kLineLanes == 0 ? nullptr : at(a), 7, words.w.data()));
    CHECK(a.ld_line(at(a), 7, words.w.data()) && words.are(1, 1));
  });
}
ON_ALL(only_the_very_flag_counts);

// Whoever relies on the moment or on the order must fail in the tests.
template <class A>
void lines_are_late_and_in_any_order() {
  int late = 0, overtaken = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const auto lines = std::make_unique<Line[]>(2);
    launch<A>(grid(1, 1, 0, seed), [&](A& a, std::byte*) {
      Words<A> words(a);
      const bool first_group = a.lane() / A::kLineLanes == 0;
      for (uint64_t i = 0; i < 2; ++i) a.st_line(first_group ? lines.get() + i : nullptr, words.w.data(), 1);
      bool never_before = true;
      for (;;) {
        const bool second = a.ld_line(first_group ? lines.get() + 1 : nullptr, 1, words.w.data());
        const bool first = a.ld_line(first_group ? lines.get() : nullptr, 1, words.w.data());
        if (a.lane() == 0) {
          late += never_before && !second;
          overtaken += second && !first;
        }
        if (first) break;
        never_before = false;
        a.poll_idle(kSite, 1, 0);
      }
    });
    CHECK(lines[0].words[Line::kFlag] == 1 && lines[1].words[Line::kFlag] == 1);  // the kernel has ended
  }
  CHECK(late > 0 && overtaken > 0);
}
HEP_FIBERS(HEP_REGISTER(lines_are_late_and_in_any_order, CheckedFibers1);
           HEP_REGISTER(lines_are_late_and_in_any_order, CheckedFibers4);)

template <class A>
void rule_lines_begin_at_lines() {
  const auto lines = std::make_unique<Line[]>(2);
  for (const bool stores : {true, false}) try {
      launch<A>(grid(1, 1), [&](A& a, std::byte*) {
        Words<A> words(a);
        auto* off = reinterpret_cast<Line*>(lines[0].words + 2);
        stores ? a.st_line(off, words.w.data(), 1) : void(a.ld_line(off, 1, words.w.data()));
      });
      throw check::Failure("no rule was reported");
    } catch (const ProtocolError& e) {
      CHECK(e.rule() == Rule::kAlignment);
    }
}
ON_CHECKED(rule_lines_begin_at_lines);

#if defined(HEP_MUTANTS)
// A machine whose lines tear is found out, at any width.
void mutant_is_caught(Bug bug) {
  injected_bug = bug;
  const auto caught = [](void (*body)()) {
    try {
      body();
      return false;
    } catch (const check::Failure&) {
      return true;
    }
  };
  const bool all = caught(&lines_come_whole<CheckedFibers1>) && caught(&lines_come_whole<CheckedFibers4>);
  injected_bug = Bug::kNone;
  CHECK(all);
  CHECK(!caught(&lines_come_whole<CheckedFibers1>) && !caught(&lines_come_whole<CheckedFibers4>));
}
TEST(mutant_torn_line) {
  mutant_is_caught(Bug::kTornLine);
}
TEST(mutant_flag_before_payload) {
  mutant_is_caught(Bug::kFlagBeforePayload);
}
#endif

// As wide as a GPU's warp: four lines of eight lanes each.
using CheckedFibers32 = CheckedFibers<32>;
HEP_FIBERS(HEP_REGISTER(lines_come_whole, CheckedFibers32); HEP_REGISTER(only_the_very_flag_counts, CheckedFibers32);
           HEP_REGISTER(a_line_that_does_not_come_has_a_deadline, CheckedFibers32);)

}  // namespace
}  // namespace hep::host::test
