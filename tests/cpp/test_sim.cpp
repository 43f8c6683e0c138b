// The simulated machine itself: worlds repeat themselves, end by themselves, and say where a rule was broken.
#include <algorithm>
#include <string>

#include "check.h"
#include "common/bugs.h"
#include "sim/world_spec.h"

HEP_TEST_MAIN

namespace hep::test {
namespace {

using sim::RunOptions;
using sim::WorldResult;
using sim::WorldSpec;

TEST(random_worlds_are_right_and_repeat_themselves) {
  for (uint64_t seed = 3000; seed < 3150; ++seed) {
    const WorldSpec spec = sim::random_world(seed, -1);
    const WorldResult first = sim::run_world(spec, {});
    if (!first.failure.kind.empty()) throw check::Failure("seed " + std::to_string(seed) + ": " + first.failure.what);
    if (seed % 10 == 0) CHECK_EQ(sim::run_world(spec, {}).steps, first.steps);
  }
}

TEST(log_is_the_same_for_the_same_seed) {
  WorldSpec spec;
  spec.seed = 11;
  RunOptions options;
  options.log = true;
  const WorldResult a = sim::run_world(spec, options), b = sim::run_world(spec, options);
  CHECK(a.log.size() > 100 && a.log == b.log);
}

TEST(dead_rank_leaves_timeout_reports_and_no_fibers_behind) {
  WorldSpec spec;
  spec.fault = 1;
  spec.fault_rank = 2;
  spec.fault_at = 60;
  const WorldResult r = sim::run_world(spec, {});
  CHECK(r.failure.kind.empty());
  CHECK(std::count_if(r.ranks.begin(), r.ranks.end(), [](const auto& o) { return o.peer == 2; }) > 0);
}

TEST(timed_world_is_deterministic) {
  RunOptions options;
  options.timed = true;
  options.costs.nic_mbps = 50'000;
  for (auto& ps : options.costs.loop_ps) ps = 20'000;
  options.costs.tma_read_mbps = 100'000;
  WorldSpec spec;
  spec.tokens = 100;
  spec.hidden = 4096;
  spec.smem_bytes = 128 * 1024;
  const WorldResult a = sim::run_world(spec, options);
  spec.seed = 99;
  const WorldResult b = sim::run_world(spec, options);
  CHECK(a.failure.kind.empty() && !a.kernels.empty());
  CHECK_EQ(a.kernels.back().end, b.kernels.back().end);
}

#if defined(HEP_MUTANTS)
bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// A failing run of some seed, by mutant.
WorldResult run_mutant(Bug bug) {
  injected_bug = bug;
  WorldResult r;
  for (uint64_t seed = 1; seed <= 500 && r.failure.kind.empty(); ++seed)
    r = sim::run_world(sim::random_world(seed, -1), {});
  injected_bug = Bug::kNone;
  return r;
}

TEST(rule_that_a_mutant_breaks_is_reported_at_the_line_of_the_role) {
  const WorldResult r = run_mutant(Bug::kPutBeforeSlotStored);
  CHECK_EQ(r.failure.kind, std::string("rule"));
  CHECK_EQ(r.failure.rule, std::string("read_races_write"));
  for (const char* part : {"put reads bytes [", "rail_send_ring", "rank ", "block ", "role n2n", "rail_ring.h:"})
    CHECK(contains(r.failure.what, part));
}

TEST(deadlock_of_a_mutant_is_reported_with_who_waits_for_whom) {
  const WorldResult r = run_mutant(Bug::kNoCredits);
  CHECK_EQ(r.failure.kind, std::string("deadlock"));
  for (const char* part : {"waits at rail_slot_free for rank", "expects", "chunk_sweep.h:"})
    CHECK(contains(r.failure.what, part));
}

TEST(ring_of_ranks_of_a_mutant_is_named) {
  CHECK(contains(run_mutant(Bug::kStreamsInOrder).failure.what, "ring of ranks: "));
}
#endif

}  // namespace
}  // namespace hep::test
