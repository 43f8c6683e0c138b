// The clones of an expert as ways to one another. An owner that stored an expert into each of its clones' slots would
// send all of them through its own port, and one that read all their gradients would get them through it.
//
// The copies of an expert are the slots that hold it, in their order. Its relays are those that are the first on their
// rank, where that is not the owner's. With m relays an expert is cut into m parts a piece. The owner stores part k
// into the slot of relay k alone, and relay k stores it from there into all other copies; gradients likewise: relay k
// sums part k of all copies, in their order, where its own lies, and the owner reads it there. So every port carries
// about one expert, however many copies there are. Where all copies lie on the owner's rank, it does both itself.
//
// Pieces let relays begin before all of their part is there. Each costs whoever stores a wait for its stores, so that
// many relays, whose parts are small, have one.
#pragma once
#include "roles/spare_params.h"

namespace hep {

// What a block knows of a slot of the group. expert, column: -1, empty.
struct alignas(16) SpareCopy {
  int32_t expert, column;
  int16_t relay, relays;  // which of its expert's relays it is, -1: none; how many there are
  int32_t next;           // the next copy of its expert, -1: none

  HEP_DEVICE int owner(const SpareParams& p) const { return column / p.width(); }
  // Which of rank's experts it is a copy of, -1: of none.
  HEP_DEVICE int owned_by(int rank, const SpareParams& p) const {
    return column >= 0 && column / p.width() == rank ? column % p.width() : -1;
  }
  // A part that the owner stores into it, or reads from it; -1: it has none to do with.
  HEP_DEVICE int owners_part() const { return relays ? relay : 0; }
  HEP_DEVICE bool is_owners_in(int piece) const { return owners_part() >= 0 && piece < pieces(); }
  HEP_DEVICE bool relays_in(int piece) const { return relay >= 0 && piece < pieces(); }
  HEP_DEVICE int parts() const { return relays ? relays : 1; }
  HEP_DEVICE int pieces() const { return relays >= 2 && relays <= 8 ? SpareParams::kPieces : 1; }
};

// A part of n units: the first ones have as many as each other, the last may have fewer or none.
struct SparePart {
  uint32_t begin, end;
  HEP_DEVICE static SparePart of(uint32_t n, const SpareCopy& copy, int part, int piece) {
    const uint32_t all = uint32_t(copy.parts() * copy.pieces()), each = (n + all - 1) / all;
    const uint32_t at = uint32_t(piece * copy.parts() + part) * each;
    return {at < n ? at : n, at + each < n ? at + each : n};
  }
};

// Small experts have empty parts, which nobody speaks of. units(m): of matrix m.
template <class Units>
HEP_DEVICE bool is_empty(const SpareParams& p, const SpareCopy& copy, int part, int piece, const Units& units) {
  for (uint32_t m = 0; m < p.num_matrices; ++m) {
    const SparePart one = SparePart::of(units(m), copy, part, piece);
    if (one.begin < one.end) return false;
  }
  return true;
}

// The copy in slot j. expert_at(i): what slot i of the node holds. column: of its owner, in the node.
template <class At>
HEP_DEVICE SpareCopy copy_of(const SpareParams& p, int j, int32_t column, const At& expert_at) {
  SpareCopy copy{expert_at(j), column, -1, 0, -1};
  if (copy.expert < 0) return copy;
  int latest = copy.owner(p);
  for (int i = 0; i < p.num_slots(); ++i) {
    const int rank = i / int(p.spare_slots);
    if (expert_at(i) != copy.expert) continue;
    if (i > j && copy.next < 0) copy.next = i;
    if (rank == copy.owner(p) || rank == latest) continue;
    if (i == j) copy.relay = copy.relays;
    ++copy.relays;
    latest = rank;
  }
  return copy;
}

// All of them, in a block's shared memory. A walk over the plan would wait for memory twice a slot.
template <class A>
class SpareTable {
 public:
  HEP_DEVICE SpareTable(A& arch, const SpareParams& params, std::byte* smem)
      : a(arch), p(params), copies_(reinterpret_cast<SpareCopy*>(smem)) {}

  HEP_HOST_DEVICE static uint64_t bytes(const SpareParams& p) {
    return align_up(sizeof(SpareCopy) * uint64_t(p.world.num_ranks()) * p.spare_slots, 128);
  }
  // By all lanes of a block, which meet. False: one of them has left.
  HEP_DEVICE bool fill() const {
    const int first = a.warp_idx() * A::kLanes + a.lane(), step = a.num_warps() * A::kLanes;
    for (int j = first; j < p.num_slots(); j += step) {
      const int32_t column = p.column_in_node(a, j);  // weights of another node's come along a rail
      a.st_shared(&copies_[j].expert, column < 0 ? -1 : a.ld_global(p.slot_expert + p.first_slot() + j));
      a.st_shared(&copies_[j].column, column);
    }
    if (!a.block_whole()) return false;
    for (int j = first; j < p.num_slots(); j += step) {
      const auto expert_at = [this](int i) { return a.ld_shared(&copies_[i].expert); };
      const SpareCopy copy = copy_of(p, j, a.ld_shared(&copies_[j].column), expert_at);
      a.st_shared(&copies_[j].relay, copy.relay);
      a.st_shared(&copies_[j].relays, copy.relays);
      a.st_shared(&copies_[j].next, copy.next);
    }
    return a.block_whole();
  }
  HEP_DEVICE SpareCopy operator[](int j) const {
    return std::bit_cast<SpareCopy>(a.ld_shared(reinterpret_cast<const Vec16*>(copies_ + j)));
  }
  HEP_DEVICE int32_t expert(int j) const { return a.ld_shared(&copies_[j].expert); }
  HEP_DEVICE int32_t next(int j) const { return a.ld_shared(&copies_[j].next); }
  HEP_DEVICE int first(int32_t of) const {
    int j = 0;
    while (expert(j) != of) ++j;
    return j;
  }
  // A slot of this rank, by its number in the group.
  HEP_DEVICE int own(int slot) const { return p.world.rank * int(p.spare_slots) + slot; }

 private:
  A& a;
  const SpareParams& p;
  SpareCopy* const copies_;
};

}  // namespace hep
