// The latency path along the rail, for one step: a header and rows, as plain bytes, each with a signal that says which
// step and which call they are of.
//
// Credit, as in pipeline/latency_link.h: in step n a rank puts bytes where those of step n - 2 lay. Its peer has ended
// that step, with all its looks at them, since it has begun step n - 1, whose header this rank has waited for. What it
// put them from is free again by the same token: the peer waited for every signal of step n - 2. Signals of either
// parity have words of their own: one of step n + 1 may come before one of step n.
#pragma once
#include "arch/concept.h"
#include "common/bugs.h"
#include "common/numeric.h"
#include "pipeline/latency_call.h"
#include "pipeline/line_wait.h"
#include "transport/concept.h"

namespace hep {

struct LatencyRailLink {
  World world;
  LatencyRail rail;
  unsigned char *send, *recv;    // this rank's
  uint64_t* signals;             // likewise
  uint64_t recv_at, signals_at;  // the same in a peer's segment
  uint64_t* stored;              // rank-private, zero between: of each token, what its warps have stored of it

  // Where bytes for the rail peer on `node` are stored: where it receives them if this rank reaches that.
  template <class Net>
  HEP_DEVICE unsigned char* header(const Net& net, uint64_t flag, int node) const {
    return kIsMapped<Net> ? peer(net, node) + rail.header(parity(flag), node, own())
                          : send + rail.header(parity(flag), own(), node);
  }
  template <class Net>
  HEP_DEVICE unsigned char* token(const Net& net, uint64_t flag, int node, uint32_t index) const {
    return kIsMapped<Net> ? peer(net, node) + rail.token(parity(flag), node, own(), index)
                          : send + rail.token(parity(flag), own(), node, index);
  }
  // By all lanes of a warp, which have stored it.
  template <class A, class Net>
  HEP_DEVICE void send_header(A& a, Net& net, uint64_t flag, int node, uint64_t bytes) const {
    a.warp_sync();
    if (a.elect_one())
      hand_over(a, net, flag, node, rail.header(parity(flag), own(), node), rail.header(parity(flag), node, own()),
                bytes, rail.header_signal(parity(flag), node, own()));
  }
  // Likewise, when they have stored `part` of the `all` words of it: warps may share a token, and the last hands it
  // over.
  template <class A, class Net>
  HEP_DEVICE void send_token(A& a, Net& net, uint64_t flag, int node, uint32_t index, uint32_t part,
                             uint32_t all) const {
    a.warp_sync();
    if (!a.elect_one()) return;
    if (part < all && !injected(Bug::kRailRowBeforeAllWarps)) {
      uint64_t* const count = stored + uint64_t(node < own() ? node : node - 1) * rail.tokens + index;
      if (a.add_acq_rel_sys(count, part) + part < all) return;
      *count = 0;
    }
    hand_over(a, net, flag, node, rail.token(parity(flag), own(), node, index),
              rail.token(parity(flag), node, own(), index), 8ull * all,
              rail.token_signal(parity(flag), node, own(), index));
  }
  // What came, by all lanes of a warp together. A peer that means another call is waited for until the deadline.
  template <class A, class Net, class Late = Untold>
  HEP_DEVICE const unsigned char* await_header(A& a, Net& net, uint64_t flag, int node, Late&& late = {}) const {
    if (!injected(Bug::kEarlyRailCredit) || flag_of(flag) == LatencyCall::kRoutes)
      wait(a, net, rail.header_signal(parity(flag), own(), node), flag, {Site::kLatencyHeader, world.rail_peer(node)},
           late);
    return recv + rail.header(parity(flag), own(), node);
  }
  template <class A, class Net>
  HEP_DEVICE const unsigned char* await_token(A& a, Net& net, uint64_t flag, int node, uint32_t index) const {
    if (!injected(Bug::kRailRowUnawaited))
      wait(a, net, rail.token_signal(parity(flag), own(), node, index), flag,
           {Site::kLatencyRow, world.rail_peer(node), int64_t(index)});
    return came(flag, node, index);
  }
  // The same, for who has waited.
  HEP_DEVICE const unsigned char* came(uint64_t flag, int node, uint32_t index) const {
    return recv + rail.token(parity(flag), own(), node, index);
  }

 private:
  HEP_DEVICE int own() const { return world.node(); }
  HEP_DEVICE static uint64_t parity(uint64_t flag) { return LatencyCall::parity(flag); }
  HEP_DEVICE static uint64_t flag_of(uint64_t flag) { return flag & ((1u << LatencyCall::kBits) - 1); }
  template <class Net>
  HEP_DEVICE unsigned char* peer(const Net& net, int node) const {
    if constexpr (kIsMapped<Net>)
      return net.mapped(node) + recv_at;
    else
      return nullptr;
  }
  template <class A, class Net>
  HEP_DEVICE void hand_over(A& a, Net& net, uint64_t flag, int node, uint64_t from, uint64_t to, uint64_t bytes,
                            uint64_t word) const {
    const uint64_t signal = signals_at + 8 * word;
    if (kIsMapped<Net> || bytes == 0)
      net.signal(a, node, signal, flag);
    else
      net.put_signal(a, node, recv_at + to, send + from, bytes, signal, flag);
  }
  // All lanes look together, and so see the same; while one has left, none goes on.
  template <class A, class Net, class Late = Untold>
  HEP_DEVICE void wait(A& a, Net& net, uint64_t word, uint64_t flag, const WaitInfo& info, Late&& late = {}) const {
    const uint64_t* const at = signals + word;
    const auto differs = [&] { return !net.test_signal(a, at, flag) || net.test_signal(a, at, flag + 1); };
    if (!a.warp_any(differs()) && a.warp_whole()) return;
    late.begin();
    do {
      a.poll_idle(info, flag, a.ld_acquire_sys(at));
    } while (a.warp_any(differs()) || !a.warp_whole());
    a.poll_reset();
    late.end();
  }
};

}  // namespace hep
