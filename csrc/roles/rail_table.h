// What the plan says of clones on other nodes than their owners', in a block's shared memory.
#pragma once
#include <bit>

#include "roles/rail_params.h"

namespace hep {

// What a block knows of a slot of the group. crosses: its expert lives on another node; leads: and it is the first of
// its node that holds it. next: the next of its node that does, -1: none.
struct alignas(16) RailCopy {
  int32_t column, next;  // -1: empty
  uint32_t crosses, leads;
};

template <class A>
class RailTable {
 public:
  HEP_DEVICE RailTable(A& arch, const SpareRailParams& params, std::byte* smem)
      : a(arch), p(params), copies_(reinterpret_cast<RailCopy*>(smem)) {}

  HEP_HOST_DEVICE static uint64_t bytes(const SpareRailParams& p) {
    return align_up(sizeof(RailCopy) * uint64_t(p.world.num_ranks()) * p.node.spare_slots, 128);
  }
  // By all lanes of a block, which meet. False: one of them has left.
  HEP_DEVICE bool fill() const {
    const int first = a.warp_idx() * A::kLanes + a.lane(), step = a.num_warps() * A::kLanes, n = p.slots_of_node();
    for (int j = first; j < p.num_slots(); j += step) a.st_shared(&copies_[j].column, p.node.column_of(a, j));
    if (!a.block_whole()) return false;
    for (int j = first; j < p.num_slots(); j += step) {
      const int node = p.node_of_slot(j);
      const int32_t column = a.ld_shared(&copies_[j].column);
      const bool crosses = column >= 0 && p.owner_of(column) / p.world.num_local_ranks != node;
      bool leads = crosses;
      int32_t next = -1;
      for (int i = node * n; crosses && i < (node + 1) * n; ++i) {
        if (a.ld_shared(&copies_[i].column) != column) continue;
        if (i < j) leads = false;
        if (i > j && next < 0) next = i;
      }
      a.st_shared(&copies_[j].next, next);
      a.st_shared(&copies_[j].crosses, uint32_t(crosses));
      a.st_shared(&copies_[j].leads, uint32_t(leads));
    }
    return a.block_whole();
  }
  HEP_DEVICE RailCopy operator[](int j) const {
    return std::bit_cast<RailCopy>(a.ld_shared(reinterpret_cast<const Vec16*>(copies_ + j)));
  }
  // The copies that a lead and those behind it are.
  HEP_DEVICE int copies(int lead) const {
    int n = 0;
    for (int j = lead; j >= 0; j = (*this)[j].next) ++n;
    return n;
  }
  HEP_DEVICE int copy(int lead, int i) const {
    for (; i > 0; --i) lead = (*this)[lead].next;
    return lead;
  }
  // Of the slots of `node` that lead with an expert of rank `owner`, the one behind `slot`, or the first behind -1, in
  // the order of the owner's experts, which all nodes have alike; -1: there is none.
  HEP_DEVICE int lead(int owner, int node, int slot) const {
    RailCopy found{slot < 0 ? -1 : (*this)[slot].column, 0, 0, 0};
    const int32_t behind = found.column;
    int at = -1;
    for (int j = node * p.slots_of_node(); j < (node + 1) * p.slots_of_node(); ++j) {
      const RailCopy copy = (*this)[j];
      if (!copy.leads || p.owner_of(copy.column) != owner || copy.column <= behind) continue;
      if (at >= 0 && copy.column > found.column) continue;
      at = j;
      found = copy;
    }
    return at;
  }
  HEP_DEVICE uint32_t leads(int owner, int node) const {
    uint32_t n = 0;
    for (int j = node * p.slots_of_node(); j < (node + 1) * p.slots_of_node(); ++j) {
      const RailCopy copy = (*this)[j];
      n += copy.leads && p.owner_of(copy.column) == owner;
    }
    return n;
  }

 private:
  A& a;
  const SpareRailParams& p;
  RailCopy* copies_;
};

}  // namespace hep
