// Launching: deadlines and timeout reports, failures that end everybody, worlds of several ranks, callbacks,
// reproducibility.
#include "test_arch_host.h"

#include <array>
#include <atomic>
#include <fstream>
#include <vector>

namespace hep::host::test {
namespace {

// Runs `body` with a deadline of 0.2 s and returns the timeout report it must end with.
template <class A, class F>
TimeoutReport timeout_of(F body, int warps = 1) {
  LaunchConfig config = grid(2, warps, 1024);
  config.rank = 5;
  config.node = 2;
  config.num_local_ranks = 2;
  config.timeout_s = 0.2;
  try {
    launch<A>(config, [&](A& a, std::byte* smem) {
      if (a.block_idx() == 1) body(a, smem);
    });
  } catch (const DeadlineError& e) {
    const TimeoutReport o = e.timeout_report();
    CHECK(o.rank == 5 && o.node == 2 && o.block == 1 && o.waited_s >= 0.2 && o.waited_s < 10);
    return o;
  }
  throw check::Failure("no deadline expired");
}

template <class A>
void deadline_of_a_flag() {
  uint64_t flag = 2;
  const TimeoutReport o = timeout_of<A>([&](A& a, std::byte*) {
    a.set_role(Role::kG2s);
    a.wait_ge_sys(&flag, 4, {Site::kRailChunk, 1, 3});
  });
  CHECK(o.site == Site::kRailChunk && o.peer == 1 && o.peer_node == 0 && o.chunk == 3);
  CHECK(o.expected == 4 && o.seen == 2 && std::string(o.role) == "g2s" && o.warp == 0);
  const std::string what = DeadlineError(o).what();
  CHECK(what.find("rank 5 (node 2) waited ") == 0);
  CHECK(what.find(" in role g2s, block 1, warp 0: rail_chunk from rank 1 (node 0), chunk 3: expected 4, saw 2") !=
        std::string::npos);
}
ON_ALL(deadline_of_a_flag);

template <class A>
void deadline_of_an_mbarrier() {
  const TimeoutReport o = timeout_of<A>([](A& a, std::byte* smem) {
    auto& bar = *reinterpret_cast<typename A::Mbarrier*>(smem);
    if (a.elect_one()) a.mbar_init(bar, 2, false);
    a.block_sync();
    if (a.elect_one()) a.mbar_arrive(bar);
    a.mbar_wait(bar, 0, {Site::kStageFull, -1, 7});
  });
  CHECK(o.site == Site::kStageFull && o.peer == -1 && o.chunk == 7 && o.expected == 1 && o.seen == 0);
}
ON_ALL(deadline_of_an_mbarrier);

template <class A>
void deadline_of_meetings() {
  const TimeoutReport block = timeout_of<A>(
      [](A& a, std::byte*) {
        if (a.warp_idx() == 0) a.block_sync();
      },
      2);
  CHECK(block.site == Site::kBlockSync && block.warp == 0);
  CHECK(block.expected == 2 * A::kLanes);
  CHECK(A::Exec::kThreads ? block.seen <= A::kLanes : block.seen == A::kLanes);
  const TimeoutReport group = timeout_of<A>(
      [](A& a, std::byte*) {
        if (a.warp_idx() == 2) a.group_sync(4, 2);
      },
      3);
  CHECK(group.site == Site::kBlockSync && group.warp == 2);
}
ON_ALL(deadline_of_meetings);

template <class A>
void deadline_of_polling() {
  const TimeoutReport o = timeout_of<A>([](A& a, std::byte*) {
    for (int i = 0; i < 50; ++i) {  // rounds with success do not count
      a.poll_idle(kSite, 1, 0);
      a.poll_reset();
    }
    for (;;) a.poll_idle({Site::kRailAny, 3, 1}, 9, 8);
  });
  CHECK(o.site == Site::kRailAny && o.peer == 3 && o.expected == 9 && o.seen == 8);
}
ON_ALL(deadline_of_polling);

// Of waits that expire together, the one that names a peer is nearest to the cause.
template <class A>
void the_wait_for_a_peer_is_reported() {
  uint64_t flag = 0;
  const TimeoutReport o = timeout_of<A>(
      [&](A& a, std::byte*) {
        if (a.warp_idx() == 2) a.wait_ge_sys(&flag, 1, {Site::kPeerReady, 3});
        a.block_sync();
      },
      4);
  if (!A::Exec::kThreads) CHECK(o.site == Site::kPeerReady);  // threads: whoever notices first
}
ON_ALL(the_wait_for_a_peer_is_reported);

// A launch of a rank that was given up: every lane is told. Meetings that others come to are whole.
template <class A>
void lanes_are_told_that_their_rank_was_given_up() {
  LaunchConfig config = grid(2, 3);
  for (const bool given_up : {false, true}) {
    config.given_up = given_up;
    std::atomic<int> told = 0, whole = 0;
    launch<A>(config, [&](A& a, std::byte*) {
      told += a.given_up();
      whole += a.warp_whole() && a.block_whole();
    });
    CHECK_EQ(told.load(), given_up ? 6 * A::kLanes : 0);
    CHECK_EQ(whole.load(), 6 * A::kLanes);
  }
}
ON_ALL(lanes_are_told_that_their_rank_was_given_up);

struct Boom : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One lane throws while all others wait, deep in their stacks: launch() rethrows it soon, every destructor
// runs, and the next launch works.
template <class A>
void one_failure_ends_all() {
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> entered = 0, left = 0;
    uint64_t flag = 0;
    const int64_t start = now_ns();
    CHECK_THROWS(Boom, launch<A>(grid(2, 3, 64), [&](A& a, std::byte*) {
                   struct Count {
                     std::atomic<int>& n;
                     ~Count() { ++n; }
                   } count{left};
                   ++entered;
                   if (a.block_idx() == 1 && a.warp_idx() == 1 && a.elect_one()) throw Boom("boom");
                   if (a.warp_idx() == 0) a.wait_ge_sys(&flag, 1, kSite);
                   if (a.warp_idx() == 2)
                     for (;;) a.poll_idle(kSite, 1, 0);
                   a.block_sync();
                 }));
    CHECK(now_ns() - start < 5'000'000'000);
    CHECK_EQ(entered.load(), left.load());
    int lanes = 0;
    launch<A>(grid(1, 1), [&](A& a, std::byte*) {
      if (a.elect_one()) ++lanes;
    });
    CHECK_EQ(lanes, 1);
  }
}
ON_ALL(one_failure_ends_all);

// Exceptions belong to their lane even when lanes switch inside handlers.
template <class A>
void handlers_survive_switches() {
  std::atomic<int> good = 0;
  uint64_t turn = 0;
  launch<A>(grid(1, 4), [&](A& a, std::byte*) {
    if (!a.elect_one()) return;
    const auto warp = static_cast<uint64_t>(a.warp_idx());
    try {
      try {
        throw Boom(std::to_string(warp));
      } catch (const Boom&) {
        // Enter handlers in order of warps, leave them in the same order: never nested.
        a.wait_ge_sys(&turn, warp, kSite);
        a.add_release_sys(&turn, 1);
        a.wait_ge_sys(&turn, 4 + warp, kSite);
        a.add_release_sys(&turn, 1);
        throw;
      }
    } catch (const Boom& e) {
      if (e.what() == std::to_string(warp) && std::uncaught_exceptions() == 0) ++good;
    }
  });
  CHECK_EQ(good.load(), 4);
}
ON_ALL(handlers_survive_switches);

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
size_t num_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  size_t n = 0;
  while (std::getline(maps, line)) ++n;
  return n;
}

template <class A>
void failures_leak_no_stacks() {
  const auto fail_once = [] {
    CHECK_THROWS(Boom, launch<A>(grid(2, 4, 256), [](A& a, std::byte*) {
                   if (a.block_idx() == 0 && a.warp_idx() == 3) throw Boom("boom");
                   a.block_sync();
                 }));
  };
  for (int i = 0; i < 10; ++i) fail_once();
  const size_t before = num_mappings();
  for (int i = 0; i < 100; ++i) fail_once();
  CHECK(num_mappings() <= before + 8);
}
ON_ALL(failures_leak_no_stacks);
#endif

template <class A>
void interrupted_ends_the_launch() {
  LaunchConfig config = grid(2, 2);
  std::atomic<int> asked = 0;
  const auto here = reinterpret_cast<intptr_t>(__builtin_frame_address(0));
  std::atomic<bool> on_this_stack =
      true;  // and not on a lane's, of 128 KiB, which an interpreter takes for an overflow
  config.interrupted = [&] {
    on_this_stack = on_this_stack && std::abs(reinterpret_cast<intptr_t>(__builtin_frame_address(0)) - here) < 65536;
    return ++asked == 3;
  };
  uint64_t flag = 0;
  const int64_t start = now_ns();
  CHECK_THROWS(Interrupted, launch<A>(config, [&](A& a, std::byte*) { a.wait_ge_sys(&flag, 1, kSite); }));
  const double seconds = static_cast<double>(now_ns() - start) * 1e-9;
  CHECK(asked == 3 && seconds > 0.15 && seconds < 10);
  CHECK(on_this_stack);
}
ON_ALL(interrupted_ends_the_launch);

// The transport's progress is called while lanes wait, and what it throws ends the launch.
template <class A>
void progress_runs_beside_the_lanes() {
  LaunchConfig config = grid(1, 2);
  uint64_t flag = 0;
  int rounds = 0;
  config.progress = [&] {
    if (++rounds == 50) std::atomic_ref(flag).store(1, std::memory_order_release);
    return rounds < 50;
  };
  launch<A>(config, [&](A& a, std::byte*) { a.wait_ge_sys(&flag, 1, kSite); });
  CHECK(rounds >= 50);
  config.progress = []() -> bool { throw Boom("transport"); };
  CHECK_THROWS(Boom, launch<A>(config, [&](A& a, std::byte*) { a.wait_ge_sys(&flag, 2, kSite); }));
}
ON_ALL(progress_runs_beside_the_lanes);

// Four ranks of different shapes in one process, each waiting for its left neighbour.
template <class A>
void world_of_ranks() {
  constexpr int kRanks = 4;
  std::array<uint64_t, kRanks> flag{};
  std::array<uint32_t, kRanks> payload{};
  std::vector<RankProgram<A>> programs;
  for (int rank = 0; rank < kRanks; ++rank) {
    LaunchConfig config = grid(1 + rank % 2, 1 + rank, 64);
    config.rank = rank;
    programs.push_back({config, [&, rank](A& a, std::byte*) {
                          const auto me = static_cast<size_t>(rank),
                                     left = static_cast<size_t>((rank + kRanks - 1) % kRanks);
                          CHECK_EQ(a.num_warps(), 1 + rank);
                          for (uint64_t round = 1; round <= 5; ++round) {
                            a.block_sync();
                            if (a.block_idx() == 0 && a.warp_idx() == 0 && a.elect_one()) {
                              if (rank != 0) {
                                a.wait_ge_sys(&flag[left], round, {Site::kPeerReady, rank - 1});
                                CHECK_EQ(a.ld_global(&payload[left]), 10 * static_cast<uint32_t>(round));
                              }
                              a.st_global(&payload[me], 10 * static_cast<uint32_t>(round));
                              a.st_release_sys(&flag[me], round);
                              a.wait_ge_sys(&flag[kRanks - 1], round, {Site::kPeerDone, kRanks - 1});
                            }
                            a.block_sync();
                          }
                        }});
  }
  launch_world<A>(std::span<const RankProgram<A>>(programs));
  for (const uint64_t f : flag) CHECK_EQ(f, 5u);
  programs[2].body = [](A&, std::byte*) {};  // rank 2 never comes: rank 3 waits for it, 0 and 1 for rank 3
  for (auto& program : programs) program.config.timeout_s = 0.3;
  flag = {};
  try {
    launch_world<A>(std::span<const RankProgram<A>>(programs));
  } catch (const DeadlineError& e) {
    if (!A::Exec::kThreads) CHECK(e.timeout_report().rank == 3 || e.timeout_report().peer == 3);
    return;
  }
  throw check::Failure("no deadline expired");
}
ON_ALL(world_of_ranks);

// The order in which lanes reach their flags, as one lane sees it.
#if !defined(__SANITIZE_THREAD__)
template <class A>
std::vector<int> interleaving(uint64_t seed) {
  std::vector<int> order;
  struct Smem {
    alignas(16) uint8_t data[8][64];
    typename A::Mbarrier bar[8];
  };
  alignas(16) static uint8_t src[64];
  launch<A>(grid(2, 4, sizeof(Smem), seed), [&](A& a, std::byte* smem) {
    auto& s = *reinterpret_cast<Smem*>(smem);
    const int w = a.warp_idx();
    if (!a.elect_one()) return;
    for (uint32_t round = 0; round < 4; ++round) {
      if (round == 0) a.mbar_init(s.bar[w], 1, false);
      a.mbar_arrive_expect_tx(s.bar[w], 64);
      a.bulk_g2s(s.data[w], src, 64, s.bar[w]);
      a.mbar_wait(s.bar[w], round & 1, kSite);
      order.push_back(a.block_idx() * 4 + w);
    }
  });
  return order;
}

template <class A>
void same_seed_same_interleaving() {
  int different = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const std::vector<int> order = interleaving<A>(seed);
    CHECK(order == interleaving<A>(seed));
    different += order != interleaving<A>(seed + 100);
  }
  CHECK(different >= 7);
}
HEP_REGISTER(same_seed_same_interleaving, CheckedFibers1);
HEP_REGISTER(same_seed_same_interleaving, CheckedFibers4);
#endif

