// The simulated machine itself: worlds repeat themselves, end by themselves, and say where a rule was broken.
#include <algorithm>
#include <set>
#include <string>

#include "arch/sim/zero_pages.h"
#include "check.h"
#include "common/bugs.h"
#include "sim/clone_oracle.h"
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

TEST(worlds_with_spare_slots_have_clones_that_take_tokens) {
  int worlds = 0, dense = 0, several_nodes = 0, by_lines = 0, cloned = 0, moved = 0, pushed = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const WorldSpec spec = sim::random_world(seed, -1);
    if (!spec.spare_slots) continue;
    ++worlds;
    dense += spec.dense;
    several_nodes += spec.num_nodes > 1;
    by_lines += spec.latency > 0;
    for (uint32_t plan = 0; plan < spec.plans; ++plan) {
      const sim::RoutingDecision logical = sim::decide(spec, plan, {});
      const sim::CloneOracle clones(spec, plan, logical);
      const bool any = std::ranges::any_of(clones.slot_expert, [](int32_t e) { return e >= 0; });
      cloned += any;
      pushed += any && sim::spare_shape_of(spec).spare_slots;
      for (size_t r = 0; r < logical.topk_idx.size(); ++r)
        for (size_t i = 0; i < logical.topk_idx[r].size(); ++i)
          if (const int64_t e = logical.topk_idx[r][i]; e >= 0)
            moved += clones.columns[size_t(e)] != clones.physical.topk_idx[r][i];
    }
  }
  CHECK(worlds > 80 && dense > 15 && several_nodes > 30 && by_lines > 30);
  CHECK(cloned > 100 && pushed > 60 && moved > 1000);
}

// Whichever moment it dies in: while clones are planned, tokens travel, weights are pushed or gradients come home. In
// routings where rank 2 holds clones and owns experts that have some: its peers wait for it as either.
TEST(rank_that_dies_among_clones_is_named) {
  std::set<std::string> sites;
  for (const uint32_t data_seed : {9u, 20u, 26u})
    for (uint32_t at = 0; at < 1000; ++at) {
      WorldSpec spec;
      spec.num_nodes = 1;
      spec.num_local_ranks = 4;
      spec.experts_per_rank = 3;
      spec.spare_slots = 1;
      spec.routing = 3;
      spec.rounds = 2;
      spec.seed = at;
      spec.data_seed = data_seed;
      spec.fault = 1;
      spec.fault_rank = 2;
      spec.fault_at = at;
      const WorldResult r = sim::run_world(spec, {});
      CHECK(r.failure.kind.empty());
      bool named = false, ended = false;
      for (const auto& o : r.ranks) {
        ended |= !o.error.empty();
        named |= o.peer == 2;
        if (o.peer == 2) sites.insert(o.site);
      }
      CHECK(named == ended);
    }
  for (const char* site : {"counts_from_node", "partial_rows", "clone_weights", "spare_slots_free", "clone_gradients",
                           "clone_gradients_taken"})
    if (!sites.contains(site)) throw check::Failure(std::string(site) + " was not seen");
}

TEST(log_is_the_same_for_the_same_seed) {
  WorldSpec spec;
  spec.seed = 11;
  RunOptions options;
  options.log = true;
  const WorldResult a = sim::run_world(spec, options), b = sim::run_world(spec, options);
  CHECK(a.log.size() > 100 && a.log == b.log);
}

// Lines land in any order whatever the strategy, and operations of both paths follow one another on one buffer.
TEST(latency_path_under_every_strategy_alone_and_beside_the_other) {
  for (uint32_t strategy = 0; strategy < uint32_t(sim::kNumStrategies); ++strategy)
    for (uint64_t seed = 0; seed < 12; ++seed) {
      WorldSpec spec;
      spec.num_nodes = 1 + uint32_t(seed / 2 % 3);
      spec.num_local_ranks = 1 + uint32_t(seed % (spec.num_nodes == 1 ? 5 : 3));
      spec.tokens = 6;
      spec.uneven = uint32_t(seed % 3);
      spec.hidden = seed % 4 ? 80 : 640;
      spec.dtype = uint32_t(seed % 3);
      spec.scale_bytes = seed % 2 ? 48 : 0;
      spec.permute = seed % 3 != 1;
      spec.num_blocks = 1 + uint32_t(seed % 3);
      spec.plans = spec.rounds = 2;
      spec.unlike = uint32_t(seed % 2);
      spec.latency = 1 + uint32_t(seed % 2);
      spec.latency_warps = 1 + uint32_t(seed % 3);
      spec.counter_base = seed % 4 == 3 ? (uint64_t(1) << 32) - 3 : 0;
      spec.strategy = strategy;
      spec.seed = spec.data_seed = seed;
      const WorldResult r = sim::run_world(spec, {});
      if (!r.failure.kind.empty())
        throw check::Failure(std::string(sim::strategy_name(sim::StrategyKind(strategy))) + ", seed " +
                             std::to_string(seed) + ": " + r.failure.what);
    }
}

