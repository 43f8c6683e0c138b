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

template <Lanes A>
class CloneCountsRole {
 public:
  HEP_DEVICE CloneCountsRole(const CloneTables<A>& tables, const CountsView& counts, const CloneOwners& owners)
      : a(tables.a), t(tables), counts_(counts), owners_(owners) {}

  // What the lanes stored, the role that plans meets before it reads.
  HEP_DEVICE void run() {
    const int me = a.warp_idx() * A::kLanes + a.lane(), width = a.num_warps() * A::kLanes;
    for (int e = me; e < t.shape.num_experts; e += width) {
      a.st_shared(t.total() + e, over_sources(counts_.layout.experts_at() + uint32_t(e)));
      a.st_shared(t.owner() + e, a.ld_global(owners_.owner + e));
      a.st_shared(t.by_owner() + e, a.ld_global(owners_.by_owner + e));
    }
    for (int r = me; r <= t.shape.num_ranks; r += width) a.st_shared(t.first() + r, a.ld_global(owners_.first + r));
  }

 private:
  static constexpr uint32_t kAhead = A::kLanes < 32 ? 1 : 16;  // loads of a lane under way together

  HEP_DEVICE int64_t over_sources(uint32_t word) const {
    const uint32_t sources = counts_.layout.num_ranks;
    int64_t sum = 0;
    for (uint32_t source = 0; source < sources; source += kAhead) {
      uint32_t n[kAhead];
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i)
        n[i] = a.ld_global(counts_.vector(int(source + i < sources ? source + i : source)) + word);
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) sum += source + i < sources ? n[i] : 0;
    }
    return sum;
  }

  A& a;
  const CloneTables<A>& t;
  const CountsView counts_;
  const CloneOwners& owners_;
};

}  // namespace hep
