// Whole worlds against the reference: shapes and extremes by hand, then many random ones.
#include <algorithm>

#include "check.h"
#include "layout/headers.h"
#include "thread_executor.h"
#include "world.h"

HEP_TEST_MAIN

namespace hep::test {
namespace {

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer does not follow fibers, and has nothing to find in one thread: the thread executors are for it.
constexpr const char *kPlain = "threads", *kChecked = "threads", *kCheckedLanes4 = "threads_lanes4",
                     *kCheckedMapped = "threads_lanes4";
constexpr uint64_t kScale = 1;
#else
constexpr const char *kPlain = "host", *kChecked = "host_checked", *kCheckedLanes4 = "host_checked_lanes4",
                     *kCheckedMapped = "host_checked_mapped";
constexpr uint64_t kScale = 4;
#endif

WorldCase world(uint32_t nodes, uint32_t locals, uint32_t experts_per_rank, const char* executor = kChecked) {
  WorldCase w;
  w.num_nodes = nodes;
  w.num_local_ranks = locals;
  w.num_experts = nodes * locals * experts_per_rank;
  w.executor = executor;
  return w;
}
std::vector<uint32_t> all(const WorldCase& w, uint32_t tokens) {
  return std::vector<uint32_t>(w.num_ranks(), tokens);
}

// Dispatch and combine of plan 0, permuted and not.
void add_round(WorldCase& w, size_t plan, int num_blocks) {
  for (const bool permute : {true, false}) {
    w.ops.push_back(dispatch_op(w, plan, num_blocks));
    w.ops.back().permute = permute;
    w.ops.push_back(combine_op(w, plan, num_blocks));
    w.ops.back().permute = permute;
    w.ops.back().multiply = permute;
  }
}

// A rank by itself, with two experts and rows of 64 bytes.
BufferShape lone_shape(uint64_t tokens) {
  BufferShape shape;
  shape.num_experts = 2;
  shape.max_tokens = tokens;
  shape.recv_rows = 2 * tokens;
  shape.row_bytes = shape.partial_row_bytes = 64;
  return shape;
}
std::unique_ptr<Engine> lone_engine(const BufferShape& shape) {
  return make_engine(kPlain, 0, shape, {Segment::private_memory(BufferLayout(shape).total)}, 20, 1);
}
RoutingInput one_expert_each(const std::vector<int64_t>& experts) {
  RoutingInput in;
  in.topk_idx = experts.data();
  in.num_tokens = uint32_t(experts.size());
  in.topk = 1;
  return in;
}
// Of the plan of such a rank; it lies in `bytes`.
unsigned char* block(std::vector<unsigned char>& bytes, uint64_t size) {
  bytes.assign(size + 128, 0xff);
  return reinterpret_cast<unsigned char*>(align_up(uint64_t(bytes.data()), 128));
}
DispatchCall call_of(const std::vector<unsigned char>& x, std::vector<unsigned char>& out, uint64_t rows) {
  DispatchCall call;
  call.x = x.data();
  call.out_x = out.data();
  call.row_bytes = 64;
  call.out_rows = rows;
  call.permute = true;
  return call;
}

void check_seeds(const CaseLimits& limits, uint64_t first_seed, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) check_world(random_case(first_seed + i, limits));
}

}  // namespace

TEST(every_shape_up_to_four_by_four) {
  for (uint32_t nodes = 1; nodes <= 4; ++nodes)
    for (uint32_t locals = 1; locals <= 4; ++locals) {
      if (kScale == 1 && nodes * locals > 6) continue;
      WorldCase w = world(nodes, locals, 2, nodes % 2 ? kPlain : kChecked);
      w.seed = nodes * 10 + locals;
      Random r(w.seed);
      w.plans.push_back(route_by(w, all(w, 9), 3, [&](int, uint32_t) {
        return std::vector<int>{int(r.below(w.num_experts)), int(r.below(w.num_experts)), int(r.below(w.num_experts))};
      }));
      w.plans[0].num_tokens[0] = 9;
      w.plans[0].pad_multiple = 4;
      add_round(w, 0, 2);
      for (OpCase& op : w.ops)
        for (int& blocks : op.num_blocks) blocks = int(r.between(1, 3));  // ranks need not agree
      check_world(w);
    }
}

TEST(nobody_has_tokens) {
  WorldCase w = world(2, 2, 2);
  w.plans.push_back(route_by(w, all(w, 0), 2, [](int, uint32_t) { return std::vector<int>{}; }));
  add_round(w, 0, 3);
  w.ops[0].extra_rows = 5;  // of a static budget; they must be zero
  check_world(w);
}

