// The planning role on every executor, with any number of warps, against the core's planner, which is the same role on
// one lane with wide registers in place of folds: same slots, same tokens, on random layers of every option.
#include "check.h"

#include <cmath>
#include <cstdlib>
#include <random>

#include "arch/host/launch.h"
#include "arch/sim/machine.h"
#include "arch/sim/sim_arch.h"
#include "balance/microbatch.h"
#include "kernels/plan_clones.h"
#include "mutants.h"

HEP_TEST_MAIN

namespace hep::test {
namespace {

using balance::MicrobatchPlanner;
using balance::MicrobatchShape;

struct Layer {
  MicrobatchShape shape;
  int rank = 0;                 // whose tokens are shared out
  std::vector<int64_t> counts;  // [R, E]
  std::vector<int32_t> owner;
};

struct Planned {
  std::vector<int32_t> expert;
  std::vector<int64_t> tokens, take, first;
  ClonePlan plan;

  explicit Planned(const MicrobatchShape& s)
      : expert(size_t(s.num_ranks * s.spare_slots), -7), tokens(expert.size(), -7), take(tokens), first(tokens) {}
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return int64_t(engine_() % uint64_t(n)); }
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[below(int64_t(all.size()))];
  }
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += double(engine_() >> 11) * 0x1p-53;
    return sum;
  }

 private:
  std::mt19937_64 engine_;
};

// Experts of a rank that are hot together: constructions miss, and the search has much to take back.
Layer layer_to_search(Random& random) {
  Layer l;
  MicrobatchShape& s = l.shape;
  s.num_ranks = int(4 + random.below(12));
  const int experts_of_rank = int(2 + random.below(5));
  s.num_experts = s.num_ranks * experts_of_rank;
  s.search_nodes = 200;
  std::vector<double> share;
  for (int r = 0; r < s.num_ranks; ++r) {
    const double together = 0.5 * random.normal();
    for (int i = 0; i < experts_of_rank; ++i) share.push_back(std::exp(0.3 * random.normal() + together));
  }
  for (int r = 0; r < s.num_ranks; ++r)
    for (double x : share) l.counts.push_back(int64_t(x * 1000) + random.below(50));
  for (int e = 0; e < s.num_experts; ++e) l.owner.push_back(e / experts_of_rank);
  return l;
}

