// A producer warp and a consumer warp around a ring of stages: the pattern all role code is made of.
#include "test_arch_host.h"

#include <vector>

namespace hep::host::test {
namespace {

constexpr int kItems = 60, kWords = 8;

// What can be wrong with it. The checked model must notice every one of these.
enum class Bug {
  kNone,
  kNoWaitEmpty,          // the producer does not wait for its stage
  kNoWaitFull,           // the consumer does not wait for its data
  kHalfExpected,         // announces half of the bytes it loads
  kNoWaitRead,           // refills the out slot while its store may still read it
  kWaitReadTooFew,       // allows one group too many
  kNoPublish,            // neither stores nor hand-over are ordered before the async proxy
  kOneLanePublishes,     // lanes > 1
  kNoSyncAfterPublish,   // lanes > 1: the leader does not wait for the other lanes
  kNoSyncAfterWaitRead,  // lanes > 1: the other lanes do not wait for the leader
  kReleaseBeforeRead,    // hands the stage back before reading it
  kNoRelease,            // never hands the stage back
  kNoFinalWait,          // returns with stores under way
  kUncommitted,          // never commits its stores
  kNoMeetingAfterWait,   // lanes > 1: the leader fills the stage although others have not seen it empty
};

template <class A, int kStages, Bug kBug = Bug::kNone>
void ring(uint64_t seed, double timeout_s = 20) {
  struct Smem {
    alignas(128) uint32_t data[kStages][kWords];
    alignas(128) uint32_t out[2][kWords];
    typename A::Mbarrier full[kStages], empty[kStages];
  };
  struct alignas(16) Row {
    uint32_t w[kWords];
  };
  std::vector<Row> src(kItems), dst(kItems);
  for (int i = 0; i < kItems * kWords; ++i)
    src[static_cast<size_t>(i / kWords)].w[i % kWords] = static_cast<uint32_t>(i);

  LaunchConfig config = grid(2, 2, sizeof(Smem), seed);
  config.timeout_s = timeout_s;
  launch<A>(config, [&](A& a, std::byte* smem) {
    auto& s = *reinterpret_cast<Smem*>(smem);
    if (a.warp_idx() == 0 && a.elect_one()) {
      for (int i = 0; i < kStages; ++i) {
        a.mbar_init(s.full[i], 1, false);
        a.mbar_init(s.empty[i], 1, true);
      }
    }
    a.block_sync();
    const bool leader = a.elect_one();
    int turn = 0;
    for (int item = a.block_idx(); item < kItems; item += a.num_blocks(), ++turn) {
      const int stage = turn % kStages;
      const uint32_t parity = static_cast<uint32_t>(turn / kStages) & 1;
      const auto row = static_cast<size_t>(item);
      if (a.warp_idx() == 0) {
        a.set_role(Role::kG2s);
        if (kBug != Bug::kNoWaitEmpty) a.mbar_wait(s.empty[stage], parity ^ 1, {Site::kStageEmpty, -1, item});
        // elect_one, not `leader`: all lanes must have seen the stage empty before it is filled.
        if (kBug == Bug::kNoMeetingAfterWait ? leader : a.elect_one()) {
          a.mbar_arrive_expect_tx(s.full[stage], kBug == Bug::kHalfExpected ? sizeof(Row) / 2 : sizeof(Row));
          a.bulk_g2s(s.data[stage], src[row].w, sizeof(Row) / 2, s.full[stage]);
          a.bulk_g2s(s.data[stage] + kWords / 2, src[row].w + kWords / 2, sizeof(Row) / 2, s.full[stage]);
        }
        a.warp_sync();
        continue;
      }
      a.set_role(Role::kS2g);
      if (kBug != Bug::kNoWaitFull) a.mbar_wait(s.full[stage], parity, {Site::kStageFull, -1, item});
      if (kBug == Bug::kReleaseBeforeRead && leader) a.mbar_arrive(s.empty[stage]);
      if (leader && kBug != Bug::kNoWaitRead) {
        if (kBug == Bug::kWaitReadTooFew)
          a.template bulk_wait_read<2>();
        else
          a.template bulk_wait_read<1>();
      }
      if (kBug != Bug::kNoSyncAfterWaitRead) a.warp_sync();
      for (int i = a.lane(); i < kWords; i += A::kLanes) {
        a.st_shared(&s.out[turn % 2][i], 2 * a.ld_shared(&s.data[stage][i]));
      }
      if (kBug != Bug::kNoPublish && (kBug != Bug::kOneLanePublishes || leader)) a.publish_shared();
      if (kBug != Bug::kNoSyncAfterPublish) a.warp_sync();
      if (leader) {
        if (kBug != Bug::kNoRelease && kBug != Bug::kReleaseBeforeRead) a.mbar_arrive(s.empty[stage]);
        a.bulk_s2g(dst[row].w, s.out[turn % 2], sizeof(Row));
        if (kBug != Bug::kUncommitted) a.bulk_commit();
      }
    }
    if (leader && kBug != Bug::kNoFinalWait) a.template bulk_wait<0>();
  });
  for (int i = 0; i < kItems * kWords; ++i) {
    CHECK_EQ(dst[static_cast<size_t>(i / kWords)].w[i % kWords], static_cast<uint32_t>(2 * i));
  }
}

template <class A>
void fifo_over_stages_and_seeds() {
  const uint64_t num_seeds = A::Exec::kThreads ? 2 : 20;
  for (uint64_t seed = 0; seed < num_seeds; ++seed) {
    ring<A, 1>(seed);
    ring<A, 2>(seed);
    ring<A, 3>(seed);
    ring<A, 4>(seed);
  }
}
ON_ALL(fifo_over_stages_and_seeds);

#if !defined(__SANITIZE_THREAD__)
template <class A, Bug kBug>
void must_fail() {
  int caught = 0;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    try {
      ring<A, 2, kBug>(seed, 0.1);
    } catch (const std::exception&) {  // a rule, a deadline or wrong bytes
      ++caught;
    }
  }
  if (caught < 4) {
    throw check::Failure("bug " + std::to_string(static_cast<int>(kBug)) + " noticed for " + std::to_string(caught) +
                         " of 5 seeds");
  }
}

template <class A>
void every_bug_is_noticed() {
  must_fail<A, Bug::kNoWaitEmpty>();
  must_fail<A, Bug::kNoWaitFull>();
  must_fail<A, Bug::kHalfExpected>();
  must_fail<A, Bug::kNoWaitRead>();
  must_fail<A, Bug::kWaitReadTooFew>();
  must_fail<A, Bug::kNoPublish>();
  must_fail<A, Bug::kReleaseBeforeRead>();
  must_fail<A, Bug::kNoRelease>();
  must_fail<A, Bug::kNoFinalWait>();
  must_fail<A, Bug::kUncommitted>();
  if constexpr (A::kLanes > 1) {
    must_fail<A, Bug::kOneLanePublishes>();
    must_fail<A, Bug::kNoSyncAfterPublish>();
    must_fail<A, Bug::kNoSyncAfterWaitRead>();
    must_fail<A, Bug::kNoMeetingAfterWait>();
  }
}
HEP_REGISTER(every_bug_is_noticed, CheckedFibers1);
HEP_REGISTER(every_bug_is_noticed, CheckedFibers4);
#endif

}  // namespace
}  // namespace hep::host::test
