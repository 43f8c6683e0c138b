// Kernel: latency dispatch, one launch from routing to rows. All warps do the same, one thing after another: count this
// rank's tokens, send them, place rows by everybody's counts, which come in the headers of slabs, hand on what came
// along the rail, receive rows. What is sent waits for nobody and what is handed on for nothing but that, so what is
// waited for comes.
#pragma once
#include "kernels/exchange.h"
#include "roles/latency_counts.h"
#include "roles/latency_forward.h"
#include "roles/latency_receive.h"
#include "roles/latency_send.h"
#include "roles/zero_rows.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct LatencyDispatchBlock {
  static constexpr bool kReads = TileMath<A>::kReadsRows;  // plain memory, few workers: rows stay whole

  A& a;
  Net& net;
  const LatencyDispatchParams& p;
  std::byte* const smem;
  const uint64_t flag;
  const bool counts, lead;  // tokens, which not more than kMostExchangeBlocks do; the last of these: it has the totals
  LatencySendRole<A, Net> sender;

  HEP_DEVICE LatencyDispatchBlock(A& arch, Net& n, const LatencyDispatchParams& params, std::byte* shared)
      : a(arch),
        net(n),
        p(params),
        smem(shared),
        flag(params.link.flag(params.routes
                                  ? LatencyCall::word(LatencyCall::kRoutes)
                                  : LatencyCall::word(LatencyCall::kDispatches, params.message.token_bytes() / 8))),
        counts(params.routes && uint32_t(arch.block_idx()) < params.route.blocks),
        lead(counts && uint32_t(arch.block_idx()) == params.route.blocks - 1),
        sender(arch, n, params, flag) {}

  HEP_DEVICE uint32_t warp() const { return uint32_t(a.block_idx() * a.num_warps() + a.warp_idx()); }
  HEP_DEVICE uint32_t warps() const { return uint32_t(a.num_blocks() * a.num_warps()); }

  // False: a lane of the block has left in a wait.
  HEP_DEVICE bool make_plan() {
    const ExchangeParams& r = p.route;
    const ExchangeSmem exchange{r.layout, r.walkers};
    a.set_role(Role::kLatencyRoute);
    RouteRole<A> route(a, r, smem);
    if (counts) route.count();
    if (!meet_blocks(a, &p.progress->met)) return false;
    if (counts) route.begin_behind_other_blocks();
    a.block_sync();
    LatencyCountsRole<A, Net> vectors(a, net, p, flag);
    if (lead) vectors.send();
    a.set_role(Role::kLatencySend);
    const TokenShare share = TokenShare::of(a, r);
    auto* words = reinterpret_cast<uint32_t*>(smem);
    const uint32_t n = p.lines();
    const auto lines = LineShare<A>::of(share.count, n, uint32_t(a.num_warps()), 2, kReads);
    for (uint32_t j = uint32_t(a.warp_idx()); j < lines.count(); j += uint32_t(a.num_warps()))
      if (const uint32_t i = lines.row(j), first = lines.first(j); first < n) {
        CountedToken<A, kHasRail<Net>> token(a, p, exchange, share.begin + i,
                                             words + exchange.of_walker(r.by_run.quotient(i)));
        if constexpr (kHasRail<Net>)
          for (; token.has_node(); token.next_node()) sender.send(token, first, lines.end(first, n));
        else
          sender.send(token, first, lines.end(first, n));
      }
    a.set_role(Role::kLatencyCounts);
    const CountsView view{r.layout, r.counts + r.parity_bytes()};
    if (lead) {
      vectors.receive();
      if (!a.block_whole() || !require_agreement(a, r, view)) return false;
      PlaceRole<A>(a, r, view, smem, true).count_rows();
    }
    if (!meet_blocks(a, &p.progress->met, 2)) return false;
    if (!lead) PlaceRole<A>(a, r, view, smem, false).count_rows();
    a.block_sync();
    LatencySources<A> sources{a, p, smem};
    sources.find_pairs(view, exchange);
    if constexpr (kHasRail<Net>) sources.find_rail(view, exchange);
    RecordRole<A>(a, r, smem).run();
    return true;
  }
  HEP_DEVICE void send_recorded() {
    a.set_role(Role::kLatencySend);
    if (warp() == 0) LatencyHello<A, Net>{a, net, p.link, flag}.send();
    const uint32_t n = p.lines(), nodes = uint32_t(p.world.num_nodes);
    for (uint32_t k = 1; k <= nodes; ++k) {  // its own comes last: what goes along the rail has the longest way
      const uint32_t node = (uint32_t(p.world.node()) + k) % nodes;
      const auto lines = LineShare<A>::of(p.plan.node_count[node], n, warps(), 2, kReads);
      for (uint32_t i = warp(); i < lines.count(); i += warps())
        if (const uint32_t first = lines.first(i); first < n)
          sender.send(RecordedToken::of(p, node, lines.row(i)), first, lines.end(first, n));
    }
  }
  // Behind either of them, and a meeting of the block.
  HEP_DEVICE void hand_on() {
    const ExchangeSmem exchange{p.route.layout, p.route.walkers};
    const auto* words = reinterpret_cast<const uint32_t*>(smem);
    LatencyForwardRole<A, Net>(a, net, p, smem, flag).run(warp(), warps(), [&](uint32_t local) {
      return a.ld_shared(words + exchange.room_at() + p.world.rank_of(p.world.node(), int(local)));
    });
  }
  HEP_DEVICE bool receive() {
    if constexpr (kHasRail<Net>) {
      a.block_sync();
      hand_on();  // others wait for it
    }
    LatencySources<A>{a, p, smem}.find_rows();
    a.block_sync();
    if (p.permute) ZeroRowsRole<A>::run(a, p, warp(), warps());
    const ExchangeSmem exchange{p.route.layout, p.route.walkers};
    const auto* words = reinterpret_cast<const uint32_t*>(smem);
    const uint32_t room = p.routes ? a.ld_shared(words + exchange.room_at() + p.world.rank) : ExchangeSmem::kUnlimited;
    LatencyReceiveRole<A, Net>(a, p, smem, flag).run(warp(), warps(), room);
    if (!p.routes && warp() == 0) LatencyHello<A, Net>{a, net, p.link, flag}.await();
    sender.report();
    return a.block_whole();
  }
};

