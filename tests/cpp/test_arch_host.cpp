// Conformance: one test per primitive of the Arch contract, on every executor and lane width.
#include "test_arch_host.h"

#include <array>
#include <atomic>
#include <numeric>
#include <set>

HEP_TEST_MAIN

namespace hep::host::test {
namespace {

template <class A>
void identity() {
  std::array<std::atomic<int>, 2 * 3 * A::kLanes> seen{};
  launch<A>(grid(2, 3), [&](A& a, std::byte*) {
    CHECK(a.num_blocks() == 2 && a.num_warps() == 3);
    ++seen[static_cast<size_t>((a.block_idx() * 3 + a.warp_idx()) * A::kLanes + a.lane())];
  });
  for (const auto& n : seen) CHECK_EQ(n.load(), 1);
}
ON_ALL(identity);

template <class A>
void elect_one_is_one_and_stays() {
  std::array<std::array<std::atomic<int>, A::kLanes>, 4> elected{};
  launch<A>(grid(2, 2), [&](A& a, std::byte*) {
    const auto w = static_cast<size_t>(a.block_idx() * 2 + a.warp_idx());
    for (int i = 0; i < 10; ++i) {
      if (a.elect_one()) ++elected[w][static_cast<size_t>(a.lane())];
    }
  });
  for (const auto& warp : elected) {
    int lanes = 0;
    for (const auto& n : warp) {
      CHECK(n == 0 || n == 10);
      lanes += n == 10;
    }
    CHECK_EQ(lanes, 1);
  }
}
ON_ALL(elect_one_is_one_and_stays);

// Every lane writes its cell and reads all others', round after round, with a sync on either side.
template <class A, class Sync>
void exchange(int warps, Sync sync) {
  launch<A>(grid(2, warps, 4 * 4 * 16), [&](A& a, std::byte* smem) {
    auto* cell = reinterpret_cast<uint32_t*>(smem);
    for (uint32_t round = 1; round <= 8; ++round) {
      auto [first, count, mine] = sync(a);
      a.st_shared(cell + 4 * mine, round * 100 + static_cast<uint32_t>(mine));
      sync(a);
      for (int i = first; i < first + count; ++i) {
        CHECK_EQ(a.ld_shared(cell + 4 * i), round * 100 + static_cast<uint32_t>(i));
      }
    }
  });
}
struct Cells {
  int first, count, mine;
};

template <class A>
void warp_sync_orders_shared() {
  exchange<A>(2, [](A& a) {
    a.warp_sync();
    return Cells{a.warp_idx() * A::kLanes, A::kLanes, a.warp_idx() * A::kLanes + a.lane()};
  });
}
ON_ALL(warp_sync_orders_shared);

template <class A>
void block_sync_orders_shared() {
  exchange<A>(3, [](A& a) {
    a.block_sync();
    return Cells{0, 3 * A::kLanes, a.warp_idx() * A::kLanes + a.lane()};
  });
}
ON_ALL(block_sync_orders_shared);

template <class A>
void group_sync_orders_shared() {
  exchange<A>(4, [](A& a) {
    const int group = a.warp_idx() / 2;
    a.group_sync(1 + group, 2);
    return Cells{group * 2 * A::kLanes, 2 * A::kLanes, a.warp_idx() * A::kLanes + a.lane()};
  });
}
ON_ALL(group_sync_orders_shared);

template <class A>
void mbarrier_phases() {
  struct Smem {
    typename A::Mbarrier bar;
    alignas(16) uint32_t value;
  };
  launch<A>(grid(1, 3, sizeof(Smem)), [](A& a, std::byte* smem) {
    auto& s = *reinterpret_cast<Smem*>(smem);
    if (a.warp_idx() == 0 && a.elect_one()) a.mbar_init(s.bar, 2, false);
    a.block_sync();
    CHECK(a.mbar_test(s.bar, 1));  // the phase before the first one counts as complete
    for (uint32_t round = 0; round < 6; ++round) {
      const uint32_t parity = round & 1;
      a.block_sync();
      CHECK(!a.mbar_test(s.bar, parity));  // no arrival yet
      a.block_sync();
      if (a.warp_idx() == 0 && a.elect_one()) {
        a.st_shared(&s.value, round);
        a.mbar_arrive(s.bar);
      }
      if (a.warp_idx() == 0) {
        a.warp_sync();
        CHECK(!a.mbar_test(s.bar, parity) || round % 2 == 1);  // one of two, or warp 1 was faster
      }
      if (a.warp_idx() == 1) {
        if (round % 2 == 0) a.group_sync(3, 2);
        if (a.elect_one()) a.mbar_arrive(s.bar);
      }
      if (a.warp_idx() == 0 && round % 2 == 0) a.group_sync(3, 2);
      a.mbar_wait(s.bar, parity, kSite);
      CHECK(a.mbar_test(s.bar, parity));
      CHECK_EQ(a.ld_shared(&s.value), round);
    }
  });
}
ON_ALL(mbarrier_phases);

template <class A>
void bulk_loads_land_before_their_barrier() {
  struct Smem {
    alignas(128) uint8_t data[3][64];
    typename A::Mbarrier bar;
  };
  alignas(16) std::array<uint8_t, 192> src;
  std::iota(src.begin(), src.end(), uint8_t{1});
  launch<A>(grid(2, 2, sizeof(Smem)), [&](A& a, std::byte* smem) {
    auto& s = *reinterpret_cast<Smem*>(smem);
    if (a.warp_idx() == 0 && a.elect_one()) a.mbar_init(s.bar, 1, false);
    a.block_sync();
    if (a.warp_idx() == 0) {
      if (a.elect_one()) {
        a.mbar_arrive_expect_tx(s.bar, 64 + 32 + 48);
        a.bulk_g2s(s.data[0], src.data(), 64, s.bar);
        a.bulk_g2s(s.data[1], src.data() + 64, 32, s.bar);
        a.bulk_g2s(s.data[2], src.data() + 128, 48, s.bar);
      }
      a.warp_sync();
    }
    a.mbar_wait(s.bar, 0, kSite);
    const int sizes[3] = {64, 32, 48};
    for (int part = 0; part < 3; ++part) {
      for (int i = a.lane(); i < sizes[part]; i += A::kLanes) {
        CHECK_EQ(a.ld_shared(&s.data[part][i]), src[static_cast<size_t>(part * 64 + i)]);
      }
    }
  });
}
ON_ALL(bulk_loads_land_before_their_barrier);

// Two slots of shared memory, refilled once bulk_wait_read<1> says so; all rows complete after bulk_wait<0>.
template <class A>
void bulk_stores_follow_their_waits() {
  constexpr int kRows = 9, kWords = 16;
  struct Smem {
    alignas(128) uint32_t slot[2][kWords];
  };
  alignas(16) static uint32_t dst[kRows][kWords];
  std::memset(dst, 0, sizeof dst);
  uint64_t done = 0;
  launch<A>(grid(1, 2, sizeof(Smem)), [&](A& a, std::byte* smem) {
    auto& s = *reinterpret_cast<Smem*>(smem);
    if (a.warp_idx() == 1) {  // the reader
      a.wait_ge_sys(&done, kRows, kSite);
      for (int r = 0; r < kRows; ++r) {
        for (int i = a.lane(); i < kWords; i += A::kLanes) {
          CHECK_EQ(a.ld_global(&dst[r][i]), static_cast<uint32_t>(r * 1000 + i));
        }
      }
      return;
    }
    const bool leader = a.elect_one();
    for (int r = 0; r < kRows; ++r) {
      if (leader) a.template bulk_wait_read<1>();
      a.warp_sync();
      for (int i = a.lane(); i < kWords; i += A::kLanes) {
        a.st_shared(&s.slot[r % 2][i], static_cast<uint32_t>(r * 1000 + i));
      }
      a.publish_shared();
      a.warp_sync();
      if (leader) {
        a.bulk_s2g(dst[r], s.slot[r % 2], sizeof dst[r]);
        a.bulk_commit();
      }
    }
    if (leader) {
      a.template bulk_wait<0>();
      a.st_release_sys(&done, kRows);
    }
  });
}
ON_ALL(bulk_stores_follow_their_waits);

// Shared memory goes out as it came in, without a generic access between: global -> shared -> global.
template <class A>
void bulk_relay() {
  struct Smem {
    alignas(128) uint8_t data[256];
    typename A::Mbarrier bar;
  };
  alignas(16) std::array<uint8_t, 256> src, dst{};
  std::iota(src.begin(), src.end(), uint8_t{3});
  launch<A>(grid(1, 1, sizeof(Smem)), [&](A& a, std::byte* smem) {
    auto& s = *reinterpret_cast<Smem*>(smem);
    if (!a.elect_one()) return;
    a.mbar_init(s.bar, 1, false);
    a.mbar_arrive_expect_tx(s.bar, 256);
    a.bulk_g2s(s.data, src.data(), 256, s.bar);
    a.mbar_wait(s.bar, 0, kSite);
    a.bulk_s2g(dst.data(), s.data, 256);
    a.bulk_commit();
    a.template bulk_wait<0>();
  });
  CHECK(src == dst);
}
ON_ALL(bulk_relay);

template <class A, class T>
void round_trip(A& a, std::byte* shared, std::byte* global) {
  T value, back;
  for (size_t i = 0; i < sizeof(T); ++i) reinterpret_cast<uint8_t*>(&value)[i] = static_cast<uint8_t>(17 * i + 5);
  a.st_shared(reinterpret_cast<T*>(shared), value);
  back = a.ld_shared(reinterpret_cast<const T*>(shared));
  CHECK(std::memcmp(&back, &value, sizeof(T)) == 0);
  a.st_global(reinterpret_cast<T*>(global), value);
  back = a.ld_global(reinterpret_cast<const T*>(global));
  CHECK(std::memcmp(&back, &value, sizeof(T)) == 0);
}

template <class A>
void loads_and_stores_of_every_width() {
  alignas(16) std::byte global[64 * A::kLanes];
  launch<A>(grid(1, 1, 64 * A::kLanes), [&](A& a, std::byte* smem) {
    std::byte *s = smem + 64 * a.lane(), *g = global + 64 * a.lane();
    round_trip<A, uint8_t>(a, s + 1, g + 1);
    round_trip<A, uint16_t>(a, s + 2, g + 2);
    round_trip<A, float>(a, s + 4, g + 4);
    round_trip<A, double>(a, s + 8, g + 8);
    round_trip<A, Vec16>(a, s + 16, g + 16);
  });
}
ON_ALL(loads_and_stores_of_every_width);

template <class A>
void release_store_and_acquire_load() {
  uint64_t flag = 0;
  uint32_t payload = 0;
  launch<A>(grid(2, 1), [&](A& a, std::byte*) {
    if (a.block_idx() == 0) {
      if (a.elect_one()) {
        a.st_global(&payload, 77u);
        a.st_release_sys(&flag, 5);
      }
      return;
    }
    while (a.ld_acquire_sys(&flag) < 5) a.poll_idle(kSite, 5, 0);
    a.poll_reset();
    CHECK_EQ(a.ld_global(&payload), 77u);
  });
}
ON_ALL(release_store_and_acquire_load);

template <class A>
void adds_and_wait_ge() {
  uint64_t flag = 0;
  std::array<uint32_t, 3> payload{};
  launch<A>(grid(4, 1), [&](A& a, std::byte*) {
    const auto b = static_cast<size_t>(a.block_idx());
    if (b < 3) {
      if (a.elect_one()) {
        a.st_global(&payload[b], static_cast<uint32_t>(b + 1));
        a.add_release_sys(&flag, b + 1);
      }
      return;
    }
    a.wait_ge_sys(&flag, 6, kSite);
    CHECK_EQ(a.ld_global(&payload[0]) + a.ld_global(&payload[1]) + a.ld_global(&payload[2]), 6u);
    a.wait_ge_sys(&flag, 2, kSite);  // "at least": passes at once
  });
  CHECK_EQ(flag, 6u);
}
ON_ALL(adds_and_wait_ge);

// The last block to finish sees what all others wrote: acquire and release in one operation.
template <class A>
void add_acq_rel_elects_the_last_block() {
  uint64_t finished = 0;
  std::array<uint32_t, 4> payload{};
  std::atomic<int> last = 0;
  launch<A>(grid(4, 1), [&](A& a, std::byte*) {
    if (!a.elect_one()) return;
    a.st_global(&payload[static_cast<size_t>(a.block_idx())], 1u);
    if (a.add_acq_rel_rank(&finished, 1) != 3) return;
    ++last;
    for (const uint32_t& p : payload) CHECK_EQ(a.ld_global(&p), 1u);
  });
  CHECK_EQ(last.load(), 1);
}
ON_ALL(add_acq_rel_elects_the_last_block);

// publish_shared carries each lane's own writes over to bulk stores, also where lanes share 16 bytes.
template <class A>
void publish_shared_by_every_lane() {
  struct Smem {
    alignas(16) uint8_t bytes[64];
  };
  alignas(16) std::array<uint8_t, 64> dst{};
  launch<A>(grid(1, 1, sizeof(Smem)), [&](A& a, std::byte* smem) {
    auto& s = *reinterpret_cast<Smem*>(smem);
    for (int i = a.lane(); i < 64; i += A::kLanes) a.st_shared(&s.bytes[i], static_cast<uint8_t>(i * 3));
    a.publish_shared();
    a.warp_sync();
    if (!a.elect_one()) return;
    a.bulk_s2g(dst.data(), s.bytes, 64);
    a.bulk_commit();
    a.template bulk_wait<0>();
  });
  for (size_t i = 0; i < 64; ++i) CHECK_EQ(int{dst[i]}, static_cast<int>(i * 3));
}
ON_ALL(publish_shared_by_every_lane);

}  // namespace
}  // namespace hep::host::test
