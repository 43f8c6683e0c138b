// The rail ring: many more chunks than slots, several operations one after the other, blocks of different number
// on each rank, and every chunk arrives once and whole; one of another call is taken by nobody.
#include "check.h"

#include <algorithm>
#include <memory>

#include "arch/host/launch.h"
#include "pipeline/chunk_sweep.h"
#include "pipeline/rail_ring.h"
#include "transport/loopback/loopback_transport.h"
#include "transport/shm/shm_transport.h"
#include "world_case.h"

HEP_TEST_MAIN

namespace hep {
namespace {

using namespace host;

constexpr int kReceivers = 2;  // warps; each takes its share of every chunk, the last returns the credit
constexpr uint32_t kRowBytes = 48;

template <class A, class Net>
class RingWorld {
 public:
  RingWorld(uint32_t nodes, uint32_t slots, uint32_t chunk_tokens, uint64_t seed)
      : nodes_(nodes),
        seed_(seed),
        random_(seed),
        layout_(shape(nodes, slots, chunk_tokens)),
        geometry_(nodes, {slots, chunk_tokens, layout_.slot_bytes, RailCall::word(RailCall::kCombine, kRowBytes)}) {
    for (uint32_t n = 0; n < nodes; ++n) {
      memory_.emplace_back(layout_.total / sizeof(Line));
      segments_.push_back(reinterpret_cast<unsigned char*>(memory_.back().data()));
      consumed_.emplace_back(nodes * slots, 0);
      base_.emplace_back(nodes, 0);
    }
    for (uint32_t n = 0; n < nodes; ++n) {
      if constexpr (std::is_same_v<Net, LoopbackTransport>)
        net_.push_back(std::make_unique<Net>(segments_.data(), seed + n));
      else
        net_.push_back(std::make_unique<Net>(segments_.data()));
    }
  }

  // From now on: what it means by the bytes in its rings.
  void set_call(uint32_t rank, uint32_t call) { geometry_[rank].call = call; }
  // Every rank sends a number of tokens of its own to every other; one each if `all_send`.
  void operation(double timeout_s = 20, bool all_send = false) {
    ++operations_;
    std::vector<std::vector<uint32_t>> tokens(nodes_, std::vector<uint32_t>(nodes_));
    for (auto& row : tokens)
      for (uint32_t& n : row) n = all_send ? 1 : random_.one_in(5) ? 0 : random_.below(geometry_[0].chunk_tokens * 15);
    std::vector<RankProgram<A>> programs(nodes_);
    std::vector<std::vector<RailPeer>> peers(nodes_);
    std::vector<uint64_t> received(nodes_, 0);
    std::vector<std::vector<uint64_t>> taken(nodes_, std::vector<uint64_t>(nodes_, 0));
    for (uint32_t n = 0; n < nodes_; ++n) {
      for (uint32_t to = 0; to < nodes_; ++to)
        if (to != n) peers[n].push_back(peer(n, to));
      LaunchConfig& c = programs[n].config;
      c.num_blocks = int(random_.between(1, 3));
      c.num_warps = 1 + kReceivers;
      c.smem_bytes = 256;
      c.rank = c.node = int(n);
      c.timeout_s = timeout_s;
      c.seed = ++seed_;
      c.progress = [this, n] { return net_[n]->progress(); };
      programs[n].body = [&, n](A& a, std::byte* smem) {
        if (!a.elect_one()) return;
        Net& net = *net_[n];
        if (a.warp_idx() == 0) {
          send(a, net, n, peers[n], tokens[n], taken[n].data(), smem);
        } else {
          receive(a, net, n, peers[n], tokens, &received[n]);
        }
      };
    }
    launch_world<A>(std::span<const RankProgram<A>>(programs));
    for (uint32_t n = 0; n < nodes_; ++n) {
      uint64_t due = 0;
      for (uint32_t from = 0; from < nodes_; ++from) {
        if (from == n) continue;
        due += tokens[from][n] * uint64_t(kReceivers);
        base_[from][n] += div_up(tokens[from][n], geometry_[n].chunk_tokens);
      }
      CHECK_EQ(received[n], due);
      for (const uint64_t left : consumed_[n]) CHECK_EQ(left, 0u);
    }
  }