template <class A>
void bad_configurations_and_nesting() {
  const auto nothing = [](A&, std::byte*) {};
  LaunchConfig config = grid(0, 1);
  CHECK_THROWS(std::invalid_argument, launch<A>(config, nothing));
  config = grid(1, -1);
  CHECK_THROWS(std::invalid_argument, launch<A>(config, nothing));
  config = grid(1, 1);
  config.timeout_s = 0;
  CHECK_THROWS(std::invalid_argument, launch<A>(config, nothing));
  if (!A::Exec::kThreads) {
    CHECK_THROWS(std::logic_error, launch<A>(grid(1, 1), [&](A&, std::byte*) { launch<A>(grid(1, 1), nothing); }));
  }
  launch<A>(grid(1, 1), nothing);
}
ON_ALL(bad_configurations_and_nesting);

template <class A>
void shared_memory_is_aligned_and_private() {
  std::array<std::byte*, 3> at{};
  launch<A>(grid(3, 1, 200), [&](A& a, std::byte* smem) {
    if (a.elect_one()) at[static_cast<size_t>(a.block_idx())] = smem;
  });
  for (size_t i = 0; i < 3; ++i) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(at[i]) % 128, 0u);
    if (i > 0) CHECK(at[i] >= at[i - 1] + 200);
  }
}
ON_ALL(shared_memory_is_aligned_and_private);

}  // namespace
}  // namespace hep::host::test
