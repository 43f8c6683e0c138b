// The transports' contract, verb by verb, on fibers and on threads: what each promises, and on the loopback rail
// what it does not promise either, so that code which leans on more is caught.
#include "check.h"

#include <cstring>
#include <memory>
#include <numeric>

#include "arch/host/launch.h"
#include "transport/loopback/loopback_transport.h"
#include "transport/shm/shm_transport.h"

HEP_TEST_MAIN

namespace hep {
namespace {

using namespace host;

constexpr uint64_t kBytes = 1024, kSlots = 8;
constexpr uint64_t kData = 0, kSource = kBytes * kSlots, kFlags = 2 * kBytes * kSlots,
                   kSegment = kFlags + 64 * 2 * kSlots;

static_assert(Transport<ShmTransport, PlainFibers> && Transport<ShmTransport, PlainThreads<4>>);
static_assert(Transport<LoopbackTransport, CheckedFibers<1>> && Transport<LoopbackTransport, PlainThreads<1>>);

// Two nodes of one rank each. Every rank has its own transport object, as every process has.
template <class Net>
class Pair {
 public:
  explicit Pair(uint64_t seed) : seed_(seed) {
    for (int n = 0; n < 2; ++n) {
      memory_[n].assign(kSegment / sizeof(Vec16), Vec16{});
      segments_[n] = reinterpret_cast<unsigned char*>(memory_[n].data());
    }
    for (int n = 0; n < 2; ++n) {
      if constexpr (std::is_same_v<Net, LoopbackTransport>)
        net[n] = std::make_unique<Net>(segments_, seed * 2 + uint64_t(n));
      else
        net[n] = std::make_unique<Net>(segments_);
    }
  }
  unsigned char* data(int node, uint64_t slot) { return segments_[node] + kData + slot * kBytes; }
  unsigned char* source(int node, uint64_t slot) { return segments_[node] + kSource + slot * kBytes; }
  uint64_t* flag(int node, uint64_t i) { return reinterpret_cast<uint64_t*>(segments_[node] + flag_offset(i)); }
  static uint64_t data_offset(uint64_t slot) { return kData + slot * kBytes; }
  static uint64_t flag_offset(uint64_t i) { return kFlags + 64 * i; }

  // body(arch, net, node) on one lane of each rank.
  template <class A, class Body>
  void run(Body body, double timeout_s = 20) {
    std::vector<RankProgram<A>> programs(2);
    for (int n = 0; n < 2; ++n) {
      LaunchConfig& c = programs[n].config;
      c.smem_bytes = 64;
      c.rank = c.node = n;
      c.timeout_s = timeout_s;
      c.seed = seed_;
      c.progress = [this, n] { return net[n]->progress(); };
      programs[n].body = [this, n, body](A& a, std::byte*) {
        if (a.elect_one()) body(a, *net[n], n);
      };
    }
    launch_world<A>(std::span<const RankProgram<A>>(programs));
    for (auto& n : net) n->settle();
  }
  std::unique_ptr<Net> net[2];

