// The host learns counts from a kernel that runs beside it: an executor with a stream, as a GPU has, whose launches end
// after the call that made them has returned.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <thread>

#include "arch/host/errors.h"
#include "check.h"
#include "kernels/instances/host_executor.h"
#include "layout/headers.h"
#include "mutants.h"
#include "runtime/engine.h"
#include "runtime/headers.h"
#include "streamed_executor.h"
#include "thread_executor.h"
#include "transport/shm/shm_transport.h"

HEP_TEST_MAIN

namespace hep::test {
namespace {

constexpr uint32_t kExperts = 2, kTokens = 6, kTopk = 2, kRow = 32;

// Ranks 0 and 1 of one node, or 0 alone, with an engine on a stream each. Expert 0 is rank 0's, 1 the last's.
struct Pair {
  explicit Pair(double timeout_s, int ranks = 2) {
    shape.num_local_ranks = uint32_t(ranks);
    shape.num_experts = kExperts;
    shape.max_tokens = kTokens;
    shape.max_topk = kTopk;
    shape.recv_rows = 2 * kTokens;
    shape.row_bytes = shape.partial_row_bytes = kRow;
    for (int r = 0; r < ranks; ++r) segments.push_back(Segment::private_memory(BufferLayout(shape).total));
    for (int r = 0; r < ranks; ++r) {
      const auto maker = [&](unsigned char* const* rail, uint64_t) -> std::unique_ptr<Executor> {
        // ThreadSanitizer does not follow fibers.
        auto machine = std::make_unique<HostExecutor<host::PlainThreads<1>, ShmTransport>>(rail);
        auto streamed = std::make_unique<StreamedExecutor>(std::move(machine));
        streams[r] = streamed.get();
        return streamed;
      };
      engines[r] = std::make_unique<Engine>(r, shape, segments, timeout_s, maker, 1);
    }
  }
  // The word of rank 1's segment in which rank 0 says of its operations: ready, or done.
  uint64_t said_by_0(uint64_t flag) const { return *reinterpret_cast<uint64_t*>(segments[1]->data() + flag); }
  BufferShape shape;
  std::vector<std::shared_ptr<Segment>> segments;
  StreamedExecutor* streams[2] = {};
  std::unique_ptr<Engine> engines[2];
};

struct Memory {
  explicit Memory(uint64_t bytes) : bytes_(bytes + 128, 0xFF) {}
  unsigned char* data() { return bytes_.data() + (128 - reinterpret_cast<uint64_t>(bytes_.data()) % 128) % 128; }

