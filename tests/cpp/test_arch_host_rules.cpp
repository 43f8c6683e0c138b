// Every rule of the checked model is broken once, and the model must say so; next to it stands the legal
// neighbour of each crime, which must pass.
#include "test_arch_host.h"

#include <ostream>

namespace hep::host {
inline std::ostream& operator<<(std::ostream& os, Rule rule) {
  return os << rule_name(rule);
}
}  // namespace hep::host

namespace hep::host::test {
namespace {

constexpr int kSeeds = 4;

template <class A>
struct Smem {
  alignas(128) uint8_t data[4][128];
  typename A::Mbarrier bar, guard;
};

alignas(16) uint8_t global_memory[1024];

// Runs `crime(a, smem)` on one lane of a two-warp block, after the barriers are ready (bar: 1 arrival;
// guard: 1 arrival, guards a refill), and returns the rule that was reported.
template <class A, class F>
Rule reported(F crime, double timeout_s = 20, uint64_t seed = 1) {
  LaunchConfig config = grid(1, 2, sizeof(Smem<A>), seed);
  config.timeout_s = timeout_s;
  try {
    launch<A>(config, [&](A& a, std::byte* raw) {
      auto& s = *reinterpret_cast<Smem<A>*>(raw);
      a.set_role(Role::kTest);
      const bool leader = a.elect_one();
      if (a.warp_idx() == 0 && leader) {
        a.mbar_init(s.bar, 1, false);
        a.mbar_init(s.guard, 1, true);
      }
      a.block_sync();
      if (a.warp_idx() == 0 && leader) crime(a, s);
    });
  } catch (const ProtocolError& e) {
    CHECK(std::string(e.what()).find(rule_name(e.rule())) == 0);
    CHECK(std::string(e.what()).find("role test") != std::string::npos);
    return e.rule();
  }
  throw check::Failure("no rule was reported");
}

#define EXPECT_RULE(rule, ...) \
  CHECK_EQ(reported<A>([&]([[maybe_unused]] A& a, [[maybe_unused]] Smem<A>& s) __VA_ARGS__), rule)

template <class A>
void rule_alignment() {
  EXPECT_RULE(Rule::kAlignment, { a.bulk_g2s(s.data[0] + 8, global_memory, 16, s.bar); });
  EXPECT_RULE(Rule::kAlignment, { a.bulk_g2s(s.data[0], global_memory + 4, 16, s.bar); });
  EXPECT_RULE(Rule::kAlignment, { a.bulk_g2s(s.data[0], global_memory, 24, s.bar); });
  EXPECT_RULE(Rule::kAlignment, { a.bulk_s2g(global_memory + 8, s.data[0], 16); });
  EXPECT_RULE(Rule::kAlignment, { a.bulk_s2g(global_memory, s.data[0] + 4, 16); });
  EXPECT_RULE(Rule::kAlignment, { a.bulk_s2g(global_memory, s.data[0], 40); });
  EXPECT_RULE(Rule::kAlignment, { a.ld_shared(reinterpret_cast<uint64_t*>(s.data[0] + 4)); });
  EXPECT_RULE(Rule::kAlignment, { a.st_global(reinterpret_cast<uint32_t*>(global_memory + 2), 1); });
  EXPECT_RULE(Rule::kAlignment, { a.ld_acquire_sys(reinterpret_cast<uint64_t*>(global_memory + 4)); });
}
ON_CHECKED(rule_alignment);

template <class A>
void rule_outside_shared() {
  EXPECT_RULE(Rule::kOutsideShared, { a.ld_shared(reinterpret_cast<Vec16*>(&s + 1)); });
  EXPECT_RULE(Rule::kOutsideShared, { a.st_shared(reinterpret_cast<uint32_t*>(global_memory), 1); });
  EXPECT_RULE(Rule::kOutsideShared, { a.bulk_g2s(reinterpret_cast<uint8_t*>(&s + 1) - 16, global_memory, 32, s.bar); });
  EXPECT_RULE(Rule::kOutsideShared, { a.bulk_g2s(s.data[0], s.data[1], 16, s.bar); });
  EXPECT_RULE(Rule::kOutsideShared, { a.bulk_s2g(global_memory, global_memory + 64, 32); });
  EXPECT_RULE(Rule::kOutsideShared, { a.ld_global(reinterpret_cast<uint32_t*>(s.data[0])); });
  EXPECT_RULE(Rule::kOutsideShared, {
    typename A::Mbarrier elsewhere;
    a.mbar_init(elsewhere, 1, false);
  });
}
ON_CHECKED(rule_outside_shared);

template <class A>
void rule_barrier_state() {
  EXPECT_RULE(Rule::kBarrierState, { a.mbar_arrive(*reinterpret_cast<typename A::Mbarrier*>(s.data[0])); });
  EXPECT_RULE(Rule::kBarrierState, { a.mbar_test(*reinterpret_cast<typename A::Mbarrier*>(s.data[0]), 0); });
  EXPECT_RULE(Rule::kBarrierState, { a.mbar_init(s.bar, 0, false); });
  EXPECT_RULE(Rule::kBarrierState, { a.mbar_wait(s.bar, 2, kSite); });
  EXPECT_RULE(Rule::kBarrierState, { a.st_shared(reinterpret_cast<uint64_t*>(&s.bar), 0); });
  EXPECT_RULE(Rule::kBarrierState, { a.bulk_g2s(&s.bar, global_memory, 16, s.guard); });
}
ON_CHECKED(rule_barrier_state);

// All lanes wait, one arrives at once without meeting the others: the slow ones miss their phase.
template <class A>
void rule_lapped() {
  if constexpr (A::kLanes > 1) {
    int reports = 0, hangs = 0;
    for (uint64_t seed = 0; seed < 20 && reports + hangs < 5; ++seed) {
      LaunchConfig config = grid(1, 1, sizeof(Smem<A>), seed);
      config.timeout_s = 0.3;
      try {
        launch<A>(config, [](A& a, std::byte* raw) {
          auto& s = *reinterpret_cast<Smem<A>*>(raw);
          const bool leader = a.elect_one();
          if (leader) a.mbar_init(s.bar, 1, false);
          a.block_sync();
          for (uint32_t round = 0; round < 4; ++round) {
            if (leader) a.mbar_arrive(s.bar);
            a.mbar_wait(s.bar, round & 1, kSite);
          }
        });
      } catch (const ProtocolError& e) {
        CHECK_EQ(e.rule(), Rule::kLapped);
        ++reports;
      } catch (const DeadlineError&) {
        ++hangs;  // the slow lane had not even begun to wait: it hangs, as it would on the GPU
      }
    }
    CHECK(reports >= (A::Exec::kThreads ? 0 : 1) && reports + hangs >= 1);
  }
}
ON_CHECKED(rule_lapped);

template <class A>
void rule_arrive_count() {
  EXPECT_RULE(Rule::kArriveCount, {  // the phase waits for bytes, not for arrivals
    a.mbar_arrive_expect_tx(s.bar, 16);
    a.mbar_arrive(s.bar);
  });
}
ON_CHECKED(rule_arrive_count);

template <class A>
void rule_expect_tx_too_many() {
  EXPECT_RULE(Rule::kExpectTx, { a.mbar_arrive_expect_tx(s.bar, 1 << 20); });  // the hardware's limit
  const auto announced_but_not_loaded = [](A& a, Smem<A>& s) {
    a.mbar_arrive_expect_tx(s.bar, 64);
    a.bulk_g2s(s.data[0], global_memory, 32, s.bar);
    a.mbar_wait(s.bar, 0, kSite);
  };
  CHECK_EQ(reported<A>(announced_but_not_loaded, 0.2), Rule::kExpectTx);
}
ON_CHECKED(rule_expect_tx_too_many);

template <class A>
void rule_expect_tx_too_few() {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Rule rule = reported<A>(
        [](A& a, Smem<A>& s) {
          a.mbar_arrive_expect_tx(s.bar, 32);
          a.bulk_g2s(s.data[0], global_memory, 32, s.bar);
          a.bulk_g2s(s.data[1], global_memory, 32, s.bar);
          a.mbar_wait(s.bar, 0, kSite);
        },
        20, seed);
    CHECK(rule == Rule::kExpectTx || rule == Rule::kUnfinishedLoad);
  }
}
ON_CHECKED(rule_expect_tx_too_few);

template <class A>
void rule_unpublished() {
  EXPECT_RULE(Rule::kUnpublished, {  // an async write over a generic write
    a.st_shared(s.data[0] + 20, 1);
    a.mbar_arrive_expect_tx(s.bar, 32);
    a.bulk_g2s(s.data[0], global_memory, 32, s.bar);
  });
  EXPECT_RULE(Rule::kUnpublished, {  // an async write over a generic read
    a.ld_shared(s.data[0] + 20);
    a.mbar_arrive_expect_tx(s.bar, 32);
    a.bulk_g2s(s.data[0], global_memory, 32, s.bar);
  });
  EXPECT_RULE(Rule::kUnpublished, {  // an async read of a generic write
    a.st_shared(s.data[0] + 20, 1);
    a.bulk_s2g(global_memory, s.data[0], 32);
  });
  EXPECT_RULE(Rule::kUnpublished, {  // handing memory over for a refill
    a.ld_shared(s.data[0]);
    a.mbar_arrive(s.guard);
  });
}
ON_CHECKED(rule_unpublished);

// In the shape it takes in real code: one lane publishes, the others of the warp do not.
template <class A>
void rule_unpublished_by_other_lanes() {
  if constexpr (A::kLanes > 1) {
    alignas(16) uint8_t dst[64];
    const auto run = [&](bool all_publish) {
      launch<A>(grid(1, 1, 64), [&](A& a, std::byte* smem) {
        const bool leader = a.elect_one();
        for (int i = a.lane(); i < 64; i += A::kLanes) a.st_shared(reinterpret_cast<uint8_t*>(smem) + i, 1);
        if (leader || all_publish) a.publish_shared();
        a.warp_sync();
        if (!leader) return;
        a.bulk_s2g(dst, smem, 64);
        a.bulk_commit();
        a.template bulk_wait<0>();
      });
    };
    run(true);
    CHECK_THROWS(ProtocolError, run(false));
  }
}
ON_CHECKED(rule_unpublished_by_other_lanes);

template <class A>
[[maybe_unused]] void rule_load_in_flight() {
  // The accesses come before the wait. By chance all four loads may have landed by then: try again.
  const auto crime = [](auto access) {
    for (int attempt = 0; attempt < 200; ++attempt) {
      try {
        const Rule rule = reported<A>(
            [&](A& a, Smem<A>& s) {
              for (int i = 0; i < 4; ++i) a.bulk_g2s(s.data[i], global_memory, 128, s.bar);
              access(a, s);
              a.mbar_arrive_expect_tx(s.bar, 512);
              a.mbar_wait(s.bar, 0, kSite);
            },
            20, static_cast<uint64_t>(attempt));
        return rule;
      } catch (const check::Failure&) {
      }
    }
    throw check::Failure("never caught");
  };
  CHECK_EQ(crime([](A& a, Smem<A>& s) {
             for (auto& d : s.data) a.ld_shared(d);
           }),
           Rule::kLoadInFlight);
  CHECK_EQ(crime([](A& a, Smem<A>& s) {
             for (auto& d : s.data) a.st_shared(d, 1);
           }),
           Rule::kLoadInFlight);
  CHECK_EQ(crime([](A& a, Smem<A>& s) {
             for (auto& d : s.data) a.bulk_s2g(global_memory, d, 16);
             a.bulk_commit();
             a.template bulk_wait<0>();
           }),
           Rule::kLoadInFlight);
}
#if !defined(__SANITIZE_THREAD__)  // there the crime is a data race, and reported as one
ON_CHECKED(rule_load_in_flight);
#endif

template <class A>
void rule_store_in_flight() {
  EXPECT_RULE(Rule::kStoreInFlight, {
    a.bulk_s2g(global_memory, s.data[0], 64);
    a.bulk_commit();
    a.st_shared(s.data[0] + 63, 1);
  });
  EXPECT_RULE(Rule::kStoreInFlight, {
    a.bulk_s2g(global_memory, s.data[0], 64);
    a.bulk_commit();
    a.bulk_s2g(global_memory, s.data[1], 64);
    a.bulk_commit();
    a.template bulk_wait_read<2>();  // one too many left
    a.mbar_arrive_expect_tx(s.bar, 64);
    a.bulk_g2s(s.data[0], global_memory, 64, s.bar);
  });
}
ON_CHECKED(rule_store_in_flight);

template <class A>
void rule_groups() {
  EXPECT_RULE(Rule::kOpenGroup, { a.bulk_s2g(global_memory, s.data[0], 64); });
  EXPECT_RULE(Rule::kUnfinishedGroup, {
    a.bulk_s2g(global_memory, s.data[0], 64);
    a.bulk_commit();
    a.template bulk_wait_read<0>();  // read, but not known to be complete
  });
}
ON_CHECKED(rule_groups);

// The elected lane commits, another lane waits. The report says what went wrong.
template <class A>
void rule_wait_by_another_lane() {
  const bool by_warp = A::kLanes == 1;
  std::string what;
  try {
    launch<A>(grid(1, 2, 128), [&](A& a, std::byte* smem) {
      const bool leader = a.elect_one();
      const bool commits = a.warp_idx() == 0 && leader;
      const bool waits = by_warp ? a.warp_idx() == 1 : a.warp_idx() == 0 && !leader;
      if (commits) {
        a.bulk_s2g(global_memory, smem, 64);
        a.bulk_commit();
      }
      if (waits) a.template bulk_wait<0>();
      a.block_sync();
    });
  } catch (const ProtocolError& e) {
    CHECK_EQ(e.rule(), Rule::kUnfinishedGroup);
    what = e.what();
  }
  CHECK(what.find("groups belong to the lane that committed them") != std::string::npos);
}
ON_CHECKED(rule_wait_by_another_lane);

template <class A>
void rule_unfinished_load() {
  for (int attempt = 0; attempt < 200; ++attempt) {  // threads: the loads may land before the block ends
    try {
      launch<A>(grid(1, 1, sizeof(Smem<A>), static_cast<uint64_t>(attempt)), [](A& a, std::byte* raw) {
        auto& s = *reinterpret_cast<Smem<A>*>(raw);
        if (!a.elect_one()) return;
        a.mbar_init(s.bar, 1, false);
        a.mbar_arrive_expect_tx(s.bar, 256);
        a.bulk_g2s(s.data[0], global_memory, 128, s.bar);
        a.bulk_g2s(s.data[1], global_memory, 128, s.bar);
      });
    } catch (const ProtocolError& e) {
      CHECK(e.rule() == Rule::kUnfinishedLoad || e.rule() == Rule::kExpectTx);
      return;
    }
  }
  throw check::Failure("never caught");
}
ON_CHECKED(rule_unfinished_load);

template <class A>
void rule_divergence() {
  if constexpr (A::kLanes > 1) {
    const auto rule = [](auto body) {
      LaunchConfig config = grid(1, 1);
      config.timeout_s = 2;
      try {
        launch<A>(config, [&](A& a, std::byte*) { body(a); });
      } catch (const ProtocolError& e) {
        return e.rule();
      }
      throw check::Failure("no rule was reported");
    };
    CHECK_EQ(rule([](A& a) { a.lane() == 1 ? (void)a.elect_one() : a.warp_sync(); }), Rule::kDivergence);
    if constexpr (!A::Exec::kThreads) {  // under threads the deadline may be the one to tell
      CHECK_EQ(rule([](A& a) {
                 if (a.lane() != 2) a.warp_sync();
               }),
               Rule::kDivergence);
    }
  }
}
ON_CHECKED(rule_divergence);

template <class A>
void rule_named_barrier() {
  EXPECT_RULE(Rule::kNamedBarrier, { a.group_sync(0, 1); });
  EXPECT_RULE(Rule::kNamedBarrier, { a.group_sync(16, 1); });
  EXPECT_RULE(Rule::kNamedBarrier, { a.group_sync(1, 3); });
  const auto two_groups_one_id = [] { launch<A>(grid(1, 2), [](A& a, std::byte*) { a.group_sync(1, 1); }); };
  CHECK_THROWS(ProtocolError, two_groups_one_id());
}
ON_CHECKED(rule_named_barrier);

// What looks suspicious and is legal: nothing of this may be reported.
template <class A>
void legal_neighbours() {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    launch<A>(grid(1, 1, sizeof(Smem<A>), seed), [](A& a, std::byte* raw) {
      auto& s = *reinterpret_cast<Smem<A>*>(raw);
      a.template bulk_wait<0>();  // all lanes wait, also those with nothing to wait for
      if (!a.elect_one()) return;
      a.mbar_init(s.bar, 1, false);
      a.mbar_init(s.guard, 2, true);
      a.bulk_g2s(s.data[0], global_memory, 64, s.bar);  // issue first, announce later: the phase cannot end
      a.st_shared(s.data[0] + 64, 1);                   // next to, not in, what is loading
      a.bulk_commit();                                  // an empty group
      a.mbar_arrive_expect_tx(s.bar, 64);
      a.mbar_wait(s.bar, 0, kSite);
      a.ld_shared(s.data[0]);
      a.bulk_s2g(global_memory + 256, s.data[0], 64);  // read by both proxies
      a.bulk_commit();
      a.publish_shared();
      a.mbar_arrive(s.guard);
      a.template bulk_wait_read<0>();
      a.bulk_g2s(s.data[0], global_memory, 64, s.bar);
      a.mbar_arrive_expect_tx(s.bar, 64);
      a.mbar_wait(s.bar, 1, kSite);
      a.template bulk_wait<0>();
      a.st_shared(s.data[1], 1);  // never published, never read: nobody's business
    });
  }
}
ON_CHECKED(legal_neighbours);

// Garbage, not zeros: what was never written must not look like a good value.
template <class A>
void shared_memory_starts_as_garbage() {
  int zero_bytes = 0;
  launch<A>(grid(1, 1, 1024), [&](A& a, std::byte* smem) {
    if (!a.elect_one()) return;
    for (int i = 0; i < 1024; ++i) zero_bytes += a.ld_shared(reinterpret_cast<uint8_t*>(smem) + i) == 0;
  });
  CHECK(zero_bytes < 64);
}
ON_CHECKED(shared_memory_starts_as_garbage);

}  // namespace
}  // namespace hep::host::test
