// Lines: what eight lanes have brought together is seen whole, what they have not is reported, for it can be torn.
#include "harness.h"

namespace hep::ptxm::test {
namespace {

const char* const kSync = "bar.warp.sync 0xffffffff;\n";
// %rd2: where a lane of the first eight has its part of the line at byte 128; %p1: of the others; %p7: has the flag.
const std::string kPlace =
    "mul.wide.u32 %rd2, %r1, 16; add.s64 %rd2, %rd2, %rd1; add.s64 %rd2, %rd2, 128; setp.gt.u32 %p1, %r1, 7; "
    "setp.eq.u32 %p7, %r1, 7; mov.b64 %rd3, 5;\n";
std::string store(const std::string& meet, const std::string& then = "") {
  return kPlace + meet + "@%p1 bra OUT; st.volatile.global.v2.u64 [%rd2], {%rd3, %rd3};\nOUT:" + then;
}
// Block 0 stores a line of fives; block 1 looks until the last word is there, and lanes that see no other five say so.
std::string hand_over(const std::string& give, const std::string& take) {
  return kPlace + "setp.eq.u32 %p2, %r2, 1; @%p2 bra TAKE;\n" + give +
         "@%p1 bra END; st.volatile.global.v2.u64 [%rd2], {%rd3, %rd3}; bra.uni END;\nTAKE:\n" + take +
         "@%p1 bra LOOKED; ld.volatile.global.v2.u64 {%rd4, %rd5}, [%rd2];\nLOOKED: setp.eq.s64 %p3, %rd5, 5; "
         "and.pred %p3, %p3, %p7; vote.sync.ballot.b32 %r5, %p3, 0xffffffff; setp.eq.s32 %p4, %r5, 0; @%p4 bra TAKE;\n"
         "@%p1 bra END; setp.eq.s64 %p5, %rd4, 5; @!%p5 st.global.u64 [%rd1], %rd3;\nEND:";
}

struct Seen {
  int torn = 0;
  bool reported = false;
  std::string all;
};
Seen by_seeds(const std::string& body) {
  Seen seen;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Outcome o = run(kernel(body), {.grid = 2, .block = 32, .seed = seed});
    seen.torn += o.out[0] == 5;
    seen.reported |= o.has("line", "without lanes");
    if (!o.reports.empty()) seen.all = o.all();
  }
  return seen;
}

HEP_CASE(a_line_of_lanes_that_met_is_seen_whole) {
  const Seen seen = by_seeds(hand_over(kSync, kSync));
  HEP_EXPECT(!seen.torn && seen.all.empty(), seen.all);
}
HEP_CASE(a_line_of_lanes_that_did_not_meet_is_torn_and_reported) {
  for (const bool store : {false, true}) {
    const Seen seen = by_seeds(store ? hand_over("", kSync) : hand_over(kSync, ""));
    HEP_EXPECT(seen.torn > 0 && seen.reported, (store ? "stored: " : "loaded: ") + std::to_string(seen.torn));
  }
}
HEP_CASE(a_line_lies_at_its_place) {
  const auto expect = [](const std::string& body, const char* words) {
    const Outcome o = run(kernel(body));
    HEP_EXPECT(words ? o.has("line", words) : o.reports.empty(), o.all());
  };
  expect(store(kSync), nullptr);
  expect(store("add.s64 %rd2, %rd2, 16;\n" + std::string(kSync)), "not one aligned line");
  expect(store("xor.b32 %r3, %r1, 1; mul.wide.u32 %rd2, %r3, 16; add.s64 %rd2, %rd2, %rd1;\n" + std::string(kSync)),
         "in the order of its lanes");
  expect(store("setp.gt.u32 %p1, %r1, 6;\n" + std::string(kSync)), "without lanes 7");
}
HEP_CASE(a_lane_that_has_left) {
  const std::string leave = "setp.eq.u32 %p2, %r1, 3; @%p2 exit;\n" + std::string(kSync);
  const Outcome stored = run(kernel(store(leave)));
  HEP_EXPECT(stored.has("line", "stored without lanes 3"), stored.all());
  const Outcome loaded =
      run(kernel(kPlace + leave + "@%p1 bra OUT; ld.volatile.global.v2.u64 {%rd4, %rd5}, [%rd2];\nOUT:"));
  HEP_EXPECT(loaded.reports.empty(), loaded.all());
}

}  // namespace
}  // namespace hep::ptxm::test
