// What the kernels of spare slots are told: the plan of the clones, where experts live, and the registered memory.
#pragma once
#include "common/bugs.h"
#include "layout/buffer.h"
#include "layout/smem.h"
#include "layout/spare_shape.h"

namespace hep {

// What a rank has finished, in its kernels' memory. Kernels read it when they start and the last lane to leave moves it
// on, so that a launch needs no number from the host and may be replayed.
struct SpareProgress {
  uint64_t pushes, awaited, collected;
  uint64_t leaving;  // lanes that have left the push or the collection in progress
};

struct SpareMatrix {
  uint64_t bytes, weights_at;  // of one expert's weights; of the stack, in the region
  uint64_t elements, gradients_at;
};

struct SpareParams {
  static constexpr uint64_t kStride = BufferLayout::kFlagStride / 8;

  World world;  // of one node
  SpareProgress* progress;
  uint32_t spare_slots, num_owners, num_matrices;
  uint32_t chunk_bytes;  // of a stage, a multiple of 16
  SpareMatrix matrices[SpareShape::kMostMatrices];
  const int32_t* slot_expert;  // [R][S] of the plan, -1: empty
  const int64_t* columns;      // [E] of each expert's owner in a map over physical slots
  // [owners][matrices] addresses: of weights to be pushed, or of fp32 sums that gradients are added to.
  const uint64_t* experts;
  uint64_t* stored;  // [R][S] warps that have stored their part of a slot; zero between pushes
  // Registered memory: regions by their bytes from a rank's receive rows, which `recv` [L] has. Flags have a line each.
  unsigned char* const* recv;
  int64_t weights, gradients;
  int64_t free, full, ready, taken;  // [L] by rank, [S] by slot, [L], [L]
  // Set for a launch: a warp's stages, and how far those of the next lie behind them.
  FifoLayout fifo;
  uint64_t fifo_stride;

  HEP_DEVICE int num_slots() const { return world.num_ranks() * int(spare_slots); }
  HEP_DEVICE unsigned char* at(int rank, int64_t region) const {
    return reinterpret_cast<unsigned char*>(reinterpret_cast<uint64_t>(recv[rank]) + uint64_t(region));
  }
  HEP_DEVICE uint64_t* flag(int rank, int64_t region, int number) const {
    return reinterpret_cast<uint64_t*>(at(rank, region)) + uint64_t(number) * kStride;
  }
  HEP_DEVICE int width() const { return int(num_owners + spare_slots); }
};

// Of a column: the rank, and the owner's place there.
template <class A>
HEP_DEVICE int owner_of(A& a, const SpareParams& p, int expert) {
  return int(a.ld_global(p.columns + expert)) / p.width();
}

// By all lanes of a block, which meet: for every slot of the group, which of this rank's experts is cloned there, -1:
// none of them. A walk over the plan would wait for memory twice a slot.
template <class A>
HEP_DEVICE bool find_own_clones(A& a, const SpareParams& p, int32_t* clones) {
  for (int j = a.warp_idx() * A::kLanes + a.lane(); j < p.num_slots(); j += a.num_warps() * A::kLanes) {
    const int expert = a.ld_global(p.slot_expert + j);
    const int column = expert < 0 ? -1 : int(a.ld_global(p.columns + expert));
    const bool own = column >= 0 && column / p.width() == p.world.rank;
    a.st_shared(clones + j, own ? column % p.width() : -1);
  }
  return a.block_whole();
}

// Of the table above, in a block's shared memory.
HEP_HOST_DEVICE uint64_t clone_table_bytes(const SpareParams& p) {
  return align_up(4 * uint64_t(p.world.num_ranks()) * p.spare_slots, 128);
}

}  // namespace hep