// The end of a step: the last block to leave moves the rank on.
template <Arch A>
HEP_DEVICE void leave_step(A& a, RankProgress* progress) {
  if (a.warp_idx() != 0 || !a.elect_one()) return;
  if (!last_of(a.add_acq_rel_rank(&progress->leaving, 1), &progress->leaving, uint64_t(a.num_blocks()))) return;
  progress->met = 0;
  progress->excess = 0;
  ++progress->steps;
}

template <Arch A, Transport<A> Net>
HEP_DEVICE void latency_dispatch_kernel(A& a, Net& net, const LatencyDispatchParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  LatencyDispatchBlock<A, Net> block(a, net, p, smem);
  if (p.routes) {
    if (!block.make_plan()) return;
  } else {
    block.send_recorded();
  }
  if (block.receive()) leave_step(a, p.progress);
}

// The parameters that follow from the others, for a launch of so many blocks. Returns the bytes that a block needs.
template <Arch A>
inline uint64_t plan_latency_dispatch(LatencyDispatchParams& p, uint64_t budget, int blocks,
                                      int warps = kExchangeWarps<A>) {
  const uint64_t ranks = uint64_t(p.world.num_ranks());
  p.scratch_bytes = uint32_t(align_up(p.message.metadata_bytes() + 4ull * (p.message.max_pairs + 1), 16));
  const uint64_t rail_words = uint64_t(p.world.num_nodes - 1) * (p.world.num_local_ranks + p.num_node_experts);
  const uint64_t own = align_up(4 * (ranks + 1), 128) + align_up(4 * ranks * p.plan.num_local_experts, 128) +
                       align_up(4 * rail_words, 128) + uint64_t(p.scratch_bytes) * uint64_t(warps);
  const uint64_t exchange = p.routes ? align_up(plan_exchange<A>(p.route, budget > own ? budget - own : 0,
                                                                 std::min(blocks, int(kMostExchangeBlocks))),
                                                128)
                                     : 0;
  p.source_begins_at = exchange;
  p.pair_bases_at = p.source_begins_at + align_up(4 * (ranks + 1), 128);
  p.rail_bases_at = p.pair_bases_at + align_up(4 * ranks * p.plan.num_local_experts, 128);
  p.scratch_at = p.rail_bases_at + align_up(4 * rail_words, 128);
  return p.smem_bytes = exchange + own;
}

}  // namespace hep
