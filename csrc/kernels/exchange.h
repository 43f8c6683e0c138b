// Kernel: route this rank's tokens, all-gather the count vectors and place every row. Blocks share the tokens; the last
// of them, the lead, has the totals when all have met, and does what a rank does once.
#pragma once
#include <algorithm>

#include "common/bugs.h"
#include "layout/headers.h"
#include "pipeline/grid_meeting.h"
#include "roles/enter.h"
#include "roles/exchange.h"
#include "roles/notify.h"
#include "roles/place.h"
#include "roles/records.h"
#include "roles/route.h"

namespace hep {

// Where a warp has one lane, all of them run on one host thread: more would only take turns.
template <Arch A>
inline constexpr int kExchangeWarps = A::kLanes == 1   ? 1
                                      : A::kLanes < 32 ? 3
                                                       : 16;

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
// headers alone. By all lanes of a block, each block for itself.
template <Arch A>
HEP_DEVICE bool calls_fit(A& a, const ExchangeParams& p, const CountsView& counts) {
  const uint32_t me = uint32_t(a.warp_idx() * A::kLanes + a.lane()), width = uint32_t(a.num_warps() * A::kLanes);
  for (uint32_t i = me; i < counts.layout.num_ranks * uint32_t(kCountHeaderWords); i += width) {
    const int rank = int(i) / kCountHeaderWords, word = int(i) % kCountHeaderWords;
    const uint32_t said = counts.header(rank, word);
    if (word == kHeaderNumTokens ? said > p.max_tokens : (kHeaderMustAgree >> word & 1) && said != p.header[word])
      a.add_acq_rel_rank(p.misfits + a.block_idx(), 1);
  }
  a.block_sync();
  return p.misfits[a.block_idx()] == 0;
}

// The whole plan, without the host, or ahead of it: the host is notified when the counts are known, and while it makes
// tensors of that size, records are finished. False as above.
template <Arch A>
HEP_DEVICE bool place_tokens(A& a, const ExchangeParams& p, std::byte* smem, bool lead) {
  a.set_role(Role::kPlace);
  const CountsView counts{p.layout, p.counts + p.parity_bytes()};
  const bool notifies = p.notification && lead && a.warp_idx() == 0;
  if (!p.notification) {
    if (!require_agreement(a, p, counts)) return false;
  } else if (!injected(Bug::kCallsUnchecked) && !calls_fit(a, p, counts)) {
    if (notifies) NotifyRole<A>(a, p, counts).run(false);
    return true;
  }
  PlaceRole<A> role(a, p, counts, smem, lead);
  if (notifies && injected(Bug::kNotifiedBeforeCounts)) NotifyRole<A>(a, p, counts).run(true);
  role.count_rows();
  if (notifies && !injected(Bug::kNotifiedBeforeCounts)) {
    a.warp_sync();  // with the lane that concluded
    NotifyRole<A>(a, p, counts).run(true);
  }
  RecordRole<A>(a, p, smem).run();
  return true;
}

// The parameters that follow from the others, for a launch of so many blocks: counters of their own for as many warps
// of a block as `budget` bytes of shared memory hold and its share of the tokens feeds, at least one. Returns the bytes
// that a block needs.
template <Arch A>
inline uint64_t plan_exchange(ExchangeParams& p, uint64_t budget, int blocks) {
  p.blocks = uint32_t(blocks);
  // Of few tokens every block has some: a latency dispatch sends them from where they were counted.
  const uint32_t share = std::max(1u, uint32_t(div_up(p.num_tokens, uint64_t(blocks))));
  p.walkers = std::min(uint32_t(kExchangeWarps<A>), share);
  while (p.walkers > 1 && ExchangeSmem{p.layout, p.walkers}.bytes() > budget) --p.walkers;
  const uint32_t lanes = uint32_t(A::kLanes), walkers = p.walkers * uint32_t(blocks);
  p.run_tokens = std::max(1u, uint32_t(div_up(p.num_tokens, walkers)));
  p.lanes_of_token = std::min(lanes, p.topk);
  p.step_tokens = lanes / p.lanes_of_token;
  p.by_run = Reciprocal::of(p.run_tokens);
  p.by_token_lanes = Reciprocal::of(p.lanes_of_token);
  p.map_words = p.layout.num_experts % 8 == 0 && reinterpret_cast<uint64_t>(p.routing_map) % 8 == 0;
  PlaceParams& q = p.place;
  q.experts_of_rank = p.layout.num_experts / p.layout.num_ranks;
  q.experts_of_node = q.experts_of_rank * uint32_t(p.world.num_local_ranks);
  q.by_pad = Reciprocal::of(q.pad_multiple);
  q.by_rank = Reciprocal::of(q.experts_of_rank);
  q.by_node = Reciprocal::of(q.experts_of_node);
  return ExchangeSmem{p.layout, p.walkers}.bytes();
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void exchange_kernel(A& a, Net& net, const ExchangeParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  const bool lead = a.block_idx() == a.num_blocks() - 1;
  if (p.notification && a.block_idx() == 0 && a.warp_idx() == 0 && a.elect_one())
    a.st_release_sys(CountNotification::started(p.notification), p.notification_ticket);
  a.set_role(Role::kRoute);
  RouteRole<A> route(a, p, smem);
  route.count();
  if (!meet_blocks(a, &p.progress->met)) return;
  route.begin_behind_other_blocks();
  a.block_sync();
  a.set_role(Role::kExchange);
  if (lead) {
    if (a.elect_one()) ExchangeRole<A, Net>::send(a, net, p);
    if (!ExchangeRole<A, Net>::forward(a, net, p)) return;
  }
  ExchangeRole<A, Net>::wait_all(a, p, lead);
  if (!a.block_whole()) return;  // a lane left in its wait: the counts are not complete
  if (!place_tokens<A>(a, p, smem, lead)) return;
  a.block_sync();
  if (a.warp_idx() != 0 || !a.elect_one()) return;
  p.misfits[a.block_idx()] = 0;
  uint64_t* leaving = &p.progress->leaving;
  if (!last_of(a.add_acq_rel_rank(leaving, 1), leaving, uint64_t(a.num_blocks()))) return;
  if (!injected(Bug::kMeetingNotReset)) p.progress->met = 0;
  p.progress->excess = 0;
  ++p.progress->exchanges;
}

}  // namespace hep