TEST(one_rank_has_all_tokens) {
  WorldCase w = world(3, 2, 1);
  w.plans.push_back(route_by(w, {0, 0, 0, 50, 0, 0}, 6, [](int, uint32_t t) {
    std::vector<int> experts;
    for (uint32_t e = 0; e <= t % 6; ++e) experts.push_back(int(e));
    return experts;
  }));
  add_round(w, 0, 2);
  check_world(w);
}

TEST(everything_to_one_expert) {
  WorldCase w = world(2, 3, 4);
  w.plans.push_back(route_by(w, all(w, 17), 2, [](int, uint32_t) { return std::vector<int>{7, 7}; }));
  add_round(w, 0, 2);
  check_world(w);
}

TEST(topk_40_with_every_expert_of_every_node) {
  WorldCase w = world(2, 2, 10);
  w.plans.push_back(route_by(w, all(w, 7), 40, [](int rank, uint32_t t) {
    std::vector<int> experts;
    for (int k = 0; k < 40; ++k) experts.push_back((k * 7 + rank + int(t)) % 40);
    return experts;
  }));
  add_round(w, 0, 1);
  check_world(w);
}

TEST(rows_of_40_kilobytes_with_scales) {
  for (const char* executor : {kPlain, kChecked}) {
    WorldCase w = world(2, 2, 2, executor);
    w.chunk_tokens = 2;
    w.plans.push_back(route_by(w, {5, 0, 3, 1}, 3,
                               [](int rank, uint32_t t) { return std::vector<int>{int(t) % 8, (rank + 3) % 8, 6}; }));
    add_round(w, 0, 2);
    for (OpCase& op : w.ops) {
      op.row_bytes = 40000;
      op.scale_bytes = 1248;
      op.hidden = 20000;
    }
    w.ops[1].fp32_partials = true;
    w.ops[1].hidden = 9992;  // the last tile is not full
    w.ops[2].row_bytes = 2 * 16384;
    w.ops[2].scale_bytes = 0;
    check_world(w);
  }
}

// A sender that waits for one peer's credit starves the others. Here 0 would wait for 1 (to consume), 1 for 2 (to
// send), 2 for 3 (to consume) and 3 for 0 (to send).
TEST(skewed_nodes_do_not_wait_in_a_ring) {
  for (const char* executor : {kPlain, kChecked, kCheckedLanes4, kCheckedMapped}) check_world(skewed_world(executor));
}

TEST(chunks_go_round_the_ring_many_times) {
  for (const uint32_t slots : {1u, 2u, 3u}) {
    WorldCase w = world(3, 1, 2);
    w.chunk_tokens = 1;
    w.rail_slots = slots;
    w.plans.push_back(route_by(w, {13, 5, 8}, 3, [](int rank, uint32_t t) {
      return std::vector<int>{int(t) % 6, (int(t) + rank) % 6, rank};
    }));
    for (int i = 0; i < 4; ++i) add_round(w, 0, 1 + i % 3);
    check_world(w);
  }
}

TEST(cached_plans_interleave) {
  WorldCase w = world(2, 2, 2);
  Random r(5);
  for (uint32_t topk = 1; topk <= 3; ++topk)
    w.plans.push_back(route_by(w, all(w, 6 + topk), topk, [&](int, uint32_t) {
      std::vector<int> experts;
      for (uint32_t k = 0; k < topk; ++k) experts.push_back(int(r.below(w.num_experts)));
      return experts;
    }));
  for (const size_t plan : {0, 1, 2, 0, 2, 1, 0}) {
    w.ops.push_back(dispatch_op(w, plan, 1 + int(plan)));
    if (plan != 1) w.ops.push_back(combine_op(w, plan, 3 - int(plan)));
  }
  w.ops.push_back(combine_op(w, 1, 2));  // long after its dispatch
  check_world(w);
}

TEST(budgets_and_capacity_drop_what_they_must) {
  for (const uint64_t capacity : {1, 3, 11, 1000}) {
    WorldCase w = world(2, 2, 3);
    w.plans.push_back(route_by(w, all(w, 10), 4, [](int rank, uint32_t t) {
      return std::vector<int>{int(t) % 12, (int(t) * 5 + rank) % 12, 3, 4};
    }));
    w.recv_capacity = capacity;
    w.plans[0].budgets = {0, 7, std::nullopt, 19};
    w.plans[0].pad_multiple = 8;
    add_round(w, 0, 2);
    check_world(w);
  }
}

