// The stage FIFO carries every item once, in order and unharmed, over stages x consumers x lanes x machines. The
// goal of each test is to finish: a wrong phase or a missing arrival is a deadlock.
#include "check.h"

#include <cstring>
#include <numeric>

#include "arch/host/launch.h"
#include "pipeline/stage_fifo.h"
#include "world_case.h"

HEP_TEST_MAIN

namespace hep {
namespace {

using namespace host;

struct alignas(16) Head {
  uint32_t stop, item, at, bytes;
};

constexpr uint32_t kItems = 41, kStageBytes = 256;

// Items of 0 to kStageBytes bytes, one after the other.
struct Items {
  std::vector<uint32_t> at{0};
  std::vector<Vec16> data;
  explicit Items(uint64_t seed) {
    test::Random r(seed);
    for (uint32_t i = 0; i < kItems; ++i)
      at.push_back(at.back() + 16 * r.between(r.one_in(8) ? 0 : 1, kStageBytes / 16));
    data.resize(at.back() / 16);
    for (Vec16& v : data) v = {{uint32_t(r.next()), uint32_t(r.next()), 0, 1}};
  }
};

LaunchConfig config(const FifoLayout& layout, uint32_t consumers, uint64_t seed) {
  LaunchConfig c;
  c.num_warps = int(consumers) + 1;
  c.smem_bytes = layout.end;
  c.timeout_s = 20;
  c.seed = seed;
  return c;
}

template <class A>
void produce(A& a, StageProducer<A, Head> to, const Items& items, int stops) {
  for (uint32_t i = 0; i < kItems; ++i) {
    const uint32_t bytes = items.at[i + 1] - items.at[i];
    to.acquire(a);
    to.commit(a, {0, i, items.at[i], bytes}, bytes);
    // In two loads when it can be: a stage is full when all have landed.
    const uint32_t first = bytes / 32 * 16;
    if (first) to.load(a, 0, items.data.data() + items.at[i] / 16, first);
    if (bytes - first) to.load(a, first, items.data.data() + (items.at[i] + first) / 16, bytes - first);
    to.advance();
  }
  to.stop(a, {1, 0, 0, 0}, stops);
}

// Consumers share the stages, each moves its own with bulk stores, as the scatter of dispatch does.
template <class A>
void shared_consumers(uint32_t stages, uint32_t consumers, uint64_t seed) {
  const Items items(seed);
  std::vector<Vec16> out(items.data.size());
  const FifoLayout layout = StageFifo<A, Head>::layout(0, stages, kStageBytes);
  launch<A>(config(layout, consumers, seed), [&](A& a, std::byte* smem) {
    const StageFifo<A, Head> fifo(smem, layout);
    const bool elected = a.elect_one();
    if (a.warp_idx() == 0 && elected) fifo.init(a, 1);
    a.block_sync();
    if (!elected) return;
    if (a.warp_idx() == 0) return produce(a, StageProducer<A, Head>(fifo), items, int(consumers));
    const uint32_t me = uint32_t(a.warp_idx()) - 1;
    StageConsumer<A, Head> from(fifo, me, consumers);
    for (uint32_t expected = me;; expected += consumers) {
      const Head head = from.wait(a);
      if (head.stop) break;
      CHECK_EQ(head.item, expected);
      if (head.bytes) a.bulk_s2g(out.data() + head.at / 16, from.data(), head.bytes);
      a.bulk_commit();
      from.advance();
      a.template bulk_wait_read<0>();
      from.release(a);
    }
    from.release(a);
    a.template bulk_wait<0>();
  });
  CHECK(std::memcmp(out.data(), items.data.data(), items.at.back()) == 0);
}

// Every consumer warp reads every stage with all its lanes, as a reduce group does.
template <class A>
void common_consumers(uint32_t stages, uint32_t consumers, uint64_t seed) {
  const Items items(seed);
  std::vector<std::vector<Vec16>> out(consumers, std::vector<Vec16>(items.data.size()));
  const FifoLayout layout = StageFifo<A, Head>::layout(0, stages, kStageBytes);
  launch<A>(config(layout, consumers, seed), [&](A& a, std::byte* smem) {
    const StageFifo<A, Head> fifo(smem, layout);
    const bool elected = a.elect_one();
    if (a.warp_idx() == 0 && elected) fifo.init(a, consumers);
    a.block_sync();
    if (a.warp_idx() == 0) {
      if (elected) produce(a, StageProducer<A, Head>(fifo), items, 1);
      return;
    }
    Vec16* mine = out[size_t(a.warp_idx()) - 1].data();
    WarpConsumer<A, Head> from(a, fifo);
    for (;;) {
      const Head head = from.wait(a);
      if (head.stop) break;
      const auto* words = reinterpret_cast<const Vec16*>(from.data());
      for (uint32_t i = uint32_t(a.lane()); i < head.bytes / 16; i += A::kLanes)
        a.st_global(mine + head.at / 16 + i, a.ld_shared(words + i));
      from.pass(a);
    }
    from.pass(a);
  });
  for (const auto& one : out) CHECK(std::memcmp(one.data(), items.data.data(), items.at.back()) == 0);
}

template <class A>
void add_tests(const std::string& name, uint64_t num_seeds) {
  check::tests().push_back({"consumers that share stages on " + name, [=] {
                              for (uint32_t stages = 1; stages <= 6; ++stages)
                                for (uint32_t consumers = 1; consumers <= 3; ++consumers)
                                  for (uint64_t seed = 0; stages % consumers == 0 && seed < num_seeds; ++seed)
                                    shared_consumers<A>(stages, consumers, seed);
                            }});
  check::tests().push_back({"consumers that all read every stage on " + name, [=] {
                              for (uint32_t stages = 1; stages <= 5; ++stages)
                                for (uint32_t consumers = 1; consumers <= 3; ++consumers)
                                  for (uint64_t seed = 0; seed < num_seeds; ++seed)
                                    common_consumers<A>(stages, consumers, seed);
                            }});
}

const bool registered = [] {
#if !defined(__SANITIZE_THREAD__)  // which does not follow fibers
  add_tests<PlainFibers>("fibers", 1);
  add_tests<CheckedFibers<1>>("checked fibers", 3);
  add_tests<CheckedFibers<4>>("checked fibers of 4 lanes", 2);
#endif
  add_tests<PlainThreads<1>>("threads", 1);
  add_tests<PlainThreads<4>>("threads of 4 lanes", 1);
  add_tests<CheckedThreads<4>>("checked threads of 4 lanes", 1);
  return true;
}();

}  // namespace

// A stage must come round to the consumer that had it before. With 3 stages for 2 consumers it does not: phases
// are one bit, and the new consumer cannot tell "not yet landed the last time" from "landed this time".
#if !defined(__SANITIZE_THREAD__)
TEST(stages_that_are_no_multiple_of_their_consumers_are_caught) {
  int caught = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    try {
      shared_consumers<CheckedFibers<1>>(3, 2, seed);
    } catch (const std::exception&) {
      ++caught;
    }
  }
  CHECK(caught > 0);
}
#endif

TEST(cursor_counts_phases) {
  for (uint32_t stages = 1; stages <= 5; ++stages)
    for (uint32_t stride = 1; stride <= 4; ++stride) {
      StageCursor c;
      for (uint32_t n = 0; n < 50; n += stride, c.advance(stride, stages)) {
        CHECK_EQ(c.stage, n % stages);
        CHECK_EQ(c.phase, n / stages % 2);
      }
    }
}

}  // namespace hep
