// Kernels of spare slots, in a node whose ranks map each other's memory: weights of clones to their holders, a wait for
// those that this rank holds, and their gradients home. All ranks launch them in the same order: a push, a wait for it,
// then another push or a collection. None asks the host anything: whose weights go where, the plan says.
//
// A push announces that this rank's slots are free, which stands for whatever its stream has before: so kernels that
// use slots are launched before the next push, on its stream or one that it waits for.
#pragma once
#include "roles/add_gradients.h"
#include "roles/enter.h"
#include "roles/push_weights.h"

namespace hep {

template <Arch A>
inline constexpr int kSpareWarps = A::kLanes == 1   ? 1
                                   : A::kLanes < 32 ? 2
                                                    : 4;
template <Arch A>
inline constexpr uint32_t kSpareChunk = A::kLanes < 32 ? 4096 : 8192;  // bytes of a stage, at most
inline constexpr uint32_t kSpareStages = 4;                            // of a warp

// The parameters that follow from the others. Returns the bytes of shared memory of a block.
template <Arch A>
inline uint64_t plan_push(SpareParams& p) {
  if (!p.chunk_bytes || p.chunk_bytes > kSpareChunk<A>) p.chunk_bytes = kSpareChunk<A>;
  const uint64_t begin = SpareTable<A>::bytes(p);
  p.fifo = StageFifo<A, SpareHead>::layout(begin, kSpareStages, p.chunk_bytes);
  p.fifo_stride = p.fifo.end - begin;
  return begin + kSpareWarps<A> * p.fifo_stride;
}

// By one lane of every warp, when it has read what it needs of the progress: whether it is the last of the grid.
template <Arch A>
HEP_DEVICE bool last_warp(A& a, const SpareParams& p) {
  uint64_t* const leaving = &p.progress->leaving;
  return last_of(a.add_acq_rel_sys(leaving, 1), leaving, uint64_t(a.num_blocks() * a.num_warps()));
}

template <Arch A>
HEP_DEVICE void push_weights_kernel(A& a, const SpareParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kPushWeights);
  const SpareTable<A> table(a, p, smem);
  const StageFifo<A, SpareHead> fifo(smem + uint64_t(a.warp_idx()) * p.fifo_stride, p.fifo);
  if (a.lane() == 0) fifo.init(a, 1);
  if (!table.fill() || !a.elect_one()) return;
  PushWeightsRole<A> push(a, p, table, fifo);
  if (a.block_idx() == 0 && a.warp_idx() == 0) push.free_slots();
  push.run();
  if (last_warp(a, p)) ++p.progress->pushes;
}

// What slot j of the group stores of this rank's slot, all pieces; where j is that slot itself, what the owner does.
template <Arch A>
HEP_DEVICE void await_part(A& a, const SpareParams& p, const SpareTable<A>& table, int slot, int j, uint64_t epoch) {
  const int own = table.own(slot);
  const SpareCopy copy = table[own];
  if (copy.expert < 0 || table.expert(j) != copy.expert) return;
  const int part = j == own ? copy.owners_part() : table[j].relay;
  const int source = j == own ? copy.owner(p) : j / int(p.spare_slots);
  for (int piece = 0; part >= 0 && piece < copy.pieces(); ++piece)
    if (!is_empty(p, copy, part, piece, [&](uint32_t m) { return p.matrices[m].weight_units(); }))
      a.wait_ge_sys(p.full_flag(p.world.rank, slot, source, piece), epoch, {Site::kCloneWeights, p.name(source), slot});
}

// One block.
template <Arch A>
HEP_DEVICE void await_weights_kernel(A& a, const SpareParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kAwaitWeights);
  const uint64_t epoch = p.progress->awaited + 1;
  const SpareTable<A> table(a, p, smem);
  if (!table.fill()) return;
  const int waits = int(p.spare_slots) * p.num_slots();  // of a slot, for each of the group
  for (int i = a.warp_idx() * A::kLanes + a.lane(); i < waits; i += a.num_warps() * A::kLanes) {
    if (injected(Bug::kWeightsUnawaited)) continue;
    await_part(a, p, table, i / p.num_slots(), i % p.num_slots(), epoch);
  }
  if (!a.block_whole()) return;
  if (a.warp_idx() == 0 && a.elect_one()) ++p.progress->awaited;
}

template <Arch A>
HEP_DEVICE void collect_gradients_kernel(A& a, const SpareParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kCollectGradients);
  const SpareTable<A> table(a, p, smem);
  if (!table.fill()) return;
  AddGradientsRole<A> sums(a, p, table);
  if (a.block_idx() == 0 && a.warp_idx() == 0 && a.elect_one()) sums.say_ready();
  if (!sums.run()) return;
  a.warp_sync();  // what the warp's lanes have read, one speaks for
  if (!a.elect_one() || !last_warp(a, p)) return;
  sums.end();
  ++p.progress->collected;
}

}  // namespace hep