 private:
  struct alignas(128) Line {
    unsigned char bytes[128];
  };
  static BufferShape shape(uint32_t nodes, uint32_t slots, uint32_t chunk_tokens) {
    BufferShape s;
    s.num_nodes = s.num_experts = nodes;
    s.rail_slots = slots;
    s.chunk_tokens = chunk_tokens;
    s.partial_row_bytes = kRowBytes;
    return s;
  }
  RailPeer peer(uint32_t me, uint32_t other) {
    const int m = int(me), o = int(other);
    auto own = [&](uint64_t offset) { return segments_[me] + offset; };
    return {o,
            o,
            own(layout_.rail_send_slot(m, o, 0)),
            own(layout_.rail_recv_slot(m, o, 0)),
            reinterpret_cast<uint64_t*>(own(layout_.rail_full_flag(m, o, 0))),
            reinterpret_cast<uint64_t*>(own(layout_.rail_free_flag(m, o, 0))),
            &consumed_[me][other * geometry_[me].num_slots],
            layout_.rail_recv_slot(o, m, 0),
            layout_.rail_full_flag(o, m, 0),
            layout_.rail_free_flag(o, m, 0),
            &base_[me][other],
            &base_[other][me]};
  }
  // A word of a token tells where it comes from.
  Vec16 word(uint32_t from, uint32_t to, uint32_t token, uint32_t i) const {
    return {{operations_, from << 8 | to, token, i}};
  }

  void send(A& a, Net& net, uint32_t me, const std::vector<RailPeer>& peers, const std::vector<uint32_t>& tokens,
            uint64_t* taken, std::byte* smem) {
    const RailGeometry& g = geometry_[me];
    const auto cut = [&](const auto& by_node, const RailPeer& p) {
      return ChunkCut{by_node[size_t(p.node)], g.chunk_tokens};
    };
    ChunkSweep<A>{a, taken, uint32_t(a.num_blocks()), reinterpret_cast<uint32_t*>(smem), uint32_t(peers.size())}.run(
        Site::kRailSlotFree, [&](uint32_t s, uint32_t chunk) { return cut(tokens, peers[s]).chunk(chunk); },
        [&](uint32_t s, uint32_t chunk) { return RailSender::test(a, net, g, peers[s], chunk); },
        [&](uint32_t s, uint32_t chunk) {
          auto* slot = reinterpret_cast<Vec16*>(RailSender::slot(net, g, peers[s], chunk));
          const auto [first, n] = cut(tokens, peers[s]).chunk(chunk);
          for (uint32_t w = 0; w < n * kRowBytes / 16; ++w)
            a.st_global(slot + w,
                        word(me, uint32_t(peers[s].node), first + w / (kRowBytes / 16), w % (kRowBytes / 16)));
          RailSender::commit(a, net, g, peers[s], chunk, n * kRowBytes);
        },
        [&](uint32_t s) { return peers[s].rank; });
  }
  void receive(A& a, Net& net, uint32_t me, const std::vector<RailPeer>& peers,
               const std::vector<std::vector<uint32_t>>& tokens, uint64_t* received) {
    const RailGeometry& g = geometry_[me];
    for (const RailPeer& p : peers) {
      const uint32_t from = uint32_t(p.node), count = tokens[from][me];
      for (uint32_t chunk = uint32_t(a.block_idx()); chunk * g.chunk_tokens < count;
           chunk += uint32_t(a.num_blocks())) {
        RailReceiver::wait(a, net, g, p, chunk);
        CHECK(RailReceiver::test(a, net, g, p, chunk));
        const auto* slot = reinterpret_cast<const Vec16*>(RailReceiver::slot(g, p, chunk));
        const auto [first, n] = ChunkCut{count, g.chunk_tokens}.chunk(chunk);
        for (uint32_t w = 0; w < n * kRowBytes / 16; ++w) {
          const Vec16 got = a.ld_global(slot + w);
          const Vec16 want = word(from, me, first + w / (kRowBytes / 16), w % (kRowBytes / 16));
          CHECK(std::equal(got.w, got.w + 4, want.w));
        }
        a.count_rank(received, n);
        const uint32_t mine = uint32_t(a.warp_idx());  // of shares of unequal size, told at once
        RailReceiver::consume(a, net, g, p, chunk, mine, kReceivers * (kReceivers + 1) / 2);
      }
    }
  }

