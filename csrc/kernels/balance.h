// Kernel: the clones of a micro-batch, planned by all ranks together, and this rank's routing over physical slots.
// Blocks share the tokens; the last of them tells every rank of the group how many tokens each expert has here, waits
// for the others' counts, and plans as they do. The host takes no part: the exchange and dispatch behind it find the
// routing where this kernel has left it.
#pragma once
#include <algorithm>

#include "kernels/plan_clones.h"
#include "pipeline/grid_meeting.h"
#include "roles/clone_routing.h"
#include "roles/enter.h"
#include "roles/exchange.h"

namespace hep {

// A warp has a construction of the plan; where it has one lane, all of them run on one host thread.
template <Arch A>
inline constexpr int kBalanceWarps = A::kLanes == 1   ? 1
                                     : A::kLanes < 32 ? 3
                                                      : kPlanWarps;

// Ranks whose owners differ would plan other clones, and send each other tokens for experts that are not there. By all
// lanes of a block; false: one of them has left, as in require_agreement of the exchange.
template <Arch A>
HEP_DEVICE bool require_same_owners(A& a, const BalanceParams& p, const CountsView& counts) {
  const uint32_t mine = counts.header(p.world.rank, kCloneHeaderOwners);
  for (int r = a.warp_idx() * A::kLanes + a.lane(); r < p.world.num_ranks(); r += a.num_warps() * A::kLanes)
    for (uint32_t said = counts.header(r, kCloneHeaderOwners); said != mine;)
      a.poll_idle({Site::kHeaders, r, kCloneHeaderOwners}, mine, said);
  return a.block_whole();
}

// The lead's part between the meetings of the blocks. False: a lane has left in its wait.
template <Arch A, Transport<A> Net>
HEP_DEVICE bool plan_together(A& a, Net& net, const BalanceParams& p, CloneRoutingRole<A>& routing, std::byte* tables) {
  using Exchange = ExchangeRole<A, Net, BalanceParams>;
  auto* const vector =
      reinterpret_cast<uint32_t*>(p.counts + p.parity_bytes() + uint64_t(p.world.rank) * p.layout.vector_bytes());
  const auto tell = [&] {
    if (a.elect_one()) Exchange::send(a, net, p);
    return Exchange::forward(a, net, p);
  };
  a.set_role(Role::kExchangeCloneCounts);
  if (injected(Bug::kCloneCountsToldEarly) && !tell()) return false;
  if (a.warp_idx() == 0 && a.lane() == 0) a.st_global(vector + kCloneHeaderOwners, p.owners_digest);
  routing.begin_behind_other_blocks(vector);
  a.block_sync();
  if (!injected(Bug::kCloneCountsToldEarly) && !tell()) return false;
  Exchange::wait_all(a, p, true);
  if (!a.block_whole()) return false;  // a lane left in its wait: the counts are not complete
  const CountsView counts = p.gathered();
  if (!require_same_owners(a, p, counts)) return false;
  const uint32_t experts = uint32_t(p.shape.num_experts), me = uint32_t(a.warp_idx() * A::kLanes + a.lane());
  for (int r = 0; r < p.world.num_ranks(); ++r)
    for (uint32_t e = me; e < experts; e += uint32_t(a.num_warps() * A::kLanes))
      a.st_global(p.counted + uint64_t(r) * experts + e, int64_t(counts.pairs(r, int(e))));
  const int source = injected(Bug::kCloneShareOfAnother) ? (p.world.rank + 1) % p.world.num_ranks() : p.world.rank;
  plan_and_share(a, p, counts, p.columns, source, tables);
  return true;
}

// The parameters that follow from the others, for a launch of so many blocks. Returns the bytes of shared memory that a
// block needs: counters for as many warps as fit into `budget` beside the tables of a plan, at least one.
template <Arch A>
inline uint64_t plan_balance(BalanceParams& p, uint64_t budget, int blocks) {
  p.tables = CloneLayout::make(p.shape, kBalanceWarps<A>, A::kLanes);
  const uint64_t experts = uint64_t(p.shape.num_experts);
  const auto counters = [&](uint32_t walkers) { return align_up(4 * walkers * experts, 16); };
  p.walkers = uint32_t(kBalanceWarps<A>);
  while (p.walkers > 1 && counters(p.walkers) + p.tables.bytes > budget) --p.walkers;
  p.tables_at = uint32_t(counters(p.walkers));
  p.run_tokens = std::max(1u, uint32_t(div_up(p.num_tokens, p.walkers * uint32_t(blocks))));
  return p.tables_at + p.tables.bytes;
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void balance_kernel(A& a, Net& net, const BalanceParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  const bool plans = a.block_idx() == a.num_blocks() - 1 && !p.replayed;
  std::byte* const tables = smem + p.tables_at;
  a.set_role(Role::kCountForClones);
  CloneRoutingRole<A> routing(a, p, smem);
  routing.count();
  if (!meet_blocks(a, &p.progress->met)) return;
  if (plans) {
    if (!plan_together(a, net, p, routing, tables)) return;
  } else {
    routing.begin_behind_other_blocks(nullptr);
  }
  if (!p.replayed && !meet_blocks(a, &p.progress->met, 2)) return;
  a.set_role(Role::kRedirectToClones);
  const CloneLinks links = CloneLinks::at(tables + p.tables.drafts_at, p.shape);
  a.block_sync();  // counters begin where they should
  link_clones(a, p.shape, links, p.slot_expert);
  routing.redirect(links);
  a.block_sync();
  if (a.warp_idx() != 0 || !a.elect_one()) return;
  uint64_t* const leaving = &p.progress->leaving;
  if (!last_of(a.add_acq_rel_rank(leaving, 1), leaving, uint64_t(a.num_blocks()))) return;
  if (!injected(Bug::kMeetingNotReset)) p.progress->met = 0;
  if (!p.replayed) ++p.progress->plans;
}

}  // namespace hep
