// Clones that the ranks plan together, on every executor: worlds of threads, an engine each, against the core's planner
// and a walk over all tokens. Same plan, same share, same counts, and every pair in the same column.
#include "check.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "arch/host/errors.h"
#include "arch/sim/machine.h"
#include "balance/microbatch.h"
#include "kernels/instances/sim_executor.h"
#include "mutants.h"
#include "runtime/engine.h"
#include "thread_executor.h"
#include "world_case.h"

HEP_TEST_MAIN

namespace hep::test {
namespace {

using balance::MicrobatchPlanner;
using balance::MicrobatchShape;

// One micro-batch of one rank, as topk_idx or as a map.
struct Routed {
  uint32_t num_tokens = 0, topk = 1;
  bool dense = false;
  std::vector<int64_t> idx;        // [T, topk]
  std::vector<unsigned char> map;  // [T, E]
};

struct Step {
  std::vector<int64_t> columns;  // [E]
  std::vector<Routed> of_rank;   // [R]
  std::vector<int> num_blocks;   // [R]
};

struct Case {
  MicrobatchShape shape;
  std::string executor = "host_checked";
  std::vector<Step> steps;
  uint64_t seed = 0;
  double timeout_s = 20;

  int owners() const { return shape.num_experts / shape.num_ranks; }
  int width() const { return owners() + shape.spare_slots; }
};

Routed random_routing(Random& random, const Case& c) {
  const uint32_t experts = uint32_t(c.shape.num_experts);
  Routed r;
  r.num_tokens = random.one_in(5) ? 0 : random.below(random.of({3u, 40u, 150u}));
  r.topk = random.between(1, std::min(experts, 6u));
  r.dense = random.one_in(2);
  r.map.assign(size_t(r.num_tokens) * experts, 0);
  const uint32_t hot = random.below(experts), spread = random.of({1u, 4u, experts});
  for (uint32_t t = 0; t < r.num_tokens; ++t)
    for (uint32_t k = 0; k < r.topk; ++k) {
      const uint32_t e = (hot + random.below(random.one_in(4) ? experts : std::min(spread, experts))) % experts;
      const bool dropped = random.one_in(10);
      r.idx.push_back(dropped ? -1 : int64_t(e));  // an expert may be named twice
      if (!dropped) r.map[size_t(t) * experts + e] = 1;
    }
  return r;
}

Case random_case(uint64_t seed, const std::string& executor, int most_ranks) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.executor = executor;
  MicrobatchShape& s = c.shape;
  s.num_nodes = int(random.between(1, 2));
  s.num_ranks = s.num_nodes * int(random.between(1, uint32_t(most_ranks / s.num_nodes)));
  s.num_experts = s.num_ranks * int(random.between(1, 5));
  s.spare_slots = int(random.between(1, 3));
  s.epsilon_ppm = random.of({0, 10'000});
  s.skip_below_ppm = random.of({0, 30'000});
  s.within_node = random.one_in(4);
  s.search_nodes = 100;
  std::vector<int> slots(static_cast<size_t>(s.num_experts));
  std::iota(slots.begin(), slots.end(), 0);
  for (uint32_t i = 0, steps = random.between(2, 5); i < steps; ++i) {
    Step step;
    if (i == 0 || random.one_in(3))  // owners move between micro-batches
      for (size_t e = slots.size() - 1; e > 0; --e) std::swap(slots[e], slots[random.below(uint32_t(e) + 1)]);
    for (const int slot : slots) step.columns.push_back(slot + slot / c.owners() * s.spare_slots);
    for (int r = 0; r < s.num_ranks; ++r) {
      step.of_rank.push_back(random_routing(random, c));
      step.num_blocks.push_back(int(random.between(1, 4)));  // ranks need not agree
    }
    c.steps.push_back(std::move(step));
  }
  return c;
}

// What has to come of a step, the slow way.
struct Wanted {
  std::vector<int64_t> counts;  // [R, E]
  std::vector<int32_t> slot_expert;
  std::vector<int64_t> slot_tokens;
  int64_t max_cost_before, max_cost, target;
  struct OfRank {
    std::vector<int64_t> take, first, idx, columns;
    std::vector<unsigned char> map;
  };
  std::vector<OfRank> of_rank;

  Wanted(const Case& c, const Step& step) {
    const MicrobatchShape& s = c.shape;
    const size_t E = size_t(s.num_experts), R = size_t(s.num_ranks), slots = R * size_t(s.spare_slots);
    counts.assign(R * E, 0);
    for (size_t r = 0; r < R; ++r)
      for (size_t i = 0; i < step.of_rank[r].map.size(); ++i) counts[r * E + i % E] += step.of_rank[r].map[i];
    std::vector<int32_t> owner;
    for (const int64_t column : step.columns) owner.push_back(int32_t(column / c.width()));
    slot_expert.resize(slots), slot_tokens.resize(slots);
    const auto made = MicrobatchPlanner(s).plan(counts.data(), owner.data(), slot_expert.data(), slot_tokens.data());
    max_cost_before = made.max_cost_before, max_cost = made.max_cost, target = made.target;
    for (size_t r = 0; r < R; ++r) {
      OfRank of;
      of.take.resize(slots), of.first.resize(slots);
      balance::share_of_source(s, counts.data(), owner.data(), slot_expert.data(), slot_tokens.data(), int(r),
                               of.take.data(), of.first.data());
      const balance::RankPart part = balance::part_of_rank(s, counts.data(), owner.data(), step.columns.data(),
                                                           slot_expert.data(), slot_tokens.data(), int(r));
      const Routed& routed = step.of_rank[r];
      std::vector<int64_t> number(E, 0);
      of.map.assign(size_t(routed.num_tokens) * R * size_t(c.width()), 0);
      for (uint32_t t = 0; t < routed.num_tokens; ++t) {
        std::vector<int64_t> at = step.columns;
        for (const auto& redirect : part.redirects)
          if (routed.map[t * E + size_t(redirect.expert)] && number[size_t(redirect.expert)] >= redirect.first)
            at[size_t(redirect.expert)] += redirect.step;
        for (uint32_t k = 0; k < routed.topk; ++k) {
          const int64_t e = routed.idx[size_t(t) * routed.topk + k];
          of.idx.push_back(e < 0 ? -1 : at[size_t(e)]);
        }
        for (size_t e = 0; e < E; ++e) {
          if (routed.map[t * E + e]) {
            of.map[t * R * size_t(c.width()) + size_t(at[e])] = 1;
            ++number[e];
          }
          of.columns.push_back(at[e]);
        }
      }
      of_rank.push_back(std::move(of));
    }
  }
  int copies() const {
    return int(std::ranges::count_if(slot_expert, [](int32_t e) { return e >= 0; }));
  }
};

// What a rank finds of a step, and its memory.
struct Found {
  std::vector<int32_t> slot_expert;
  std::vector<int64_t> slot_tokens, take, first, counts, idx, columns, numbers, owners;
  std::vector<unsigned char> map;

  explicit Found(const Case& c, const Routed& routed)
      : slot_expert(size_t(c.shape.num_ranks * c.shape.spare_slots), -7),
        slot_tokens(slot_expert.size(), -7),
        take(slot_tokens),
        first(slot_tokens),
        counts(size_t(c.shape.num_ranks * c.shape.num_experts), -7),
        numbers(4, -7) {
    clear(c, routed);
  }
  void clear(const Case& c, const Routed& routed) {
    idx.assign(routed.idx.size() + 1, -7);
    columns.assign(routed.map.size() + 1, -7);
    map.assign(size_t(routed.num_tokens) * size_t(c.shape.num_ranks * c.width()) + 1, 7);
  }
  BalanceCall call(const Step& step, size_t rank, uint32_t digest) {
    BalanceCall b;
    owners = step.columns;
    b.columns = owners.data();
    b.owners_digest = digest;
    b.out_idx = idx.data();
    b.out_map = map.data();
    b.out_columns = columns.data();
    b.slot_expert = slot_expert.data();
    b.slot_tokens = slot_tokens.data();
    b.take = take.data();
    b.first = first.data();
    b.numbers = numbers.data();
    b.counts = counts.data();
    b.num_blocks = step.num_blocks[rank];
    return b;
  }
};

RoutingInput input(const Routed& routed) {
  static constexpr int64_t kNothing = 0;
  static constexpr unsigned char kNoRow = 0;
  RoutingInput in;
  in.num_tokens = routed.num_tokens;
  in.topk = routed.topk;
  if (routed.dense)
    in.routing_map = routed.map.empty() ? &kNoRow : routed.map.data();
  else
    in.topk_idx = routed.idx.empty() ? &kNothing : routed.idx.data();
  return in;
}

void expect(bool ok, const std::string& what) {
  if (!ok) throw check::Failure(what);
}

template <class T>
bool begins_with(const std::vector<T>& found, const std::vector<T>& wanted, T edge) {
  return std::equal(wanted.begin(), wanted.end(), found.begin()) && found[wanted.size()] == edge;
}

void check_routing(const Case& c, const Routed& routed, const Found& f, const Wanted::OfRank& w,
                   const std::string& at) {
  (void)c;
  if (routed.dense) {
    expect(begins_with<unsigned char>(f.map, w.map, 7), at + "map");
    // Where nothing was chosen, the column is the owner's.
    bool same = f.columns.back() == -7;
    for (size_t i = 0; i < routed.map.size(); ++i) same &= f.columns[i] == w.columns[i];
    expect(same, at + "columns");
  } else {
    expect(begins_with<int64_t>(f.idx, w.idx, -7), at + "topk_idx");
  }
}

void run_rank(const Case& c, const std::vector<Wanted>& wanted, Engine& engine, size_t r) {
  for (size_t i = 0; i < c.steps.size(); ++i) {
    const Step& step = c.steps[i];
    const Wanted& w = wanted[i];
    const std::string at =
        "seed " + std::to_string(c.seed) + ", step " + std::to_string(i) + ", rank " + std::to_string(r) + ": other ";
    const Routed& routed = step.of_rank[r];
    Found f(c, routed);
    BalanceCall call = f.call(step, r, uint32_t(std::accumulate(step.columns.begin(), step.columns.end(), int64_t(0))));
    engine.balance(input(routed), call);
    expect(f.counts == w.counts, at + "counts");
    expect(f.slot_expert == w.slot_expert, at + "experts in the slots");
    expect(f.slot_tokens == w.slot_tokens, at + "tokens of the slots");
    expect(f.numbers[0] == w.max_cost_before && f.numbers[1] == w.max_cost && f.numbers[2] == w.target, at + "numbers");
    expect(f.take == w.of_rank[r].take && f.first == w.of_rank[r].first, at + "share");
    check_routing(c, routed, f, w.of_rank[r], at);
    if (r % 2) continue;  // the same again by the plan that is there, as recomputation does, which no rank waits for
    f.clear(c, routed);
    call = f.call(step, r, 0);
    call.replayed = true;
    call.num_blocks = 1 + call.num_blocks % 3;
    engine.balance(input(routed), call);
    check_routing(c, routed, f, w.of_rank[r], at + "replayed ");
  }
}

BufferShape shape_of(const Case& c) {
  BufferShape shape;
  shape.num_nodes = uint32_t(c.shape.num_nodes);
  shape.num_local_ranks = uint32_t(c.shape.num_ranks / c.shape.num_nodes);
  shape.num_experts = uint32_t(c.shape.num_ranks * c.width());
  shape.clones = c.shape;
  return shape;
}
std::vector<Wanted> wanted_of(const Case& c) {
  std::vector<Wanted> wanted;
  for (const Step& step : c.steps) wanted.emplace_back(c, step);
  return wanted;
}

// All ranks in one thread, in an order by the seed; empty: nothing failed.
[[maybe_unused]] std::string simulate(const Case& c) {
  const std::vector<Wanted> wanted = wanted_of(c);
  const BufferShape shape = shape_of(c);
  const BufferLayout layout(shape);
  sim::MachineConfig config;
  config.num_nodes = int(shape.num_nodes);
  config.num_local_ranks = int(shape.num_local_ranks);
  config.seed = c.seed;
  std::vector<std::shared_ptr<Segment>> segments;
  sim::Machine machine(config);
  for (int r = 0; r < c.shape.num_ranks; ++r) {
    segments.push_back(Segment::private_memory(layout.total));
    machine.add_segment(r, segments.back()->data(), layout);
  }
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < c.shape.num_ranks; ++r) {
    const auto maker = [&](unsigned char* const*, uint64_t) {
      return std::make_unique<SimExecutor>(machine, r, uint64_t(1) << 16);
    };
    engines.push_back(std::make_unique<Engine>(r, shape, segments, 100.0, maker, c.seed));
    if (c.seed % 2) engines.back()->start_counters_at(uint64_t(1) << 40);
  }
  std::string failed;
  machine.run([&](int rank) {
    try {
      run_rank(c, wanted, *engines[size_t(rank)], size_t(rank));
    } catch (const std::exception& e) {
      if (failed.empty()) failed = e.what();
    }
  });
  return failed.empty() && !machine.failure().kind.empty() ? machine.failure().what : failed;
}

// The first rank's failure that is not another's; empty: none.
std::string run(const Case& c) {
  if (c.executor == "sim") return simulate(c);
  const std::vector<Wanted> wanted = wanted_of(c);
  const BufferShape shape = shape_of(c);
  std::vector<std::shared_ptr<Segment>> segments;
  for (int r = 0; r < c.shape.num_ranks; ++r) segments.push_back(Segment::private_memory(BufferLayout(shape).total));
  std::vector<std::unique_ptr<Engine>> engines;
  std::atomic<bool> stop = false;
  for (int r = 0; r < c.shape.num_ranks; ++r) {
    engines.push_back(make_engine(c.executor, r, shape, segments, c.timeout_s, c.seed));
    engines.back()->set_interrupt_check([&stop] { return stop.load(); });
  }
  std::string first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (size_t r = 0; r < engines.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        run_rank(c, wanted, *engines[r], r);
      } catch (const host::Interrupted&) {
      } catch (const std::exception& e) {
        std::lock_guard lock(mutex);
        if (first.empty()) first = e.what();
        stop = true;
      }
    });
  for (std::thread& thread : threads) thread.join();
  return first;
}

[[maybe_unused]] void random_worlds(const std::string& executor, uint64_t worlds, int most_ranks = 8) {
  for (uint64_t seed = 1; seed <= worlds; ++seed) {
    const std::string failed = run(random_case(seed, executor, most_ranks));
    if (!failed.empty()) throw check::Failure(executor + ": " + failed);
  }
}

}  // namespace

#if !defined(HEP_MUTANTS)
#if defined(__SANITIZE_THREAD__)
TEST(random_worlds_of_threads) {
  random_worlds("threads", 6, 4);
  random_worlds("threads_lanes4", 3, 3);
}
#else
TEST(worlds_have_clones_that_take_tokens) {
  int clones = 0, redirected = 0, empty = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const Case c = random_case(seed, "host", 8);
    for (const Step& step : c.steps) {
      const Wanted w(c, step);
      clones += w.copies() > 0;
      empty += w.copies() == 0;
      for (const auto& of : w.of_rank) redirected += std::ranges::any_of(of.take, [](int64_t n) { return n > 0; });
    }
  }
  CHECK(clones > 60 && empty > 5 && redirected > 200);
}
TEST(plain_fibers) {
  random_worlds("host", 150);
}
TEST(checked_one_lane) {
  random_worlds("host_checked", 100);
}
TEST(checked_four_lanes) {
  random_worlds("host_checked_lanes4", 60);
}
TEST(checked_mapped) {
  random_worlds("host_checked_mapped", 60);
}
TEST(checked_32_lanes) {
  random_worlds("host_checked_lanes32", 10, 4);
}
TEST(simulated_worlds) {
  random_worlds("sim", 60);
}
// Beside exchanges and dispatches nothing else is registered, and a buffer that plans no clones has no bytes for it.
TEST(memory_of_clones_is_told) {
  BufferShape shape;
  shape.num_local_ranks = 4;
  shape.num_experts = 8;
  const auto bytes = [&](const char* name) {
    for (const Region& region : BufferLayout(shape).regions)
      if (std::string(region.name) == name) return region.bytes;
    return ~uint64_t(0);
  };
  for (const char* name : {"clone_counts", "clone_counts_rail_flags", "clone_counts_node_flags"})
    CHECK_EQ(bytes(name), 0u);
  shape.clones.num_ranks = 4;
  shape.clones.num_experts = 4;
  shape.clones.spare_slots = 1;
  CHECK_EQ(bytes("clone_counts"), 2u * 4 * 128);  // 16 + 4 words, whole lines of 64 bytes
  CHECK_EQ(bytes("clone_counts_node_flags"), 4u * 64);
}
#endif
#else
TEST(mutants_are_noticed) {
  for (const Bug bug : {Bug::kCloneCountsToldEarly, Bug::kCloneCountsOneStepOld, Bug::kCloneShareOfAnother,
                        Bug::kBlocksDoNotMeet, Bug::kMeetingNotReset, Bug::kCountsForwardedEarly}) {
    std::string failed;
    uint64_t seed = 0;
    for (; failed.empty(); ++seed) {
      CHECK(seed < 500);
      Case c = random_case(seed, seed % 3 == 2 ? "sim" : seed % 2 ? "host_checked" : "host_checked_lanes4", 6);
      c.timeout_s = 1;
      injected_bug = bug;
      failed = run(c);
      injected_bug = Bug::kNone;
    }
    std::printf("%s: world %llu: %.100s\n", name_of(bug), static_cast<unsigned long long>(seed - 1), failed.c_str());
  }
}
#endif

}  // namespace hep::test