 private:
  std::vector<unsigned char> bytes_;
};

// One rank's call: `tokens` tokens, the j-th of which chooses expert 0, and every other one expert 1 too.
struct Routed {
  explicit Routed(Engine& e, uint32_t tokens, uint32_t hidden = 7) : memory(e.plan_memory(tokens, kTopk, false).total) {
    for (uint32_t t = 0; t < tokens; ++t) {
      idx.push_back(0);
      idx.push_back(t % 2 ? 1 : -1);
    }
    in.topk_idx = idx.data();
    in.num_tokens = tokens;
    in.topk = kTopk;
    call.header.topk = kTopk;
    call.header.hidden = hidden;
    call.memory = memory.data();
  }
  std::vector<int64_t> idx;
  Memory memory;
  RoutingInput in;
  PlaceCall call;
};

// Both ranks' calls at once; what rank 0's returned.
template <class F>
void both(F&& rank_body) {
  std::exception_ptr errors[2];
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.emplace_back([&, r] {
      try {
        rank_body(r);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  for (auto& rank : ranks) rank.join();
  for (auto& error : errors)
    if (error) std::rethrow_exception(error);
}

void counts_and_rows_are_right(Pair& pair, uint32_t tokens0, uint32_t tokens1) {
  const uint32_t tokens[2] = {tokens0, tokens1}, total = tokens0 + tokens1;
  const uint32_t odd[2] = {tokens0 / 2, tokens1 / 2};
  both([&](int r) {
    Engine& engine = *pair.engines[r];
    Routed routed(engine, tokens[r]);
    const int drains = pair.streams[r]->drains;
    const auto placement = engine.place_and_count(routed.in, routed.call);
    const PlacedCounts& c = placement->counts;
    CHECK(c.placed);
    const uint32_t rows[2] = {total, odd[0] + odd[1]};
    CHECK_EQ(c.numbers.recv_rows, rows[r]);
    CHECK_EQ(c.numbers.max_recv_rows, total);
    CHECK_EQ(c.numbers.permuted_rows, rows[r]);
    CHECK_EQ(c.numbers.overflow, 0);
    for (int s = 0; s < 2; ++s) {
      CHECK_EQ(c.rank_rows[size_t(s)], rows[s]);
      CHECK_EQ(c.source_rows[size_t(s)], r ? odd[s] : tokens[s]);
      CHECK_EQ(c.headers[size_t(s)].num_tokens, tokens[s]);
      CHECK_EQ(uint32_t(c.headers[size_t(s)].topk), kTopk);
      CHECK_EQ(c.dropped[size_t(s)], 0u);
    }
    CHECK_EQ(c.from_nodes[0], tokens[r]);
    CHECK_EQ(c.tokens_per_expert[0], int64_t(rows[r]));
    Memory learned(placement->learned.total);
    const auto plan = placement->plan(learned.data());
    std::vector<unsigned char> x(uint64_t(tokens[r]) * kRow), out(uint64_t(rows[r]) * kRow + 1);
    for (uint64_t i = 0; i < x.size(); ++i) x[i] = uint8_t(100 * r + i / kRow);
    DispatchCall d;
    d.x = x.data();
    d.out_x = out.data();
    d.row_bytes = kRow;
    d.out_rows = rows[r];
    d.permute = true;
    engine.dispatch(*plan, d);
    CHECK_EQ(pair.streams[r]->drains, drains);  // nobody has waited for the stream
    pair.streams[r]->drain();
    for (uint32_t row = 0, s = 0, t = 0; row < rows[r]; ++row, t += r ? 2 : 1) {
      if (row == 0) t = r ? 1 : 0;
      if (t >= tokens[s]) {
        ++s;
        t = r ? 1 : 0;
      }
      CHECK_EQ(int(out[uint64_t(row) * kRow]), int(100 * s + t));
    }
  });
}

}  // namespace

TEST(the_header_of_a_call_fills_its_words_and_each_that_must_agree_is_checked) {
  CallHeader h;
  h.num_tokens = 3;
  h.topk = 5;
  h.excess = 2;
  h.hidden = 8;
  h.dtype = Element::kBf16;
  h.routing_map = true;
  const CallHeader::Words words = h.words();
  CHECK_EQ(words[kHeaderNumTokens], 3u);
  CHECK_EQ(words[kHeaderTopk], 5u | header_excess(2));
  CHECK(CallHeader::of(words).words() == words && CallHeader::of(words).routing_map);
  CHECK(!h.budget());
  h.set_budget(0);
  CHECK(h.budget() == 0u && h.words()[kHeaderBudget] == 1);
  CHECK(differing_fields(std::vector{h, h}).empty());
  // A difference in any byte is one that kernels notice where, and only where, it has a name. topk is told apart.
  for (size_t byte = 0; byte < offsetof(CallHeader, unused); ++byte) {
    auto bytes = std::bit_cast<std::array<unsigned char, sizeof(CallHeader)>>(h);
    bytes[byte] ^= 1;
    const bool noticed = kHeaderMustAgree >> byte / 4 & 1, named = byte / 4 != size_t(kHeaderTopk) && noticed;
    const std::vector pair{h, std::bit_cast<CallHeader>(bytes)};
    CHECK_EQ(differing_fields(pair).size(), size_t(named));
  }
  CallHeader other;
  other.topk = 7;
  other.num_tokens = 9;
  other.want_hidden = 64;
  const HeaderRanges all = ranges_of(std::vector{h, other});
  CHECK(all.least_topk == 5 && all.most_topk == 7 && all.most_tokens == 9 && all.most_want_hidden == 64 && all.excess);
}

TEST(counts_come_by_notification_and_nobody_waits_for_the_stream) {
  Pair pair(20);
  for (uint32_t i = 0; i < 20; ++i) counts_and_rows_are_right(pair, i % 7, (3 * i) % 7);
}

// A GPU is idle until the host has seen its counts, so the host must be awake when they come. A thread that sleeps
// gives its core up by itself, which the kernel counts; how late the host sees them depends on who shares the cores.
TEST(the_host_does_not_sleep_while_it_waits_for_its_counts) {
  constexpr int kWaits = 40;
  Pair alone(20, 1);
  alone.streams[0]->late = true;
  const auto sleeps = [] {
    rusage used;
    ::getrusage(RUSAGE_THREAD, &used);
    return used.ru_nvcsw;
  };
  const long before = sleeps();
  for (int i = 0; i < kWaits; ++i) {
    Routed routed(*alone.engines[0], 3);
    alone.engines[0]->place_and_count(routed.in, routed.call);
  }
  const long slept = sleeps() - before;
  std::printf("the host slept %ld times in %d waits\n", slept, kWaits);
  CHECK(slept < 3 * kWaits);  // locks that others hold are among them
}

TEST(calls_that_do_not_fit_are_learned_by_all_and_harm_nothing) {
  Pair pair(20);
  const auto refused = [&](uint32_t tokens1, uint32_t hidden1, int64_t expert1) {
    both([&](int r) {
      Routed routed(*pair.engines[r], r ? tokens1 : 3, r ? hidden1 : 7);
      if (r) routed.idx[0] = expert1;
      const auto placement = pair.engines[r]->place_and_count(routed.in, routed.call);
      CHECK(!placement->counts.placed);
      const CallHeader& said = placement->counts.headers[1];
      CHECK_EQ(said.num_tokens, tokens1);
      CHECK_EQ(said.hidden, hidden1);
      CHECK_EQ(int(said.excess), expert1 ? 1 : 0);
      CHECK_THROWS(std::logic_error, placement->plan(nullptr));
    });
    counts_and_rows_are_right(pair, 5, 2);
  };
  refused(3, 8, 0);            // another hidden
  refused(kTokens + 1, 7, 0);  // more tokens than the buffer is laid out for
  refused(3, 7, kExperts);     // an expert that does not exist
  refused(3, 7, -2);
}

TEST(a_kernel_that_dies_is_reported_by_the_host_that_waits) {
  Pair pair(0.3);
  Routed routed(*pair.engines[0], 3);
  try {
    pair.engines[0]->place_and_count(routed.in, routed.call);
    check::fail(__FILE__, __LINE__, "nobody played rank 1");
  } catch (const host::DeadlineError& e) {  // the lane's, which knows for whom it waited
    CHECK(e.timeout_report().site == Site::kCountsFromNode);
    CHECK_EQ(e.timeout_report().peer, 1);
  }
  CHECK_THROWS(std::runtime_error, pair.engines[0]->place_and_count(routed.in, routed.call));
}

TEST(what_is_queued_before_a_kernel_takes_none_of_its_time) {
  Pair alone(0.1, 1);
  alone.streams[0]->push([] { std::this_thread::sleep_for(std::chrono::milliseconds(300)); });
  Routed routed(*alone.engines[0], 3);
  CHECK(alone.engines[0]->place_and_count(routed.in, routed.call)->counts.placed);
  alone.streams[0]->drain();  // the counts come before the kernel's end, and it goes on in routed's memory
}

TEST(a_kernel_that_never_starts_has_a_timeout_report_too) {
  Pair pair(0.05);
  Routed routed(*pair.engines[0], 3);
  StreamedExecutor& stream = *pair.streams[0];
  stream.push([&] {  // work of the caller's that does not end
    while (!stream.aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  try {
    pair.engines[0]->place_and_count(routed.in, routed.call);
    check::fail(__FILE__, __LINE__, "there is no notification");
  } catch (const host::DeadlineError& e) {
    CHECK(e.timeout_report().site == Site::kKernelStart);
    CHECK_EQ(e.timeout_report().expected, 1u);
    CHECK_EQ(e.timeout_report().seen, 0u);
    CHECK(e.timeout_report().waited_s >= 0.5);
  }
  CHECK(stream.aborted.load());
}

TEST(the_user_may_lose_patience) {
  Pair pair(20);
  Routed routed(*pair.engines[0], 3);
  std::atomic<bool> stop{false};
  pair.engines[0]->set_interrupt_check([&] { return stop.load(); });
  pair.streams[0]->push([&] {
    stop = true;
    while (!pair.streams[0]->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  CHECK_THROWS(host::Interrupted, pair.engines[0]->place_and_count(routed.in, routed.call));
}

namespace {

// A dispatch and its combine of a rank whose tokens are ones, with all the memory they use.
struct Step {
  Step(Engine& e, uint32_t tokens) : engine(e), routed(e, tokens), x(uint64_t(tokens) * kRow / 2, kOne) {}
  void route() {
    const auto placement = engine.place_and_count(routed.in, routed.call);
    learned = std::make_unique<Memory>(placement->learned.total);
    plan = placement->plan(learned->data());
    rows.assign(plan->num_permuted_rows() * kRow / 2 + 1, kUntouched);
    sums.assign(x.size(), kUntouched);
  }
  void dispatch(int num_blocks = 1, int local_blocks = 0) {
    DispatchCall d;
    d.x = bytes(x);
    d.out_x = bytes(rows);
    d.row_bytes = kRow;
    d.out_rows = plan->num_permuted_rows();
    d.permute = true;
    d.num_blocks = num_blocks;
    d.local_blocks = local_blocks;
    engine.dispatch(*plan, d);
  }
  void combine(int num_blocks = 1, int local_blocks = 0) {
    CombineCall c;
    c.x = bytes(rows);
    c.out_x = bytes(sums);
    c.hidden = kRow / 2;
    c.permuted = true;
    c.num_blocks = num_blocks;
    c.local_blocks = local_blocks;
    engine.combine(*plan, c);
  }
  static constexpr uint16_t kOne = 0x3f80, kTwo = 0x4000, kUntouched = 0xEEEE;  // bf16
  Engine& engine;
  Routed routed;
  std::vector<uint16_t> x, rows, sums;
  std::unique_ptr<Memory> learned;
  std::shared_ptr<Plan> plan;

 private:
  static unsigned char* bytes(std::vector<uint16_t>& v) { return reinterpret_cast<unsigned char*>(v.data()); }
};

// Rank 0 is given up before its exchange, its dispatch or its combine. It must not say a word in that operation, which
// rank 1 has to give up for want of one.
void given_up_before(int operation) {
  constexpr uint32_t kMine = 3;
  Pair pair(1);
  std::unique_ptr<Step> steps[2];
  for (int r = 0; r < 2; ++r) steps[r] = std::make_unique<Step>(*pair.engines[r], kMine);
  const auto run = [&](int r, int which) {
    if (which == 0) steps[r]->route();
    if (which == 1) steps[r]->dispatch(2, 1);
    if (which == 2) steps[r]->combine(2);
  };
  for (int before = 0; before < operation; ++before) {
    both([&](int r) {
      run(r, before);
      pair.streams[r]->drain();
    });
  }
  pair.streams[0]->abort();
  both([&](int r) {
    if (operation == 0) {
      CHECK_THROWS(host::DeadlineError, run(r, 0));
    } else {
      run(r, operation);
      pair.streams[r]->drain();
    }
  });
  CHECK(pair.streams[1]->timeout_report().has_value());
  CHECK(!pair.streams[0]->timeout_report().has_value());
  const BufferLayout layout(pair.shape);
  const uint64_t ended = operation > 1 ? 1 : 0;
  CHECK_EQ(pair.said_by_0(layout.ready_flag(0)), ended);
  CHECK_EQ(pair.said_by_0(layout.done_flag(0)), ended);
  CHECK_EQ(*reinterpret_cast<uint64_t*>(pair.segments[1]->data() + layout.counts_node), operation > 0 ? 1u : 0u);
  if (operation == 1) CHECK_EQ(steps[0]->rows[0], Step::kUntouched);
  if (operation == 2) CHECK_EQ(steps[0]->sums[0], Step::kUntouched);
}

}  // namespace

TEST(what_the_machine_cannot_launch_is_refused_before_anything_and_harms_nothing) {
  Pair pair(20);
  constexpr uint32_t kMine = 4;
  both([&](int r) {
    StreamedExecutor& stream = *pair.streams[r];
    Step step(*pair.engines[r], kMine);
    stream.blocks = 3;
    const auto refused = [&](auto&& call, bool shared_memory) {
      const uint64_t before = step.engine.num_launches();
      stream.shared_memory = shared_memory;
      CHECK_THROWS(std::invalid_argument, call());
      CHECK_EQ(step.engine.num_launches(), before);
      stream.shared_memory = true;
    };
    for (int round = 0; round < 2; ++round) {
      refused([&] { step.route(); }, false);
      step.route();
      refused([&] { step.dispatch(4); }, true);
      refused([&] { step.dispatch(1, 3); }, true);  // together
      refused([&] { step.dispatch(1, -1); }, true);
      refused([&] { step.dispatch(); }, false);
      step.dispatch(2, 1);
      refused([&] { step.combine(4); }, true);
      refused([&] { step.combine(1, 3); }, true);  // together
      refused([&] { step.combine(); }, false);
      step.combine(1, 2);
      stream.drain();
      for (uint32_t t = 0; t < kMine; ++t) CHECK_EQ(step.sums[t * kRow / 2], t % 2 ? Step::kTwo : Step::kOne);
    }
  });
}

TEST(a_rank_that_was_given_up_takes_no_part) {
  for (int operation = 0; operation < 3; ++operation) given_up_before(operation);
}

#if defined(HEP_MUTANTS)
TEST(mutants_are_noticed) {
  const auto caught = [](Bug bug, auto&& test) {
    injected_bug = bug;
    bool wrong = false;
    try {
      test();
    } catch (const std::exception& e) {
      wrong = true;
      std::printf("%s: %.100s\n", name_of(bug), e.what());
    }
    injected_bug = Bug::kNone;
    CHECK(wrong);
  };
  caught(Bug::kNotifiedBeforeCounts, [] {
    Pair pair(20);
    counts_and_rows_are_right(pair, 4, 3);
  });
  for (int operation = 0; operation < 3; ++operation)
    caught(Bug::kGivenUpRankStarts, [=] { given_up_before(operation); });
  caught(Bug::kCallsUnchecked, [] {
    Pair pair(20);
    both([&](int r) {
      Routed routed(*pair.engines[r], 3, r ? 8 : 7);
      CHECK(!pair.engines[r]->place_and_count(routed.in, routed.call)->counts.placed);
    });
  });
}
#endif

}  // namespace hep::test
