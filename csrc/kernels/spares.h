// Kernels of spare slots, in a node whose ranks map each other's memory: weights of clones to their holders, a wait for
// those that this rank holds, and their gradients home. All ranks launch them in the same order: a push, a wait for it,
// then another push or a collection. None asks the host anything: whose weights go where, the plan says. Of a launch
// that pushes or collects between nodes, too (kernels/spare_rails.h), these are some of the blocks.
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
inline constexpr uint32_t kLeastSpareStage = 1024;

// The bytes of a stage, at most those given, such that so many warps have theirs within the budget, behind `begin`, and
// where they lie. Returns the bytes of shared memory of a block, more than the budget where none do.
template <Arch A>
inline uint64_t lay_out_stages(uint64_t begin, int warps, uint64_t budget, uint32_t& bytes, FifoLayout& fifo,
                               uint64_t& stride) {
  for (;; bytes = bytes / 2 / 16 * 16) {
    fifo = StageFifo<A, SpareHead>::layout(begin, kSpareStages, bytes);
    stride = fifo.end - begin;
    const uint64_t all = begin + uint64_t(warps) * stride;
    if (all <= budget || bytes <= kLeastSpareStage) return all;
  }
}
// The parameters that follow from the others.
template <Arch A>
inline uint64_t plan_push(SpareParams& p, int warps, uint64_t budget) {
  if (!p.chunk_bytes || p.chunk_bytes > kSpareChunk<A>) p.chunk_bytes = kSpareChunk<A>;
  return lay_out_stages<A>(SpareTable<A>::bytes(p), warps, budget, p.chunk_bytes, p.fifo, p.fifo_stride);
}

// By one lane of every warp, when it has read what it needs of the progress: whether it is the last of the grid.
template <Arch A>
HEP_DEVICE bool last_warp(A& a, const SpareParams& p) {
  uint64_t* const leaving = &p.progress->leaving;
  return last_of(a.add_acq_rel_sys(leaving, 1), leaving, uint64_t(a.num_blocks() * a.num_warps()));
}

template <Arch A>
HEP_DEVICE void end_push(A& a, const SpareParams& p) {
  if (last_warp(a, p)) ++p.progress->pushes;
}
// Whichever warp is the last speaks for all blocks, and waits for this rank's gradients to be read.
template <Arch A>
HEP_DEVICE void end_collection(A& a, const SpareParams& p) {
  if (!last_warp(a, p)) return;
  await_taken(a, p);
  ++p.progress->collected;
}

// The blocks of a push that serve the node.
template <Arch A>
HEP_DEVICE void push_within_node(A& a, const SpareParams& p, std::byte* smem) {
  const SpareTable<A> table(a, p, smem);
  const StageFifo<A, SpareHead> fifo(smem + uint64_t(a.warp_idx()) * p.fifo_stride, p.fifo);
  if (a.lane() == 0) fifo.init(a, 1);
  if (!table.fill() || !a.elect_one()) return;
  PushWeightsRole<A> push(a, p, table, fifo);
  if (p.blocks.warp(a) == 0) push.free_slots();
  push.run();
  end_push(a, p);
}

template <Arch A>
HEP_DEVICE void push_weights_kernel(A& a, const SpareParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kPushWeights);
  push_within_node(a, p, smem);
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

// The blocks of a collection that serve the node.
template <Arch A>
HEP_DEVICE void collect_within_node(A& a, const SpareParams& p, std::byte* smem) {
  const SpareTable<A> table(a, p, smem);
  if (!table.fill()) return;
  AddGradientsRole<A> sums(a, p, table);
  if (p.blocks.warp(a) == 0 && a.elect_one()) sums.say_ready();
  if (!sums.run()) return;
  a.warp_sync();  // what the warp's lanes have read, one speaks for
  if (a.elect_one()) end_collection(a, p);
}

template <Arch A>
HEP_DEVICE void collect_gradients_kernel(A& a, const SpareParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  a.set_role(Role::kCollectGradients);
  collect_within_node(a, p, smem);
}

}  // namespace hep
