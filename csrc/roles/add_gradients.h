// Gradients of clones, from the ranks that hold them to the sums of their owners, where they are added in fp32 in the
// order of the plan, (rank, slot) ascending. An element of a sum belongs to one lane for all clones of its expert, so
// that the order is that of the lane's own loop.
//
// A holder's gradients may be read when it has entered the collection (`ready`, counted in collections), and written
// again when all who read them have said so (`taken`), which the last lane of the kernel waits for.
#pragma once
#include <bit>

#include "pipeline/node_gate.h"
#include "roles/spare_params.h"

namespace hep {

template <Arch A>
class AddGradientsRole {
 public:
  HEP_DEVICE AddGradientsRole(A& arch, const SpareParams& params, const int32_t* clones)
      : a(arch), p(params), clones_(clones), epoch_(params.progress->collected + 1) {}

  // By one lane of the grid.
  HEP_DEVICE void say_ready() {
    a.st_release_sys_each(p.world.num_ranks(), [this](int r) { return p.flag(r, p.ready, p.world.rank); }, epoch_);
  }
  // By all lanes. False: one of this warp has left in its wait.
  HEP_DEVICE bool run() {
    for (int j = 0; j < p.num_slots(); ++j) {
      const int owned = a.ld_shared(clones_ + j), holder = j / int(p.spare_slots);
      if (owned < 0) continue;
      if (a.elect_one() && !injected(Bug::kCloneGradientsUnawaited))
        a.wait_ge_sys(p.flag(p.world.rank, p.ready, holder), epoch_, {Site::kCloneGradients, holder, int64_t(j)});
      if (!a.warp_whole()) return false;
      for (uint32_t m = 0; m < p.num_matrices; ++m)
        add(p.matrices[m], holder, j % int(p.spare_slots), sum_of(owned, m));
      if (injected(Bug::kCloneGradientTwice)) add(p.matrices[0], holder, j % int(p.spare_slots), sum_of(owned, 0));
    }
    return true;
  }
  // By one lane, the last to leave: for all of them.
  HEP_DEVICE void end() {
    a.st_release_sys_each(p.world.num_ranks(), [this](int r) { return p.flag(r, p.taken, p.world.rank); }, epoch_);
    for (int s = 0; s < int(p.spare_slots) && !injected(Bug::kCloneGradientsNotTaken); ++s) {
      const int expert = a.ld_global(p.slot_expert + p.world.rank * int(p.spare_slots) + s);
      if (expert < 0) continue;
      const int owner = owner_of(a, p, expert);
      a.wait_ge_sys(p.flag(p.world.rank, p.taken, owner), epoch_, {Site::kCloneGradientsTaken, owner, s});
    }
  }

 private:
  static constexpr int kAhead = A::kLanes < 32 ? 1 : 4;  // loads of a lane from another rank under way together

  HEP_DEVICE float* sum_of(int owned, uint32_t matrix) {
    return reinterpret_cast<float*>(a.ld_global(p.experts + uint64_t(uint32_t(owned)) * p.num_matrices + matrix));
  }
  HEP_DEVICE void add(const SpareMatrix& m, int holder, int slot, float* sum) {
    const auto* from = reinterpret_cast<const Vec16*>(p.at(holder, p.gradients) + m.gradients_at +
                                                      uint64_t(uint32_t(slot)) * m.elements * 4);
    const uint64_t vectors = m.elements / 4, width = uint64_t(a.num_blocks() * a.num_warps()) * A::kLanes;
    const bool whole = reinterpret_cast<uint64_t>(sum) % sizeof(Vec16) == 0;
    for (uint64_t i = uint64_t(a.block_idx() * a.num_warps() + a.warp_idx()) * A::kLanes + uint64_t(a.lane());
         i < vectors; i += kAhead * width) {
      Vec16 gradient[kAhead];
      HEP_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const uint64_t at = i + uint64_t(u) * width;
        gradient[u] = a.ld_global(from + (at < vectors ? at : i));
      }
      HEP_UNROLL
      for (int u = 0; u < kAhead; ++u) {
        const uint64_t at = i + uint64_t(u) * width;
        if (at < vectors) add_vector(sum + 4 * at, gradient[u], whole);
      }
    }
  }
  // A sum may begin at any element: those of Megatron's gradient buffers do.
  HEP_DEVICE void add_vector(float* sum, const Vec16& gradient, bool whole) {
    if (whole) {
      auto* const vector = reinterpret_cast<Vec16*>(sum);
      Vec16 v = a.ld_global(vector);
      HEP_UNROLL
      for (int k = 0; k < 4; ++k)
        v.w[k] = std::bit_cast<uint32_t>(std::bit_cast<float>(v.w[k]) + std::bit_cast<float>(gradient.w[k]));
      a.st_global(vector, v);
      return;
    }
    HEP_UNROLL
    for (int k = 0; k < 4; ++k) a.st_global(sum + k, a.ld_global(sum + k) + std::bit_cast<float>(gradient.w[k]));
  }

  A& a;
  const SpareParams& p;
  const int32_t* const clones_;
  const uint64_t epoch_;
};

}  // namespace hep
