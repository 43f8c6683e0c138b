// Kernel: plan one micro-batch's clones from everybody's counts, and which of its tokens this rank sends to them. By
// one block; it waits for nobody.
#pragma once
#include "roles/clone_counts.h"
#include "roles/plan_clones.h"
#include "roles/share_clones.h"

namespace hep {

// Warps of a GPU's block: of the third rule's five aims each has one.
inline constexpr int kPlanWarps = 8;

struct ClonePlanParams {
  CloneShape shape;
  CloneLayout tables;  // of the block
  CountsView counts;
  CloneOwners owners;
  CloneFlow* log;  // CloneLayout::flow_bytes
  // Results: expert [R][S] of each spare slot, -1 for none, the tokens that it takes, and what came of it.
  int32_t* slot_expert;
  int64_t* slot_tokens;
  ClonePlan* plan;
  int rank;
  CloneShare share;  // of this rank
};

// By all lanes of the block: the plan for these counts, and this rank's share of it. shared: CloneLayout::bytes.
template <Arch A, class Params, class Owners>
HEP_DEVICE void plan_and_share(A& a, const Params& p, const CountsView& view, const Owners& owners, int rank,
                               std::byte* shared) {
  a.set_role(Role::kPlanClones);
  const CloneTables<A> tables{a, p.shape, p.tables, shared};
  const PairCounts<A> counts{a, view};
  CloneCountsRole<A, Owners>(tables, counts, owners).run();
  PlanClonesRole<A> role(a, p.shape, p.tables, shared, p.log);
  // No bound is asked whether a search is worth its time: it would take a warp about as long.
  const ClonePlan plan = role.run();
  role.store(p.slot_expert, p.slot_tokens);
  if (a.warp_idx() == 0 && a.lane() == 0) *p.plan = plan;
  a.block_sync();
  a.set_role(Role::kShareClones);
  // Where constructions were; they are done.
  const CloneLinks links = CloneLinks::at(shared + p.tables.drafts_at, p.shape);
  ShareClonesRole shares(a, p.shape, tables.owner(), links, counts, p.slot_expert, p.slot_tokens);
  shares.run(rank, p.share);
}

template <Arch A>
HEP_DEVICE void plan_clones_kernel(A& a, const ClonePlanParams& p, std::byte* smem) {
  plan_and_share(a, p, p.counts, p.owners, p.rank, smem);
}

}  // namespace hep