// By lines: the same rows, weights, plans and sums, on the same buffer, operations of both paths mixed at will.
TEST(latency_path_of_every_number_of_ranks) {
  for (const char* executor : {kPlain, kChecked, kCheckedLanes4})
    for (uint32_t ranks = 1; ranks <= 5; ++ranks) {
      WorldCase w = world(1, ranks, 2, executor);
      w.latency = true;
      w.seed = ranks;
      Random r(w.seed);
      for (const uint32_t tokens : {9u, 0u, 3u})
        w.plans.push_back(route_by(w, all(w, tokens), 3, [&](int, uint32_t) {
          return std::vector<int>{int(r.below(w.num_experts)), int(r.below(w.num_experts)),
                                  int(r.below(w.num_experts))};
        }));
      w.plans[0].pad_multiple = 4;
      w.plans[2].budgets.assign(ranks, 2);  // drops what is behind
      for (const size_t plan : {0, 1, 2, 0})
        for (const bool again : {false, true}) {
          const size_t first = w.ops.size();
          add_round(w, plan, 1 + again);
          for (size_t i = first; i < w.ops.size(); ++i) {
            w.ops[i].latency = i % 3 != 2;
            w.ops[i].salt = 2 * i + 1;
          }
        }
      check_world(w);
    }
}

// Rows of many lines, and one rank that nobody answers with a row: its step is over when it has heard of all.
TEST(latency_path_with_long_rows_one_way) {
  for (const char* executor : {kPlain, kChecked, kCheckedLanes4}) {
    WorldCase w = world(1, 3, 2, executor);
    w.latency = true;
    w.plans.push_back(route_by(w, {5, 0, 4}, 3, [](int rank, uint32_t t) {
      return rank == 0 ? std::vector<int>{2, 3, int(4 + t % 2)} : std::vector<int>{5, 2};
    }));
    for (int i = 0; i < 3; ++i) add_round(w, 0, 2);
    for (OpCase& op : w.ops) {
      op.latency = true;
      op.row_bytes = 4000;
      op.scale_bytes = 112;
      op.hidden = 1992;
      op.salt = 2 * op.salt + 1;
    }
    w.ops[1].fp32_partials = true;
    check_world(w);
  }
}

TEST(latency_path_has_limits) {
  BufferShape shape = lone_shape(4);
  const std::vector<int64_t> experts{0, 1, 0};
  const RoutingInput in = one_expert_each(experts);
  std::vector<unsigned char> memory, x(256, 1), out(512);
  DispatchCall call = call_of(x, out, 8);
  PlaceCall place;
  place.header.set_budget(8);
  for (const uint64_t tokens : {0, 2, 4}) {
    shape.latency_tokens = tokens;
    auto engine = lone_engine(shape);
    place.memory = block(memory, engine->plan_memory(3, 1, true).total);
    if (tokens < 3) {
      CHECK_THROWS(std::invalid_argument, engine->latency_dispatch(in, place, call, false));
      continue;
    }
    call.out_rows = 7;  // of a budget of 8
    CHECK_THROWS(std::logic_error, engine->latency_dispatch(in, place, call, false));
    call.out_rows = 8;
    call.num_blocks = 40;  // more than count tokens
    const auto plan = engine->latency_dispatch(in, place, call, false);
    call.num_blocks = 1;
    CHECK(std::equal(out.begin(), out.begin() + 192, x.begin()));
    call.row_bytes = 6400;
    CHECK_THROWS(std::logic_error, engine->latency_dispatch(*plan, call));
  }
}