 private:
  uint64_t seed_;
  std::vector<Vec16> memory_[2];
  unsigned char* segments_[2];
};

void fill(unsigned char* p, uint64_t value) {
  std::memset(p, int(value % 251), kBytes);
}
// How many bytes are not `value`'s.
size_t stale(const unsigned char* p, uint64_t value) {
  size_t n = 0;
  for (uint64_t i = 0; i < kBytes; ++i) n += p[i] != value % 251;
  return n;
}

// Messages through slots, with credits: the pattern of the rail ring, spelled out.
template <class A, class Net>
void put_signal_shows_its_bytes(uint64_t seed) {
  Pair<Net> pair(seed);
  constexpr uint64_t kMessages = 60;
  pair.template run<A>([&](A& a, Net& net, int node) {
    for (uint64_t q = 1; q <= kMessages; ++q) {
      const uint64_t slot = q % kSlots;
      if (node == 0) {
        if (q > kSlots) net.wait_signal(a, pair.flag(0, kSlots + slot), q - kSlots, {Site::kTestSite, 1, int64_t(q)});
        fill(pair.source(0, slot), q);
        net.put_signal(a, 1, pair.data_offset(slot), pair.source(0, slot), kBytes, pair.flag_offset(slot), q);
      } else {
        if (q % 3 == 0)
          while (!net.test_signal(a, pair.flag(1, slot), q)) a.poll_idle({Site::kTestSite, 0, int64_t(q)}, q, 0);
        a.poll_reset();
        net.wait_signal(a, pair.flag(1, slot), q, {Site::kTestSite, 0, int64_t(q)});
        CHECK_EQ(stale(pair.data(1, slot), q), 0u);
        net.signal(a, 0, pair.flag_offset(kSlots + slot), q);
      }
    }
  });
}

template <class A, class Net>
void what_a_kernel_leaves_behind_lands(uint64_t seed) {
  Pair<Net> pair(seed);
  for (uint64_t round = 1; round <= 5; ++round) {
    pair.template run<A>([&](A& a, Net& net, int node) {
      for (uint64_t slot = 0; slot < kSlots && node == 0; ++slot) {
        fill(pair.source(0, slot), round * 10 + slot);
        net.put(a, 1, pair.data_offset(slot), pair.source(0, slot), kBytes);
        net.signal(a, 1, pair.flag_offset(slot), round);
      }
    });
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      CHECK_EQ(stale(pair.data(1, slot), round * 10 + slot), 0u);
      CHECK_EQ(*pair.flag(1, slot), round);
    }
  }
}

// Signals to one location, each of which is answered before the next.
template <class A, class Net>
void a_value_never_falls(uint64_t seed) {
  Pair<Net> pair(seed);
  pair.template run<A>([&](A& a, Net& net, int node) {
    for (uint64_t value = 1; value <= 200; ++value) {
      if (node == 0) net.signal(a, 1, pair.flag_offset(0), value);
      net.wait_signal(a, pair.flag(node, 0), value, {Site::kTestSite, 1 - node});
      CHECK_EQ(a.ld_acquire_sys(pair.flag(node, 0)), value);
      if (node == 1) net.signal(a, 0, pair.flag_offset(0), value);
    }
  });
  CHECK_EQ(*pair.flag(1, 0), 200u);
}

// Two signals to one location at once: how often is the first what stays?
template <class A, class Net>
int times_signals_swap() {
  int swapped = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Pair<Net> pair(seed);
    pair.template run<A>([&](A& a, Net& net, int node) {
      for (uint64_t value = 1; value <= 2 && node == 0; ++value) net.signal(a, 1, pair.flag_offset(0), value);
    });
    swapped += *pair.flag(1, 0) == 1;
  }
  return swapped;
}

// A put and then a signal: how often is the signal seen without the bytes?
template <class A, class Net>
int times_signal_overtakes_put() {
  int overtaken = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Pair<Net> pair(seed);
    pair.template run<A>([&](A& a, Net& net, int node) {
      if (node == 0) {
        fill(pair.source(0, 0), 7);
        net.put(a, 1, pair.data_offset(0), pair.source(0, 0), kBytes);
        net.signal(a, 1, pair.flag_offset(0), 1);
        net.wait_signal(a, pair.flag(0, 1), 1, {Site::kTestSite, 1});
      } else {
        net.wait_signal(a, pair.flag(1, 0), 1, {Site::kTestSite, 0});
        overtaken += stale(pair.data(1, 0), 7) != 0;
        net.signal(a, 0, pair.flag_offset(1), 1);
      }
    });
  }
  return overtaken;
}

template <class A, class Net>
void a_missing_signal_is_a_deadline() {
  Pair<Net> pair(1);
  try {
    pair.template run<A>(
        [&](A& a, Net& net, int node) {
          if (node == 1) net.wait_signal(a, pair.flag(1, 3), 9, {Site::kRailChunk, 0, 42});
        },
        0.05);
  } catch (const DeadlineError& e) {
    CHECK(e.timeout_report().site == Site::kRailChunk && e.timeout_report().rank == 1 && e.timeout_report().peer == 0);
    CHECK(e.timeout_report().chunk == 42 && e.timeout_report().expected == 9 && e.timeout_report().seen == 0);
    return;
  }
  throw check::Failure("no DeadlineError");
}

