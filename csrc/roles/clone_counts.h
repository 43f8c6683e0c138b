// From everybody's count vectors to the tables of a plan, by all lanes of the block that plans.
#pragma once
#include "layout/counts.h"
#include "roles/clone_tables.h"

namespace hep {

// Owners of experts, which change seldom, in the rank's memory: owner [E], experts by owner, ascending [E], and where
// those of a rank begin [R + 1].
struct CloneOwners {
  const int32_t *owner, *by_owner, *first;
};

// Tokens of a source for an expert, and sums of them over sources, from the vectors in the rank's memory.
template <Lanes A>
struct PairCounts {
  static constexpr int kAhead = A::kLanes < 32 ? 1 : 16;  // loads of a lane under way together

  A& a;
  const CountsView& counts;

  HEP_DEVICE int64_t operator()(int source, int expert) const {
    return a.ld_global(counts.vector(source) + counts.layout.experts_at() + uint32_t(expert));
  }
  HEP_DEVICE int64_t sum(int begin, int end, int expert) const {
    int64_t all = 0;
    for (int source = begin; source < end; source += kAhead) {
      int64_t n[kAhead];
      HEP_UNROLL
      for (int i = 0; i < kAhead; ++i) n[i] = (*this)(source + i < end ? source + i : source, expert);
      HEP_UNROLL
      for (int i = 0; i < kAhead; ++i) all += source + i < end ? n[i] : 0;
    }
    return all;
  }
};

template <Lanes A>
class CloneCountsRole {
 public:
  HEP_DEVICE CloneCountsRole(const CloneTables<A>& tables, const PairCounts<A>& counts, const CloneOwners& owners)
      : a(tables.a), t(tables), counts_(counts), owners_(owners) {}

  // What the lanes stored, the role that plans meets before it reads.
  HEP_DEVICE void run() {
    const int me = a.warp_idx() * A::kLanes + a.lane(), width = a.num_warps() * A::kLanes;
    for (int e = me; e < t.shape.num_experts; e += width) {
      a.st_shared(t.total() + e, counts_.sum(0, t.shape.num_ranks, e));
      a.st_shared(t.owner() + e, a.ld_global(owners_.owner + e));
      a.st_shared(t.by_owner() + e, a.ld_global(owners_.by_owner + e));
    }
    for (int r = me; r <= t.shape.num_ranks; r += width) a.st_shared(t.first() + r, a.ld_global(owners_.first + r));
  }

 private:
  A& a;
  const CloneTables<A>& t;
  const PairCounts<A>& counts_;
  const CloneOwners& owners_;
};

}  // namespace hep