TEST(lines_that_never_land_end_in_a_deadline_that_names_their_rank) {
  WorldSpec spec;
  spec.num_nodes = 1;
  spec.num_local_ranks = 3;
  spec.latency = 2;
  spec.fault = 1;
  spec.fault_rank = 2;
  spec.fault_at = 30;
  const WorldResult r = sim::run_world(spec, {});
  CHECK(r.failure.kind.empty());
  CHECK(std::ranges::any_of(r.ranks, [](const auto& o) { return o.peer == 2 && o.site.starts_with("latency_"); }));
}

// Between nodes: whatever the rail loses, a rank that waits for it, or for what would be handed on of it, names who has
// not sent it.
TEST(a_rail_that_loses_a_put_of_the_latency_path_ends_in_a_deadline) {
  for (uint32_t at = 0; at < 6; ++at) {
    WorldSpec spec;
    spec.num_nodes = 2;
    spec.num_local_ranks = 2;
    spec.tokens = 6;
    spec.latency = 2;
    spec.fault = at % 2 ? 2 : 3;
    spec.fault_rank = 2;
    spec.fault_node = 0;
    spec.fault_at = at;
    const WorldResult r = sim::run_world(spec, {});
    CHECK(r.failure.kind.empty());
    CHECK(std::ranges::any_of(r.ranks, [](const auto& o) { return o.peer == 2 && o.site.starts_with("latency_"); }));
  }
}

// 7168 bf16 with top-8: 121 lines carry 14,336 bytes of a row, its record and its weights.
TEST(fifteen_sixteenths_of_what_crosses_nvlink_by_lines_is_payload) {
  RunOptions options;
  options.timed = true;
  WorldSpec spec;
  spec.num_nodes = 1;
  spec.num_local_ranks = 4;
  spec.experts_per_rank = 4;
  spec.topk = 8;
  spec.hidden = 7168;
  spec.tokens = 16;
  spec.latency = 2;
  spec.latency_warps = 16;
  spec.smem_bytes = 128 * 1024;
  const WorldResult r = sim::run_world(spec, options);
  CHECK(r.failure.kind.empty());
  uint64_t crossed = 0, copies = 0;
  for (const auto& link : r.links)
    if (link.link == std::string("nvlink_egress")) crossed += link.bytes, copies += link.copies;
  const sim::RoutingDecision routing = sim::decide(spec, 0, {});
  const sim::Oracle oracle(spec, routing);
  uint64_t rows = 0;  // to other ranks
  for (int rank = 0; rank < 4; ++rank)
    for (const sim::Token& token : oracle.received[size_t(rank)]) rows += token.rank != rank;
  // Record, weights and row of a dispatch; a row of a combine. Their words, at fifteen a line of sixteen; half a line a
  // row is lost at most to its end, and headers are what the counts take.
  const uint64_t dispatched = rows * (14'336 + 16 + 8 * 8 + 4 * 8 + 8 * 4), combined = rows * 14'336;
  const uint64_t headers = 4 * 3 * (2 + 1) * 128;
  CHECK(crossed > 0 && copies > 0);
  CHECK(crossed <= (dispatched + combined) * 16 / 15 + 2 * rows * 128 + headers);
  CHECK(rows * 14'336 * 2 * 100 >= crossed * 92);  // of rows alone
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

TEST(pages_that_do_not_fit_say_what_is_short_and_leave_none) {
  sim::ZeroPages pages;
  pages.reserve(1 << 20);
  pages.data()[(1 << 20) - 1] = std::byte(1);
  std::string said;
  try {
    pages.reserve(size_t(1) << 62);
  } catch (const std::bad_alloc& e) {
    said = e.what();
  }
  CHECK(said.find("vm.max_map_count") != std::string::npos && said.find("fewer ranks or blocks") != std::string::npos);
  CHECK(pages.data() == nullptr);
  pages.reserve(4096);
  CHECK(pages.data()[4095] == std::byte(0));
}

}  // namespace
}  // namespace hep::test