// Any skew, empty ranks, owners anywhere; most with no option that rules out the search.
Layer random_layer(uint64_t seed) {
  Random random(seed);
  if (random.below(3) == 0) return layer_to_search(random);
  Layer l;
  MicrobatchShape& s = l.shape;
  s.num_nodes = int(1 + random.below(3));
  s.num_ranks = s.num_nodes * int(1 + random.below(8));
  const bool in_order = random.below(2);
  s.num_experts = in_order ? s.num_ranks * int(1 + random.below(6)) : int(1 + random.below(60));
  s.spare_slots = random.one_of({0, 1, 1, 1, 2, 3});
  s.epsilon_ppm = random.one_of({0, 10'000, 200'000});
  s.skip_below_ppm = random.one_of({0, 30'000});
  s.search_nodes = random.one_of({0, 7, 1000});
  s.near = random.below(2);
  if (random.below(2)) {
    s.within_node = random.below(2);
    s.min_chunk = random.one_of({1, 5, 200});
    s.instance_cost = random.one_of({0, 3, 64});
    s.tile = random.one_of({1, 8, 128});
    s.fan_out = random.below(3);
    s.strategy = random.one_of({CloneStrategy::kBest, CloneStrategy::kAlias, CloneStrategy::kBestFit});
  }
  const double sigma = random.one_of({0.0, 0.5, 1.5, 3.0});
  const int64_t tokens = random.one_of({1, 7, 100, 5000});
  std::vector<double> share(size_t(s.num_experts));
  for (double& x : share) x = std::exp(sigma * random.normal());
  for (int r = 0; r < s.num_ranks; ++r) {
    const bool empty = random.below(5) == 0;
    for (double x : share) l.counts.push_back(empty ? 0 : int64_t(x * double(random.below(2 * tokens))));
  }
  for (int e = 0; e < s.num_experts; ++e)
    l.owner.push_back(int32_t(in_order ? e * s.num_ranks / s.num_experts : random.below(s.num_ranks)));
  return l;
}

// 64 ranks of four experts each, or another shape of training.
[[maybe_unused]] Layer large_layer(uint64_t seed, int ranks, int experts, int slots, double sigma, double of_rank) {
  Random random(seed);
  Layer l;
  l.shape.num_ranks = ranks;
  l.shape.num_experts = experts;
  l.shape.spare_slots = slots;
  l.shape.search_nodes = 100;
  std::vector<double> share;
  double together = 0;
  for (int e = 0; e < experts; ++e) {
    if (e % (experts / ranks) == 0) together = of_rank * random.normal();
    share.push_back(std::exp(sigma * random.normal() + together));
  }
  for (int r = 0; r < ranks; ++r)
    for (double x : share) l.counts.push_back(int64_t(64 * x) + random.below(32));
  for (int e = 0; e < experts; ++e) l.owner.push_back(int32_t(e * ranks / experts));
  return l;
}

Planned by_the_core(const Layer& l) {
  Planned p(l.shape);
  const auto r = MicrobatchPlanner(l.shape).plan(l.counts.data(), l.owner.data(), p.expert.data(), p.tokens.data());
  p.plan = {r.max_cost_before, r.max_cost, r.target, r.num_copies, -1};
  balance::share_of_source(l.shape, l.counts.data(), l.owner.data(), p.expert.data(), p.tokens.data(), l.rank,
                           p.take.data(), p.first.data());
  return p;
}

// The memory of a kernel that plans a layer. launch(params, bytes of shared memory).
template <class Launch>
Planned by_the_kernel(const Layer& l, int warps, int lanes, const Launch& launch) {
  const MicrobatchShape& s = l.shape;
  const CountsLayout counts{uint32_t(s.num_ranks), uint32_t(s.num_nodes), uint32_t(s.num_experts)};
  std::vector<Vec16> vectors(size_t(s.num_ranks) * counts.vector_bytes() / sizeof(Vec16));
  auto* base = reinterpret_cast<unsigned char*>(vectors.data());
  for (int r = 0; r < s.num_ranks; ++r)
    for (int e = 0; e < s.num_experts; ++e)
      reinterpret_cast<uint32_t*>(base + uint64_t(r) * counts.vector_bytes())[counts.experts_at() + uint32_t(e)] =
          uint32_t(l.counts[size_t(r * s.num_experts + e)]);
  std::vector<int32_t> by_owner, first{0};
  for (int r = 0; r < s.num_ranks; ++r) {
    for (int e = 0; e < s.num_experts; ++e)
      if (l.owner[size_t(e)] == r) by_owner.push_back(e);
    first.push_back(int32_t(by_owner.size()));
  }
  Planned p(s);
  ClonePlanParams params;
  params.shape = s;
  params.tables = CloneLayout::make(s, warps, lanes);
  params.counts = {counts, base};
  params.owners = {l.owner.data(), by_owner.data(), first.data()};
  std::vector<CloneFlow> log(params.tables.flow_bytes / sizeof(CloneFlow));
  params.log = log.data();
  params.slot_expert = p.expert.data();
  params.slot_tokens = p.tokens.data();
  params.plan = &p.plan;
  params.rank = l.rank;
  params.share = {p.take.data(), p.first.data()};
  launch(params);
  return p;
}

template <class A>
Planned on_the_host(const Layer& l, int warps, uint64_t seed) {
  return by_the_kernel(l, warps, A::kLanes, [&](const ClonePlanParams& p) {
    host::LaunchConfig config;
    config.num_warps = warps;
    config.smem_bytes = p.tables.bytes;
    config.seed = seed;
    config.timeout_s = injected_bug == Bug::kNone ? 20 : 1;  // warps that count differently wait for each other
    host::launch<A>(config, [&](A& a, std::byte* smem) { plan_clones_kernel(a, p, smem); });
  });
}

[[maybe_unused]] Planned simulated(const Layer& l, int warps, uint64_t seed) {
  using Use = sim::Region::Use;
  return by_the_kernel(l, warps, 1, [&](const ClonePlanParams& p) {
    sim::MachineConfig config;
    config.seed = seed;
    sim::Machine machine(config);
    const auto add = [&](const char* name, const auto* of, size_t n, Use use) {
      auto* begin =
          reinterpret_cast<unsigned char*>(const_cast<std::remove_const_t<std::remove_pointer_t<decltype(of)>>*>(of));
      if (n) machine.memory().add({name, begin, n * sizeof *of, 0, use, false});
    };
    const size_t ranks = size_t(l.shape.num_ranks), slots = ranks * size_t(l.shape.spare_slots);
    add("counts", p.counts.base, ranks * p.counts.layout.vector_bytes(), Use::kInput);
    add("owner", p.owners.owner, l.owner.size(), Use::kInput);
    add("by_owner", p.owners.by_owner, l.owner.size(), Use::kInput);
    add("first", p.owners.first, ranks + 1, Use::kInput);
    add("log", p.log, p.tables.flow_bytes / sizeof *p.log, Use::kMetadata);
    add("slot_expert", p.slot_expert, slots, Use::kMetadata);
    add("slot_tokens", p.slot_tokens, slots, Use::kMetadata);
    add("take", p.share.take, slots, Use::kMetadata);
    add("first", p.share.first, slots, Use::kMetadata);
    machine.run([&](int rank) {
      sim::Launch launch;
      launch.kernel = "plan_clones";
      launch.num_blocks = 1;
      launch.num_warps = warps;
      launch.smem_bytes = p.tables.bytes;
      launch.body = [&](sim::Lane& lane) {
        sim::SimArch a(lane);
        plan_clones_kernel(a, p, lane.block->smem);
      };
      machine.launch(rank, std::move(launch));
    });
    if (!machine.failure().kind.empty()) throw check::Failure(machine.failure().what);
  });
}

void check_same(const Planned& p, const Planned& core, const std::string& which) {
  CHECK_EQ(which + (p.expert == core.expert ? "" : ": other experts"), which);
  CHECK_EQ(which + (p.tokens == core.tokens ? "" : ": other tokens"), which);
  CHECK_EQ(which + (p.take == core.take && p.first == core.first ? "" : ": other shares"), which);
  CHECK_EQ(p.plan.copies, core.plan.copies);
  CHECK_EQ(p.plan.target, core.plan.target);
  CHECK_EQ(p.plan.max_cost, core.plan.max_cost);
  CHECK_EQ(p.plan.max_cost_before, core.plan.max_cost_before);
}

template <class Plan>
void check_layers(uint64_t first, uint64_t layers, const Plan& plan) {
  for (uint64_t seed = first; seed < first + layers; ++seed) {
    Layer l = random_layer(seed);
    l.rank = int(seed % uint64_t(l.shape.num_ranks));
    check_same(plan(l, int(1 + seed % 7), seed), by_the_core(l), "layer " + std::to_string(seed));
  }
}

// More of them where asked for: HEP_CLONE_LAYERS=100000.
uint64_t layers(uint64_t usual) {
  const char* wanted = std::getenv("HEP_CLONE_LAYERS");
  return wanted ? std::strtoull(wanted, nullptr, 10) : usual;
}

template <class A>
[[maybe_unused]] void random_layers(uint64_t usual) {
  check_layers(1, layers(usual), &on_the_host<A>);
}
template <class A>
[[maybe_unused]] void training_layers() {
  for (const auto& [ranks, experts, slots] : {std::array{64, 256, 1}, {32, 256, 2}, {16, 256, 1}, {8, 64, 4}})
    for (const double of_rank : {0.0, 0.6}) {
      const Layer l = large_layer(uint64_t(ranks), ranks, experts, slots, 0.8, of_rank);
      check_same(on_the_host<A>(l, kPlanWarps, 1), by_the_core(l), "EP" + std::to_string(ranks));
    }
}

TEST(some_layers_have_clones) {
  int with_clones = 0, level = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const Planned p = by_the_core(random_layer(seed));
    with_clones += p.plan.copies > 0;
    level += p.plan.max_cost <= p.plan.target;
  }
  CHECK(with_clones > 60 && level > 60 && level < 180);
}
// Token by token: each clone gets as many as it takes, in order, the owner the first ones.
TEST(tokens_find_their_slots) {
  int redirected = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Layer l = random_layer(seed);
    l.rank = int(seed % uint64_t(l.shape.num_ranks));
    Planned p = by_the_core(l);
    std::vector<int32_t> words(CloneLinks::bytes(l.shape) / sizeof(int32_t));
    balance::OneLane lane;
    struct {
      const Layer& layer;
      int64_t operator()(int from, int expert) const {
        return layer.counts[size_t(from * layer.shape.num_experts + expert)];
      }
      int64_t sum(int begin, int end, int expert) const {
        return begin == end ? 0 : (*this)(begin, expert) + sum(begin + 1, end, expert);
      }
    } const count{l};
    ShareClonesRole role(lane, l.shape, l.owner.data(),
                         CloneLinks::at(reinterpret_cast<std::byte*>(words.data()), l.shape), count, p.expert.data(),
                         p.tokens.data());
    const CloneShare share{p.take.data(), p.first.data()};
    role.run(l.rank, share);
    std::vector<int64_t> come(p.take.size());
    for (int e = 0; e < l.shape.num_experts; ++e)
      for (int64_t n = 0, before = -1; n < count(l.rank, e); ++n) {
        const int slot = role.slot_of(e, n, share);
        CHECK(slot >= before);
        before = slot;
        if (slot < 0) continue;
        CHECK(p.expert[size_t(slot)] == e);
        ++come[size_t(slot)];
        ++redirected;
      }
    CHECK(come == p.take);
  }
  CHECK(redirected > 1000);
}
#if !defined(__SANITIZE_THREAD__)
TEST(plain_fibers) {
  random_layers<host::PlainFibers>(1500);
}
TEST(checked_one_lane) {
  random_layers<host::CheckedFibers<1>>(1500);
}
TEST(checked_four_lanes) {
  random_layers<host::CheckedFibers<4>>(1500);
}
TEST(checked_32_lanes) {
  random_layers<host::CheckedFibers<32>>(200);
}
TEST(training_shapes_on_32_lanes) {
  training_layers<host::CheckedFibers<32>>();
}
TEST(training_shapes_on_one_lane) {
  training_layers<host::CheckedFibers<1>>();
}
TEST(simulated_machine) {
  check_layers(1, layers(500), &simulated);
}
#endif
TEST(threads) {
  check_layers(1, 8, &on_the_host<host::PlainThreads<4>>);
}

#if defined(HEP_MUTANTS)
TEST(mutants_are_noticed) {
  for (const Bug bug : {Bug::kFoldUnmet, Bug::kDraftsUnmet, Bug::kFlowNotTakenBack, Bug::kShareNotLocalFirst}) {
    uint64_t seed = 1;
    for (bool caught = false; !caught; ++seed) {
      CHECK(seed < 2000);
      const Layer l = random_layer(seed);
      const Planned core = by_the_core(l);
      injected_bug = bug;
      try {
        check_same(on_the_host<host::CheckedFibers<4>>(l, int(1 + seed % 7), seed), core, "");
      } catch (const std::exception& e) {
        caught = true;
        std::printf("%s: layer %llu: %.100s\n", name_of(bug), static_cast<unsigned long long>(seed), e.what());
      }
      injected_bug = Bug::kNone;
    }
  }
}
#endif

}  // namespace
}  // namespace hep::test
