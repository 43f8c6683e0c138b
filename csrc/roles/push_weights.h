// Weights of this rank's experts to the slots of their relays, and what it relays to the other copies (spare_copies.h).
// Warps of all blocks share the chunks of each part.
//
// A slot may be written when its holder has entered this push: it does so in the order of its stream, behind whatever
// has used the slot before (`free`, counted in pushes). What a rank stores into it may be read when the last of the
// warps that store has seen its stores complete and says so for all of them (`full`, likewise counted, of each slot,
// source and piece).
#pragma once
#include "roles/spare_stores.h"

namespace hep {

template <Arch A>
class PushWeightsRole {
 public:
  HEP_DEVICE PushWeightsRole(A& arch, const SpareParams& params, const SpareTable<A>& table,
                             const StageFifo<A, SpareHead>& fifo)
      : a(arch),
        p(params),
        table_(table),
        stores_(arch, params, fifo),
        worker_(params.blocks.warp(arch)),
        workers_(params.blocks.warps(arch)) {}

  // This rank's slots may be written, by anyone. By one lane of the grid.
  HEP_DEVICE void free_slots() {
    const auto flag = [this](int r) { return p.flag(r, p.free, p.world.rank); };
    a.st_release_sys_each(p.world.num_ranks(), flag, stores_.epoch());
  }
  // By one lane of every warp. Nobody waits for a piece before it has stored all that it owns of that piece, so that
  // no two ranks wait for each other.
  HEP_DEVICE void run() {
    for (int piece = 0; piece < SpareParams::kPieces; ++piece)
      for (int slot = kOwner; slot < int(p.spare_slots); ++slot) send(slot, piece);
    stores_.finish();
  }

 private:
  static constexpr int kOwner = -1;

  // From this rank's experts to the slots of the group, or from a slot of its to the other copies. Either way from
  // behind itself on, so that not all store into the same rank.
  HEP_DEVICE void send(int slot, int piece) {
    const int own = table_.own(slot == kOwner ? 0 : slot);
    const SpareCopy mine = table_[own];
    const auto units = [this](uint32_t m) { return p.matrices[m].weight_units(); };
    bool there = slot == kOwner || injected(Bug::kPartRelayedUnawaited);
    if (slot != kOwner && (!mine.relays_in(piece) || is_empty(p, mine, mine.relay, piece, units))) return;
    int j = own;
    do {
      const SpareCopy copy = table_[j];
      const int owned = slot == kOwner ? copy.owned_by(p.world.rank, p) : -1;
      if (slot == kOwner ? owned >= 0 && copy.is_owners_in(piece) : j != own) {
        if (!there) await_part(mine, own, piece);
        there = true;
        store(copy, slot == kOwner ? copy.owners_part() : mine.relay, piece, j, owned, own);
      }
      j = slot == kOwner ? (j + 1 < p.num_slots() ? j + 1 : 0) : copy.next >= 0 ? copy.next : table_.first(mine.expert);
    } while (j != own);
  }
  HEP_DEVICE void await_part(const SpareCopy& mine, int own, int piece) {
    const int slot = own % int(p.spare_slots), owner = mine.owner(p);
    const uint64_t* const flag = p.full_flag(p.world.rank, slot, owner, piece);
    if (a.ld_acquire_sys(flag) >= stores_.epoch()) return;
    stores_.drain();
    a.wait_ge_sys(flag, stores_.epoch(), {Site::kCloneWeights, p.name(owner), slot});
  }
  // To slot j, of this rank's expert `owned`, or -1 out of its slot `own`. Chunks are counted through all parts, so
  // that warps have alike even where a part has few.
  HEP_DEVICE void store(const SpareCopy& copy, int part, int piece, int j, int owned, int own) {
    uint32_t chunks = 0;
    for (uint32_t m = 0; m < p.num_matrices; ++m) chunks += chunks_of(units_of(copy, part, piece, m));
    const uint32_t parties = workers_ < chunks ? workers_ : chunks;
    const int lands = injected(Bug::kWeightsInAnotherSlot) ? another(j) : j;
    uint32_t m = 0, before = 0;  // chunks of the matrices before this one
    for (uint32_t c = (worker_ + workers_ - base_) % workers_; c < chunks; c += workers_) {
      SparePart units = units_of(copy, part, piece, m);
      while (c - before >= chunks_of(units)) {
        before += chunks_of(units);
        units = units_of(copy, part, piece, ++m);
      }
      const uint64_t at = uint64_t(units.begin) * kUnit + uint64_t(c - before) * p.chunk_bytes;
      const uint64_t rest = uint64_t(units.end) * kUnit - at;
      SpareHead head{};
      head.to = p.weights_of(lands, m) + at;
      head.bytes = rest < p.chunk_bytes ? uint32_t(rest) : p.chunk_bytes;
      head.piece = uint32_t(j * SpareParams::kPieces + piece);
      head.parties = c + workers_ >= chunks ? parties : 0;
      const uint64_t from =
          owned < 0 ? p.weights_of(own, m) : a.ld_global(p.experts + uint64_t(uint32_t(owned)) * p.num_matrices + m);
      stores_.put(head, reinterpret_cast<const unsigned char*>(from) + at);
    }
    base_ = (base_ + chunks) % workers_;
  }
  static constexpr uint32_t kUnit = sizeof(Vec16);
  HEP_DEVICE SparePart units_of(const SpareCopy& copy, int part, int piece, uint32_t m) const {
    return SparePart::of(p.matrices[m].weight_units(), copy, part, piece);
  }
  HEP_DEVICE uint32_t chunks_of(const SparePart& units) const {
    const uint32_t each = p.chunk_bytes / kUnit;
    return (units.end - units.begin + each - 1) / each;
  }
  HEP_DEVICE int another(int j) const {
    const int slots = int(p.spare_slots);
    return j - j % slots + (j % slots + 1) % slots;
  }

  A& a;
  const SpareParams& p;
  const SpareTable<A>& table_;
  SpareStores<A> stores_;
  const uint32_t worker_, workers_;
  uint32_t base_ = 0;  // warp that has the first chunk of the next part
};

}  // namespace hep