template <class A, class Net>
void add_tests(const std::string& name, int num_seeds) {
  auto over_seeds = [num_seeds](void (*test)(uint64_t)) {
    return [=] {
      for (int seed = 0; seed < num_seeds; ++seed) test(uint64_t(seed));
    };
  };
  auto add = [&](const char* test, std::function<void()> body) {
    check::tests().push_back({test + (" on " + name), body});
  };
  add("put_signal_shows_its_bytes", over_seeds(put_signal_shows_its_bytes<A, Net>));
  add("what_a_kernel_leaves_behind_lands", over_seeds(what_a_kernel_leaves_behind_lands<A, Net>));
  add("a_value_never_falls", over_seeds(a_value_never_falls<A, Net>));
  add("a_missing_signal_is_a_deadline", a_missing_signal_is_a_deadline<A, Net>);
}

const bool registered = [] {
#if !defined(__SANITIZE_THREAD__)  // which does not follow fibers
  add_tests<PlainFibers, ShmTransport>("shm, fibers", 3);
  add_tests<PlainFibers, LoopbackTransport>("loopback, fibers", 10);
  add_tests<CheckedFibers<4>, LoopbackTransport>("loopback, checked fibers of 4 lanes", 20);
#endif
  add_tests<PlainThreads<1>, ShmTransport>("shm, threads", 5);
  add_tests<PlainThreads<1>, LoopbackTransport>("loopback, threads", 5);
  return true;
}();

}  // namespace

#if !defined(__SANITIZE_THREAD__)
TEST(signals_to_one_location_have_no_order_on_loopback) {
  CHECK((times_signals_swap<PlainFibers, LoopbackTransport>()) >= 5);
  CHECK((times_signals_swap<CheckedFibers<1>, LoopbackTransport>()) >= 5);
}
TEST(a_signal_after_a_put_orders_nothing_on_loopback) {
  // Were this zero, the tests could not fail on code that takes the order for granted.
  CHECK((times_signal_overtakes_put<PlainFibers, LoopbackTransport>()) >= 10);
  CHECK((times_signal_overtakes_put<CheckedFibers<1>, LoopbackTransport>()) >= 10);
  CHECK_EQ((times_signal_overtakes_put<PlainFibers, ShmTransport>()), 0);
}

TEST(loopback_reads_its_source_late) {
  int late = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Pair<LoopbackTransport> pair(seed);
    pair.run<PlainFibers>([&](PlainFibers& a, LoopbackTransport& net, int node) {
      if (node == 1) return;
      fill(pair.source(0, 0), 1);
      net.put_signal(a, 1, pair.data_offset(0), pair.source(0, 0), kBytes, pair.flag_offset(0), 1);
      fill(pair.source(0, 0), 2);  // too early: nothing said that the bytes have left
    });
    late += stale(pair.data(1, 0), 2) == 0;
  }
  CHECK(late >= 20);
}
#endif

TEST(random_transports_repeat_themselves) {
  auto order = [](uint64_t seed) {
    std::vector<uint64_t> memory(16), seen;
    unsigned char* segment = reinterpret_cast<unsigned char*>(memory.data());
    LoopbackTransport net(&segment, seed);
    int arch = 0;
    for (uint64_t i = 0; i < 16; ++i) net.signal(arch, 0, i * 8, 1);
    while (std::accumulate(memory.begin(), memory.end(), uint64_t{0}) < 16) {
      if (!net.progress()) continue;
      seen.push_back(0);
      for (uint64_t i = 0; i < 16; ++i) seen.back() |= memory[i] << i;
    }
    return seen;
  };
  CHECK(order(3) == order(3));
  CHECK(order(3) != order(4));
}

}  // namespace hep
