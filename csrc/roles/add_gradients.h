// Gradients of clones, from the ranks that hold them to the sums of their owners, in fp32. The relays of an expert form
// the sum of its copies, each of one part, where its own gradient lies (spare_copies.h); the owner adds it to its own.
// An element of a part belongs to one lane for all copies, so that their order is that of the lane's own loop, (rank,
// slot) ascending.
//
// A holder's gradients may be read when it has entered the collection (`ready`, counted in collections), a part of a
// sum when the last of the warps that form it says so for all of them (`sums`), and all of it may be written again when
// the owner has said that it has its sum (`taken`), which the last lane of the kernel waits for.
//
// Where other blocks bring sums of other nodes (kernels/spare_rails.h), those go first: while they are on their way,
// which takes longest, relays form theirs.
#pragma once
#include "pipeline/node_gate.h"
#include "roles/spare_copies.h"
#include "roles/vector_sum.h"

namespace hep {

template <Arch A>
class AddGradientsRole {
 public:
  HEP_DEVICE AddGradientsRole(A& arch, const SpareParams& params, const SpareTable<A>& table)
      : a(arch), p(params), table_(table), epoch_(params.progress->collected + 1) {}

  // By one lane of the grid.
  HEP_DEVICE void say_ready() {
    a.st_release_sys_each(p.world.num_ranks(), [this](int r) { return p.flag(r, p.ready, p.world.rank); }, epoch_);
  }
  // By all lanes. Nobody waits for a part of a sum before it has formed its own of that piece, so that no two ranks
  // wait for each other. False: one of this warp's lanes has left in its wait.
  HEP_DEVICE bool run() {
    for (bool forms = true, adds = !p.between_nodes;; forms = false, adds = true) {
      if (!pieces(forms, adds)) return false;
      if (adds) return true;
      if (!await_nodes()) return false;
    }
  }

 private:
  // Copies, and vectors of each, that a lane reads together.
  static constexpr int kCopies = A::kLanes < 32 ? 1 : 2, kVectors = A::kLanes < 32 ? 1 : 4;

  // forms: sums of the slots that this rank holds; adds: sums to its own gradients.
  HEP_DEVICE bool pieces(bool forms, bool adds) {
    for (int piece = 0; piece < SpareParams::kPieces; ++piece)
      for (int i = forms ? -int(p.spare_slots) : 0; i < (adds ? p.num_slots() : 0); ++i)
        if (!(i < 0 ? part(table_.own(-i - 1), piece, true) : part(i, piece, false))) return false;
    return true;
  }
  HEP_DEVICE bool await_nodes() {
    if (a.elect_one() && !injected(Bug::kOwnNodeFirst))
      a.wait_ge_sys(&p.progress->of_nodes, epoch_, {Site::kGridMeeting, -1, -1});
    return a.warp_whole();
  }
  // Of the copy in slot j: as its relay, the part of the sum that this rank forms; else what its owner, if that is this
  // rank, adds of it: the relay's part, or without relays the sum itself, once.
  HEP_DEVICE bool part(int j, int piece, bool relays) {
    const SpareCopy copy = table_[j];
    const int owned = relays ? -1 : copy.owned_by(p.world.rank, p);
    if (relays ? !copy.relays_in(piece) : owned < 0 || !copy.is_owners_in(piece)) return true;
    const int first = table_.first(copy.expert);
    const bool sums = relays || !copy.relays;
    if (!relays && sums && j != first) return true;
    const auto units = [this](uint32_t m) { return p.matrices[m].sum_units(); };
    if (is_empty(p, copy, copy.owners_part(), piece, units)) return true;
    if (!(sums ? await_copies(first) : await_sum(j, piece))) return false;
    for (uint32_t m = 0; m < p.num_matrices; ++m) {
      const uint64_t to =
          relays ? p.gradients_of(j, m) : a.ld_global(p.experts + uint64_t(uint32_t(owned)) * p.num_matrices + m);
      const SparePart vectors = SparePart::of(units(m), copy, copy.owners_part(), piece);
      for (int times = owned >= 0 && m == 0 && injected(Bug::kCloneGradientTwice) ? 2 : 1; times; --times)
        fold(vectors, m, sums ? first : j, sums, reinterpret_cast<float*>(to), !relays);
    }
    if (relays) say_summed(copy, j, piece);
    return true;
  }
  HEP_DEVICE void say_summed(const SpareCopy& copy, int own, int piece) {
    a.warp_sync();  // what the warp's lanes have summed, one speaks for
    if (!a.elect_one()) return;
    uint64_t* const summed = p.summed + own % int(p.spare_slots) * SpareParams::kPieces + piece;
    const bool last = last_of(a.add_acq_rel_sys(summed, 1), summed, p.blocks.warps(a));
    if (last || injected(Bug::kSumToldByEveryWarp)) a.st_release_sys(p.sum_flag(copy.owner(p), own, piece), epoch_);
  }
  HEP_DEVICE bool await_copies(int first) {
    if (a.elect_one() && !injected(Bug::kCloneGradientsUnawaited))
      for (int j = first; j >= 0; j = table_.next(j)) await_holder(p.flag(p.world.rank, p.ready, p.rank_of(j)), j);
    return a.warp_whole();
  }
  HEP_DEVICE bool await_sum(int j, int piece) {
    if (a.elect_one() && !injected(Bug::kSumUnawaited)) await_holder(p.sum_flag(p.world.rank, j, piece), j);
    return a.warp_whole();
  }
  HEP_DEVICE void await_holder(const uint64_t* flag, int64_t j) {
    a.wait_ge_sys(flag, epoch_, {Site::kCloneGradients, p.name(p.rank_of(int(j))), j});
  }

