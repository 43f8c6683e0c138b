// The Transport contract: one-sided verbs along the rail (same local_rank on all nodes). Offsets are into
// the peer's registered buffer; sources are in this rank's registered buffer, so an RDMA NIC could serve
// every verb without a copy.
//
// Ordering (the weakest that NVSHMEM/IBGDA promise, and what the loopback transport enforces):
// No verb says that others are complete: a rail that could would ask every queue of its NIC, one after the other. The
// source of a put_signal may be reused when its target answers (a credit, the next count vector), which it does behind
// the arrival of the bytes. So a kernel ends with verbs in flight, and who frees registered memory first lets them
// land, then meets the other ranks.
// Signals are 64-bit, written (not added), by one writer per location, and in no order: one to a location is seen
// before the next is sent there.
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "arch/concept.h"

namespace hep {

template <class N, class A>
concept Transport = requires(N net, A& a, int peer_node, uint64_t offset, const void* src, uint64_t bytes,
                             uint64_t value, const uint64_t* flag, WaitInfo info) {
  // Called by one elected lane. peer_node names the rail peer by its node index.
  { net.put(a, peer_node, offset, src, bytes) };
  { net.put_signal(a, peer_node, offset, src, bytes, offset /*signal*/, value) };
  { net.signal(a, peer_node, offset, value) };
  { net.test_signal(a, flag, value) } -> std::same_as<bool>;      // acquires when true
  { net.read_signal(a, flag, value) } -> std::same_as<uint64_t>;  // what it is; acquires when that is at least `value`
  { net.wait_signal(a, flag, value, info) };
};

// Optional: a rail over mapped memory says where this rank reaches a rail peer's segment. Its bytes then need no put: a
// role makes bulk stores there, waits for them (bulk_wait<0>), and a signal, which is a release, carries them; or
// generic stores, of lanes that meet the one that signals.
template <class N>
inline constexpr bool kIsMapped = requires(const N net, int peer_node) {
  { net.mapped(peer_node) } -> std::same_as<unsigned char*>;
};

// Whether the group has a rail at all: transport/none.h is that of one node.
template <class Net>
inline constexpr bool kHasRail = !requires { Net::kNobody; };

// Whether peers of the rail are not mapped, as a transport says of itself.
template <class Net>
inline constexpr bool kRailIsNic = requires { Net::kOverNic; };

}  // namespace hep
