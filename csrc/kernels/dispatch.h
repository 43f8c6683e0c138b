// Kernel: dispatch. Warps: N2N | G2S | S2G x 2 | deliver G2S | deliver S2G | zero rows. The first blocks of the grid
// feed links, with the first four; those behind them do the local work, with the others, as rows land. Without such
// blocks the first have all warps. Nobody who feeds links waits for local work. Entry and exit barriers of the node are
// inside (NodeGate); nodes are coupled by ring credits only.
#pragma once
#include "roles/deliver_g2s.h"
#include "roles/deliver_s2g.h"
#include "roles/enter.h"
#include "roles/g2s.h"
#include "roles/leave.h"
#include "roles/n2n.h"
#include "roles/s2g.h"
#include "roles/zero_rows.h"

namespace hep {

inline constexpr int kScatterWarps = 2;

namespace dispatch_warp {
enum : int {
  kN2N,
  kG2S,
  kS2G,
  kLinkWarps = kS2G + kScatterWarps,
  kDeliverG2S = kLinkWarps,
  kDeliverS2G,
  kZeroRows,
  kAll
};
}
static_assert(kScatterWarps == 2);  // dispatch_kernel names each
inline constexpr int kDispatchWarps = dispatch_warp::kAll;

template <Arch A, Transport<A> Net>
HEP_DEVICE void dispatch_kernel(A& a, Net& net, const DispatchParams& p, std::byte* smem) {
  using namespace dispatch_warp;
  const StageFifo<A, TokenHead> scatter(smem, p.scatter), rail(smem, p.rail_stage);
  const StageFifo<A, TokenHead> deliver(smem, p.deliver), look_up(smem, p.look_up);
  const int warp = a.warp_idx();
  const bool elected = a.elect_one();
  const bool links = p.blocks.feeds_links(uint32_t(a.block_idx()));
  const bool local = p.blocks.works_locally(uint32_t(a.block_idx()));
  if (warp == kN2N && elected) {
    if (links) {
      scatter.init(a, 1);
      rail.init(a, 1);
    }
    if (local) {
      deliver.init(a, 1);
      look_up.init(a, 1);
    }
  }
  if (warp == kDeliverG2S && local && p.landing.followed)
    GroupWalk<A>::begin(a, reinterpret_cast<uint32_t*>(smem + p.source_begins_at), p.plan.source_rows,
                        uint32_t(p.world.num_ranks()), p.plan.numbers->recv_rows);
  if (!enter_kernel(a)) return;
  if (warp == kN2N && a.block_idx() == 0) p.gate.announce_ready(a, p.landing);
  if (warp == kZeroRows && local)
    return ZeroRowsRole<A>::run(a, p, p.blocks.worker(uint32_t(a.block_idx())), p.blocks.workers());
  if (!(warp < kLinkWarps ? links : local)) return;
  switch (warp) {  // the copies of a role are one lane's
    case kN2N:
      if (elected) N2NRole<A, Net>(a, net, p, rail, smem).run();
      // Not behind deliver's wait for rows, which may be of several ranks: this one names who has not finished.
      if (injected(Bug::kLeftWhileRowsLand) && p.landing.in != LandIn::kReceiveRow) break;
      if (!p.gate.wait_all_done(a)) return;
      break;
    case kG2S:
      if (elected) DispatchG2SRole<A, Net>(a, net, p, scatter, smem).run(kScatterWarps);
      break;
    case kS2G:
    case kS2G + 1:
      if (!DispatchS2GRole<A, Net>(a, net, p, scatter, smem, warp - kS2G, kScatterWarps)
               .run(elected, p.blocks.link * kScatterWarps, a.block_idx() == 0 && warp == kS2G))
        return;
      break;
    case kDeliverG2S:
      if (elected) DeliverG2SRole<A>(a, p, deliver, look_up, smem).run();
      return;
    case kDeliverS2G:
      if (elected) DeliverS2GRole<A>(a, p, deliver).run();
      return;
  }
  if (elected) leave_operation(a, p, p.plan.node_count, p.plan.rail_count, uint64_t(p.blocks.link) * kLinkWarps);
}

// The FIFOs of local work, from `start` on, within `budget` bytes.
template <Arch A>
uint64_t plan_local_smem(DispatchParams& p, uint64_t start, uint64_t budget, uint32_t most_stages) {
  using Fifo = StageFifo<A, TokenHead>;
  p.source_begins_at = start;
  const uint64_t begins = GroupWalk<A>::bytes(uint64_t(p.world.num_ranks()));
  const bool looks_up = p.landing.in == LandIn::kFirstPair;
  p.look_up = Fifo::layout(start + begins, LookUp::kStages, looks_up ? LookUp::stage_bytes(p.message) : 16);
  const uint64_t aside = p.look_up.end - start + 256, left = budget > aside ? budget - aside : 0;
  const uint32_t stages = stages_that_fit(left, token_stage_bytes<A>(p), 2, most_stages);
  p.deliver = Fifo::layout(p.look_up.end, stages, p.message.payload_at() + p.tile_bytes);
  return p.deliver.end;
}

// Fills in how shared memory is cut. `budget` is what one block may use; returns the bytes it will use.
template <Arch A>
uint64_t plan_dispatch_smem(DispatchParams& p, uint64_t budget) {
  using Fifo = StageFifo<A, TokenHead>;
  p.tile_bytes = p.message.row_bytes < kMaxTileBytes ? p.message.row_bytes : kMaxTileBytes;
  const uint64_t stage = token_stage_bytes<A>(p), stage_bytes = p.message.payload_at() + p.tile_bytes;
  const uint64_t cursors = align_up(4ull * (p.rail.num_peers + 1), 128);
  p.arrival_cursors_at = 0;
  p.credit_cursors_at = cursors;
  p.untold_at = 2 * cursors;
  const uint64_t locals = kScatterWarps * uint64_t(p.world.num_local_ranks);
  p.landings_at = p.untold_at + align_up(sizeof(UntoldRows) * locals, 128);
  const uint64_t fifos_at = p.landings_at + align_up(sizeof(LandingOfRank) * locals, 128);
  // Without rail peers N2N stages nothing, and its share is the scatter FIFO's. So is that of local work that is apart.
  // Scatter stages are even in number: N2N has what is left of their share, too.
  const uint64_t room = budget > 1024 ? budget - 1024 : 0, quarter = room / 4;  // the rest is alignment
  const bool rail = p.rail.num_peers != 0, here = !p.blocks.is_apart();
  const uint64_t left = room - (rail + here) * quarter;
  constexpr uint32_t kLeast = 2 * kScatterWarps;
  uint32_t scatter = stages_that_fit(left, stage, kLeast, kMostStages) / kScatterWarps * kScatterWarps;
  const uint64_t others = here * quarter + scatter * stage;
  const uint32_t n2n = rail ? stages_that_fit(room > others ? room - others : 0, stage, 3, kMostSideStages) : 3;
  const uint64_t apart = here ? 0 : plan_local_smem<A>(p, 0, budget, kMostStages);
  for (;; scatter -= kScatterWarps) {  // cursors of many peers and empty FIFOs may take more than was set aside
    p.scatter = Fifo::layout(fifos_at, scatter, stage_bytes);
    p.rail_stage = Fifo::layout(p.scatter.end, n2n, rail ? stage_bytes : 16);
    const uint64_t end = here ? plan_local_smem<A>(p, p.rail_stage.end, quarter, kMostSideStages) : p.rail_stage.end;
    if (end <= budget || scatter == kLeast) return p.smem_bytes = end > apart ? end : apart;
  }
}

}  // namespace hep
