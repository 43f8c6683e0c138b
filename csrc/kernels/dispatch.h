// Kernel: dispatch. Warps: N2N | G2S | S2G x 2 | deliver G2S | deliver S2G | zero rows; the last two, and the work of
// the one before, are the deliver kernel's when it is launched apart. Entry and exit barriers
// of the node are inside (NodeGate); nodes are coupled by ring credits only.
#pragma once
#include "roles/deliver.h"
#include "roles/enter.h"
#include "roles/g2s.h"
#include "roles/leave.h"
#include "roles/n2n.h"
#include "roles/s2g.h"
#include "roles/zero_rows.h"

namespace hep {

inline constexpr int kScatterWarps = 2;
inline constexpr int kDispatchWarps = 5 + kScatterWarps;

template <Arch A, Transport<A> Net>
HEP_DEVICE void dispatch_kernel(A& a, Net& net, const DispatchParams& p, std::byte* smem) {
  const StageFifo<A, TokenHead> scatter(smem, p.scatter), rail(smem, p.rail_stage), deliver(smem, p.deliver);
  const int warp = a.warp_idx();
  const bool elected = a.elect_one();
  if (warp == 0 && elected) {
    scatter.init(a, 1);
    rail.init(a, 1);
    deliver.init(a, 1);
  }
  if (!enter_kernel(a)) return;
  if (warp == 0 && elected && a.block_idx() == 0) p.gate.announce_ready(a, p.landing);
  if (p.deliver_apart && warp >= 5) return;
  if (warp == 6) return ZeroRowsRole<A>::run(a, p);
  if (!elected) return;  // the copy roles are one lane each: bulk copies need no more
  switch (warp) {
    case 0: N2NRole<A, Net>(a, net, p, rail, smem).run(); break;
    case 1: DispatchG2SRole<A, Net>(a, net, p, scatter, smem).run(kScatterWarps); break;
    case 2:
    case 3:
      DispatchS2GRole<A, Net>(a, net, p, scatter, warp - 2, kScatterWarps).run(a.num_blocks() * kScatterWarps);
      break;
    case 4:
      a.set_role("deliver_g2s");
      p.gate.wait_all_done(a, p.gate.epoch());
      if (!p.deliver_apart) DeliverG2SRole<A>(a, p, deliver).run();
      break;
    case 5: return DeliverS2GRole<A>(a, p, deliver).run();
  }
  leave_operation(a, p, p.plan.node_count, p.plan.rail_count, uint64_t(a.num_blocks()) * (3 + kScatterWarps));
}

// Fills in how shared memory is cut. `budget` is what one block may use; returns the bytes it will use.
template <Arch A>
uint64_t plan_dispatch_smem(DispatchParams& p, uint64_t budget) {
  using Fifo = StageFifo<A, TokenHead>;
  p.tile_bytes = p.message.row_bytes < kMaxTileBytes ? p.message.row_bytes : kMaxTileBytes;
  const uint64_t stage = token_stage_bytes<A>(p);
  const uint64_t cursors = align_up(4ull * (p.rail.num_peers + 1), 128);
  p.arrival_cursors_at = 0, p.credit_cursors_at = cursors;
  // Without rail peers N2N stages nothing, and its share is the scatter FIFO's. So is that of deliver when it is apart.
  const uint64_t stage_bytes = p.message.payload_at() + p.tile_bytes;
  const uint64_t room = budget > 1024 ? budget - 1024 : 0, quarter = room / 4;  // the rest is alignment
  const bool rail = p.rail.num_peers != 0, here = !p.deliver_apart;
  const uint32_t n2n = rail ? stages_that_fit(quarter, stage, 3, kMostSideStages) : 3;
  const uint32_t deliver = here ? stages_that_fit(quarter, stage, 2, kMostSideStages) : 2;
  const uint64_t left = room - (rail + here) * quarter;
  constexpr uint32_t kLeast = 2 * kScatterWarps;
  uint32_t scatter = stages_that_fit(left, stage, kLeast, kMostStages) / kScatterWarps * kScatterWarps;
  for (;; scatter -= kScatterWarps) {  // cursors of many peers and empty FIFOs may take more than was set aside
    p.scatter = Fifo::layout(2 * cursors, scatter, stage_bytes);
    p.rail_stage = Fifo::layout(p.scatter.end, n2n, rail ? stage_bytes : 16);
    p.deliver = Fifo::layout(p.rail_stage.end, deliver, here ? stage_bytes : 16);
    if (p.deliver.end <= budget || scatter == kLeast) return p.smem_bytes = p.deliver.end;
  }
}

}  // namespace hep