  const uint32_t nodes_;
  uint64_t seed_;
  test::Random random_;
  const BufferLayout layout_;
  std::vector<RailGeometry> geometry_;  // [rank]
  std::vector<std::vector<Line>> memory_;
  std::vector<unsigned char*> segments_;
  std::vector<std::vector<uint64_t>> consumed_, base_;  // [rank][...]; base: chunks sent from rank to rank
  std::vector<std::unique_ptr<Net>> net_;
  uint32_t operations_ = 0;
};

template <class A, class Net>
void add_test(const std::string& name, uint32_t operations) {
  check::tests().push_back({"chunks arrive once and whole on " + name, [=] {
                              for (uint32_t nodes = 2; nodes <= 3; ++nodes)
                                for (uint32_t slots = 1; slots <= 4; ++slots)
                                  for (const uint32_t chunk_tokens : {1u, 3u}) {
                                    RingWorld<A, Net> world(nodes, slots, chunk_tokens,
                                                            nodes * 100 + slots * 10 + chunk_tokens);
                                    for (uint32_t i = 0; i < operations; ++i) world.operation();
                                  }
                            }});
}

// Ranks 0 and 1 mean different calls in their second operation: whoever waits in vain names the other, and the chunk.
template <class A, class Net>
void calls_that_differ(uint32_t call) {
  RingWorld<A, Net> world(2, 2, 3, 11);
  world.operation();
  world.set_call(1, call);
  try {
    world.operation(0.2, true);
  } catch (const DeadlineError& e) {
    const TimeoutReport& report = e.timeout_report();
    CHECK(report.site == Site::kRailCall && report.peer == 1 - report.rank && report.chunk == 0);
    CHECK(report.seen < report.expected);
    return;
  }
  throw check::Failure("a chunk of another call was taken");
}

template <class A, class Net>
void every_call_that_differs() {
  calls_that_differ<A, Net>(RailCall::word(RailCall::kDispatch, kRowBytes));
  calls_that_differ<A, Net>(RailCall::word(RailCall::kCombine, kRowBytes + 16));
  calls_that_differ<A, Net>(RailCall::word(RailCall::kCombine, kRowBytes, DType::kFp32));
}

template <class A, class Net>
void add_call_test(const std::string& name) {
#if defined(HEP_MUTANTS)
  check::tests().push_back({"mutant: calls are not compared, on " + name, [] {
                              every_call_that_differs<A, Net>();
                              injected_bug = Bug::kRailCallUnchecked;
                              bool noticed = false;
                              try {
                                every_call_that_differs<A, Net>();
                              } catch (const check::Failure&) {
                                noticed = true;
                              }
                              injected_bug = Bug::kNone;
                              CHECK(noticed);
                            }});
#else
  check::tests().push_back({"no chunk of another call is taken on " + name, every_call_that_differs<A, Net>});
#endif
}

// Block 0 is through with its first chunk only when all others are served: by block 1, or nobody.
template <class A>
void add_dealing_test(const std::string& name) {
  check::tests().push_back(
      {"a slow block takes fewer chunks on " + name, [] {
         static constexpr uint32_t kChunks = 10;
         uint64_t taken = 0, served = 0;
         std::vector<RankProgram<A>> programs(1);
         LaunchConfig& c = programs[0].config;
         c.num_blocks = 2;
         c.num_warps = 1;
         c.smem_bytes = 256;
         c.timeout_s = 20;
         c.seed = 1;
         programs[0].body = [&](A& a, std::byte* smem) {
           if (!a.elect_one()) return;
           ChunkSweep<A>{a, &taken, uint32_t(a.num_blocks()), reinterpret_cast<uint32_t*>(smem), 1}.run(
               Site::kTestSite, [](uint32_t, uint32_t chunk) { return ChunkCut{kChunks, 1}.chunk(chunk); },
               [](uint32_t, uint32_t) { return true; },
               [&](uint32_t, uint32_t chunk) {
                 if (chunk == 0) a.wait_ge_sys(&served, kChunks - 1, {Site::kTestSite});
                 a.add_release_sys(&served, 1);
               },
               [](uint32_t) { return 0; });
         };
         launch_world<A>(std::span<const RankProgram<A>>(programs));
         CHECK_EQ(served, kChunks);
         CHECK_EQ(taken, kChunks);  // one ticket for each chunk that was served
       }});
}

const bool registered = [] {
#if !defined(__SANITIZE_THREAD__)  // which does not follow fibers
  add_test<PlainFibers, ShmTransport>("fibers, shm", 6);
  add_test<PlainFibers, LoopbackTransport>("fibers, loopback", 6);
  add_test<CheckedFibers<1>, LoopbackTransport>("checked fibers, loopback", 6);
  add_test<CheckedFibers<4>, LoopbackTransport>("checked fibers of 4 lanes, loopback", 3);
#endif
  add_test<PlainThreads<1>, ShmTransport>("threads, shm", 3);
  add_test<PlainThreads<1>, LoopbackTransport>("threads, loopback", 3);
#if !defined(__SANITIZE_THREAD__)
  add_dealing_test<PlainFibers>("fibers");
  add_dealing_test<CheckedFibers<4>>("checked fibers of 4 lanes");
#endif
  add_dealing_test<PlainThreads<1>>("threads");
#if !defined(__SANITIZE_THREAD__)
  add_call_test<PlainFibers, ShmTransport>("fibers, shm");
  add_call_test<CheckedFibers<4>, LoopbackTransport>("checked fibers of 4 lanes, loopback");
#endif
  add_call_test<PlainThreads<1>, LoopbackTransport>("threads, loopback");
  return true;
}();

TEST(every_token_is_in_one_chunk_and_the_last_that_blocks_take_are_short) {
  for (const uint32_t size : {1u, 3u, 4u, 6u, 16u, 1u << 20})
    for (const uint32_t blocks : {1u, 2u, 24u, 300u})
      for (const uint32_t tokens : {0u, 1u, 15u, 16u, 17u, 100u, 4096u, 5000u, 4294967295u}) {
        if (tokens / size > 100000) continue;
        for (const ChunkCut cut : {ChunkCut{tokens, size}, ChunkCut::tapered(tokens, size, blocks)}) {
          uint32_t next = 0, chunk = 0, short_tokens = 0;
          for (;; ++chunk) {
            const auto [begin, number] = cut.chunk(chunk);
            if (!number) break;
            CHECK_EQ(begin, next);
            CHECK(number <= size);
            if (number <= (size + 3) / 4) short_tokens += number;
            next += number;
          }
          CHECK_EQ(next, tokens);
          CHECK_EQ(cut.chunk(chunk + blocks).number, 0u);
          if (cut.whole == ~0u || size == 1) continue;  // of which all chunks are short
          const uint64_t round = uint64_t(blocks) * size;
          CHECK(short_tokens >= std::min<uint64_t>(tokens, round) && short_tokens < round + size);
        }
      }
}

}  // namespace
}  // namespace hep
