// Kernel: deliver. The roles that take what arrived to the caller's tensors, launched behind a dispatch
// kernel that leaves them out: that one feeds the links with few SMs, this one moves local memory with as many as it is
// given. Warps: deliver G2S | deliver S2G | zero rows.
#pragma once
#include "roles/deliver.h"
#include "roles/enter.h"
#include "roles/zero_rows.h"

namespace hep {

inline constexpr int kDeliverWarps = 3;

template <Arch A>
HEP_DEVICE void deliver_kernel(A& a, const DispatchParams& p, std::byte* smem) {
  const StageFifo<A, TokenHead> fifo(smem, p.deliver);
  const int warp = a.warp_idx();
  const bool elected = a.elect_one();
  if (warp == 0 && elected) fifo.init(a, 1);
  if (!enter_kernel(a)) return;
  if (warp == 2) return ZeroRowsRole<A>::run(a, p);
  if (!elected) return;
  if (warp == 1) return DeliverS2GRole<A>(a, p, fifo).run();
  // Nothing is waited for, the dispatch kernel did that with fewer SMs; but whoever loads rows acquires them himself.
  a.set_role("deliver_g2s");
  p.gate.wait_all_done(a, p.gate.last_epoch());
  DeliverG2SRole<A>(a, p, fifo).run();
}

// As plan_dispatch_smem: here a block's shared memory is the deliver FIFO's alone.
template <Arch A>
uint64_t plan_deliver_smem(DispatchParams& p, uint64_t budget) {
  const uint64_t room = budget > 1024 ? budget - 1024 : 0;
  p.tile_bytes = p.message.row_bytes < kMaxTileBytes ? p.message.row_bytes : kMaxTileBytes;
  const uint32_t stages = stages_that_fit(room, token_stage_bytes<A>(p), 2, kMostStages);
  p.deliver = StageFifo<A, TokenHead>::layout(0, stages, p.message.payload_at() + p.tile_bytes);
  return p.smem_bytes = p.deliver.end;
}

}  // namespace hep
