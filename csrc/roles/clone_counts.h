// From everybody's count vectors to the tables of a plan, by all lanes of the block that plans.
#pragma once
#include "layout/counts.h"
#include "roles/clone_params.h"
#include "roles/clone_tables.h"

namespace hep {

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

// Fills the tables of owners. Experts of a rank are in the order of its columns there, on which no plan depends.
template <Lanes A>
HEP_DEVICE void read_owners(const CloneTables<A>& t, const CloneColumns& c, int expert) {
  const int64_t column = t.a.ld_global(c.columns + expert);
  const int owner = int(column) / c.width();
  t.a.st_shared(t.owner() + expert, owner);
  t.a.st_shared(t.by_owner() + (int(column) - owner * c.spare_slots), expert);
}
template <Lanes A>
HEP_DEVICE void read_first(const CloneTables<A>& t, const CloneColumns& c, int rank) {
  t.a.st_shared(t.first() + rank, rank * c.owners);
}
template <Lanes A>
HEP_DEVICE void read_owners(const CloneTables<A>& t, const CloneOwners& o, int expert) {
  t.a.st_shared(t.owner() + expert, t.a.ld_global(o.owner + expert));
  t.a.st_shared(t.by_owner() + expert, t.a.ld_global(o.by_owner + expert));
}
template <Lanes A>
HEP_DEVICE void read_first(const CloneTables<A>& t, const CloneOwners& o, int rank) {
  t.a.st_shared(t.first() + rank, t.a.ld_global(o.first + rank));
}

template <Lanes A, class Owners = CloneOwners>
class CloneCountsRole {
 public:
  HEP_DEVICE CloneCountsRole(const CloneTables<A>& tables, const PairCounts<A>& counts, const Owners& owners)
      : a(tables.a), t(tables), counts_(counts), owners_(owners) {}

  // What the lanes stored, the role that plans meets before it reads.
  HEP_DEVICE void run() {
    const int me = a.warp_idx() * A::kLanes + a.lane(), width = a.num_warps() * A::kLanes;
    for (int e = me; e < t.shape.num_experts; e += width) {
      a.st_shared(t.total() + e, counts_.sum(0, t.shape.num_ranks, e));
      read_owners(t, owners_, e);
    }
    for (int r = me; r <= t.shape.num_ranks; r += width) read_first(t, owners_, r);
  }

 private:
  A& a;
  const CloneTables<A>& t;
  const PairCounts<A>& counts_;
  const Owners& owners_;
};

}  // namespace hep
