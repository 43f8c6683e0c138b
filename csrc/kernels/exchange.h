// Kernel: route this rank's tokens and all-gather the count vectors. One block.
#pragma once
#include "roles/exchange.h"
#include "roles/route.h"

namespace hep {

// Routing has work for many warps; the exchange itself is one warp's. On one host thread more would only take turns.
template <Arch A>
inline constexpr int kExchangeWarps = A::kLanes < 32 ? 1 : 16;

template <Arch A, Transport<A> Net>
HEP_DEVICE void exchange_kernel(A& a, Net& net, const ExchangeParams& p) {
  a.set_role("route");
  RouteRole<A>(a, p).run();
  if (a.warp_idx() != 0) return;
  a.set_role("exchange");
  if (a.elect_one()) ExchangeRole<A, Net>::send(a, net, p);
  ExchangeRole<A, Net>::forward(a, net, p);
  if (a.elect_one()) {
    ExchangeRole<A, Net>::wait_all(a, p);
    net.quiet(a);
  }
}

}  // namespace hep