  // The sum of the copies from `first` on, or its gradient alone, into `to`, or added to what is there.
  HEP_DEVICE void fold(const SparePart& part, uint32_t m, int first, bool all, float* to, bool adds) {
    const uint32_t width = p.blocks.warps(a) * A::kLanes;
    const uint32_t lane = p.blocks.warp(a) * A::kLanes + uint32_t(a.lane());
    const bool whole = reinterpret_cast<uint64_t>(to) % sizeof(Vec16) == 0;
    for (uint64_t i = part.begin + lane; i < part.end; i += kVectors * width) {
      Vec16 total[kVectors]{};
      const auto at = [&](int w) { return i + uint64_t(w) * width; };
      sum_copies<kCopies>(
          a, total, first, [&](int j) { return all ? table_.next(j) : -1; },
          [&](int j) { return reinterpret_cast<const Vec16*>(p.gradients_of(j, m)); },
          [&](int w) { return at(w) < part.end ? at(w) : i; });
      if (adds) {
        add_to_sums(a, total, [&](int w) { return at(w) < part.end ? to + 4 * at(w) : nullptr; }, whole);
        continue;
      }
      HEP_UNROLL
      for (int w = 0; w < kVectors; ++w)
        if (at(w) < part.end) a.st_global(reinterpret_cast<Vec16*>(to + 4 * at(w)), total[w]);
    }
  }

  A& a;
  const SpareParams& p;
  const SpareTable<A>& table_;
  const uint64_t epoch_;
};

// By one lane, the last of the launch to leave, for all of them: sums have been read, and those who formed them of
// this rank's gradients have read these. An owner that has all parts of a sum speaks for the relays, too.
template <Arch A>
HEP_DEVICE void await_taken(A& a, const SpareParams& p) {
  const uint64_t epoch = p.progress->collected + 1;
  a.st_release_sys_each(p.world.num_ranks(), [&](int r) { return p.flag(r, p.taken, p.world.rank); }, epoch);
  for (int s = 0; s < int(p.spare_slots) && !injected(Bug::kCloneGradientsNotTaken); ++s) {
    const int32_t column = p.column_in_node(a, p.world.rank * int(p.spare_slots) + s);
    if (column < 0) continue;
    const int owner = column / p.width();
    a.wait_ge_sys(p.flag(p.world.rank, p.taken, owner), epoch, {Site::kCloneGradientsTaken, p.name(owner), s});
  }
}

}  // namespace hep