// A call that cannot work is refused before anything is sent; the next one works.
TEST(bad_calls_leave_the_engine_usable) {
  const auto engine = lone_engine(lone_shape(2));
  const std::vector<int64_t> experts{0, 1}, unknown{0, 2};
  std::vector<unsigned char> blocks[2];
  PlaceCall call;
  call.memory = block(blocks[0], engine->plan_memory(2, 1, false).total);
  const auto placement = engine->place_and_count(one_expert_each(experts), call);
  const std::shared_ptr<Plan> placed = placement->plan(block(blocks[1], placement->learned.total));
  Plan& plan = *placed;
  std::vector<unsigned char> x(256, 1), out(256);
  const DispatchCall good = call_of(x, out, 2);
  auto refused = [&](auto&& change) {
    DispatchCall bad = good;
    change(bad);
    CHECK_THROWS(std::exception, engine->dispatch(plan, bad));
  };
  refused([](DispatchCall& c) { c.row_bytes = 0; });
  refused([](DispatchCall& c) { c.row_bytes = 40; });
  refused([](DispatchCall& c) { c.row_bytes = 4096; });  // does not fit the buffer
  refused([](DispatchCall& c) { c.scale_bytes = 8; });
  refused([](DispatchCall& c) { c.num_blocks = 0; });
  refused([](DispatchCall& c) { c.local_blocks = -1; });
  refused([](DispatchCall& c) { c.out_rows = 1; });
  CombineCall sum;
  sum.x = x.data();
  sum.out_x = out.data();
  sum.hidden = 32;
  sum.permuted = true;
  CHECK_THROWS(std::invalid_argument, engine->combine(plan, sum));  // its dispatch has not run
  std::vector<unsigned char> other;
  call.memory = block(other, engine->plan_memory(2, 1, false).total);
  CHECK(!engine->place_and_count(one_expert_each(unknown), call)->counts.placed);
  engine->dispatch(plan, good);
  CHECK(std::equal(out.begin(), out.begin() + 128, x.begin()));
  sum.hidden = 0;
  CHECK_THROWS(std::invalid_argument, engine->combine(plan, sum));
  sum.hidden = 32;
  sum.local_blocks = -1;
  CHECK_THROWS(std::invalid_argument, engine->combine(plan, sum));
  sum.local_blocks = 0;
  engine->combine(plan, sum);
  CHECK(std::equal(out.begin(), out.begin() + 128, x.begin()));
}

TEST(random_on_plain) {
  check_seeds({4, 4, 8, 20, 4, 6, 10, kPlain}, 1000, 25 * kScale);
}
TEST(random_on_checked) {
  check_seeds({4, 4, 6, 20, 3, 6, 20, kChecked}, 2000, 20 * kScale);
}
TEST(random_on_checked_lanes4) {
  check_seeds({3, 3, 4, 14, 2, 5, 20, kCheckedLanes4}, 3000, 4 * kScale);
}

TEST(random_on_checked_mapped) {
  check_seeds({3, 3, 4, 14, 2, 5, 20, kCheckedMapped}, 3500, 3 * kScale);
}
// Between nodes rows travel along the rail, with a signal each, and are handed on by lines.
TEST(random_by_lines_over_nodes) {
  check_seeds({4, 3, 8, 20, 4, 10, 10, kPlain, true}, 9000, 20 * kScale);
  check_seeds({3, 3, 6, 14, 3, 8, 20, kChecked, true}, 9200, 10 * kScale);
  check_seeds({3, 2, 4, 12, 2, 6, 20, kCheckedLanes4, true}, 9400, 4 * kScale);
  check_seeds({3, 2, 4, 12, 2, 6, 10, kCheckedMapped, true}, 9500, 4 * kScale);
}
TEST(random_by_lines) {
  check_seeds({1, 6, 6, 20, 4, 10, 10, kPlain, true}, 7000, 20 * kScale);
  check_seeds({1, 4, 4, 14, 3, 8, 20, kChecked, true}, 7500, 8 * kScale);
  check_seeds({1, 3, 3, 12, 2, 6, 20, kCheckedLanes4, true}, 7800, 3 * kScale);
}
#if !defined(__SANITIZE_THREAD__)
TEST(random_by_lines_as_wide_as_a_gpu) {  // four lines at a time, blocks of sixteen warps
  check_seeds({1, 3, 3, 12, 2, 5, 10, "host_checked_lanes32", true}, 7900, 3);
  check_seeds({2, 2, 3, 10, 2, 4, 10, "host_checked_lanes32", true}, 7950, 2);
}
#endif
TEST(random_by_lines_on_threads) {
  check_seeds({1, 3, 3, 10, 2, 6, 0, "threads", true}, 8000, 3 * kScale);
  check_seeds({1, 2, 2, 8, 2, 4, 0, "threads_lanes4", true}, 8100, 2 * kScale);
  check_seeds({2, 2, 3, 8, 2, 6, 0, "threads", true}, 8200, 3 * kScale);
}
TEST(random_on_large_worlds) {
  check_seeds({4, 4, kScale == 1 ? 8u : 16u, 12, 2, 4, 0, kPlain}, 4000, 5 * kScale);
}
TEST(random_on_threads) {
  check_seeds({3, 3, 4, 14, 2, 5, 20, "threads"}, 5000, 5 * kScale);
}
TEST(random_on_threads_lanes4) {
  check_seeds({2, 2, 3, 10, 2, 4, 0, "threads_lanes4"}, 6000, 2 * kScale);
}

}  // namespace hep::test
