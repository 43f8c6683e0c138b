// Kernel: route this rank's tokens, all-gather the count vectors and place every row. One block.
#pragma once
#include "common/bugs.h"
#include "layout/headers.h"
#include "roles/enter.h"
#include "roles/exchange.h"
#include "roles/place.h"
#include "roles/post.h"
#include "roles/route.h"

namespace hep {

// Routing has work for many warps; the exchange itself is one warp's. On one host thread more would only take turns.
template <Arch A>
inline constexpr int kExchangeWarps = A::kLanes < 32 ? 1 : 16;

// Ranks that mean different calls would overrun each other's rows. Where the host does not see the headers, the lane
// that finds a difference waits for its deadline: the timeout report says who differs, in which word (its chunk), and
// both values. By all lanes of the block; false: one of them has left, so all must.
template <Arch A>
HEP_DEVICE bool require_agreement(A& a, const ExchangeParams& p, const CountsView& counts) {
  for (uint32_t i = uint32_t(a.lane()); i < counts.layout.num_ranks * uint32_t(kCountHeaderWords); i += A::kLanes) {
    const int rank = int(i) / kCountHeaderWords, word = int(i) % kCountHeaderWords;
    const uint32_t said = counts.header(rank, word);
    const bool fits = word != kHeaderNumTokens || said <= p.max_tokens;
    while (!fits || ((kHeaderMustAgree >> word & 1) && said != p.header[word]))
      a.poll_idle({Site::kHeaders, rank, word}, word == kHeaderNumTokens ? p.max_tokens : p.header[word], said);
  }
  return a.block_whole();
}

// Where the host does see them, it decides; whether rows can be placed is the same on all ranks, for it depends on the
// headers alone. By all lanes of the block; p.misfits is zero before.
template <Arch A>
HEP_DEVICE bool calls_fit(A& a, const ExchangeParams& p, const CountsView& counts) {
  const uint32_t me = uint32_t(a.warp_idx() * A::kLanes + a.lane()), width = uint32_t(a.num_warps() * A::kLanes);
  for (uint32_t i = me; i < counts.layout.num_ranks * uint32_t(kCountHeaderWords); i += width) {
    const int rank = int(i) / kCountHeaderWords, word = int(i) % kCountHeaderWords;
    const uint32_t said = counts.header(rank, word);
    if (word == kHeaderNumTokens ? said > p.max_tokens : (kHeaderMustAgree >> word & 1) && said != p.header[word])
      a.add_acq_rel_rank(p.misfits, 1);
  }
  a.block_sync();
  return *p.misfits == 0;
}

// The whole plan, without the host, or ahead of it: the mail goes out when the counts are known, and while the host
// makes tensors of that size, records are finished. False as above.
template <Arch A>
HEP_DEVICE bool place_tokens(A& a, const ExchangeParams& p) {
  a.set_role("place");
  PlaceParams place = p.place;
  place.counts = p.counts + p.parity_bytes();
  const CountsView counts{p.layout, place.counts};
  if (!p.mail) {
    if (!require_agreement(a, p, counts)) return false;
  } else if (!injected(Bug::kCallsUnchecked) && !calls_fit(a, p, counts)) {
    if (a.warp_idx() == 0) PostRole<A>(a, p, place).run(false);
    return true;
  }
  if (a.warp_idx() == 0 && a.elect_one())
    for (int n = 0; n < p.world.num_nodes; ++n) {
      place.records[n] = place.record_base + uint64_t(n) * p.num_tokens * place.record_bytes;
      place.node_token_table[n] = p.node_tokens + uint64_t(n) * p.num_tokens;
    }
  PlaceRole<A> role(a, place);
  if (p.mail && a.warp_idx() == 0 && injected(Bug::kMailBeforeCounts)) PostRole<A>(a, p, place).run(true);
  role.count_rows();
  if (p.mail && a.warp_idx() == 0 && !injected(Bug::kMailBeforeCounts)) {
    a.warp_sync();  // with the lane that concluded
    PostRole<A>(a, p, place).run(true);
  }
  role.finish_records();
  return true;
}

// Counters of their own for as many warps as `budget` bytes of shared memory hold, at least one; returns the bytes.
template <Arch A>
inline uint64_t plan_exchange_smem(ExchangeParams& p, uint64_t budget) {
  const uint64_t bytes = 4ull * RouteRole<A>::num_columns(p.layout), fit = budget / bytes;
  p.walkers = fit < 1 ? 1 : fit < uint64_t(kExchangeWarps<A>) ? uint32_t(fit) : uint32_t(kExchangeWarps<A>);
  return p.walkers * bytes;
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void exchange_kernel(A& a, Net& net, const ExchangeParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role("route");
  RouteRole<A>(a, p, smem).run();
  a.set_role("exchange");
  if (a.warp_idx() == 0) {
    if (a.elect_one()) ExchangeRole<A, Net>::send(a, net, p);
    if (!ExchangeRole<A, Net>::forward(a, net, p)) return;
  }
  // Whoever reads the vectors has waited for them: its warp's elected lane has.
  if (a.elect_one()) ExchangeRole<A, Net>::wait_all(a, p);
  if (!a.block_whole()) return;  // a lane left in its wait: the counts are not complete
  if (!place_tokens<A>(a, p)) return;
  if (a.warp_idx() == 0 && a.elect_one()) net.quiet(a);
  a.block_sync();
  if (a.warp_idx() == 0 && a.elect_one()) ++p.progress->exchanges;
}

}  // namespace hep
