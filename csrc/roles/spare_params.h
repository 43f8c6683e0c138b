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
  uint64_t leaving;   // warps that have left the push or the collection in progress
  uint64_t of_nodes;  // collections whose sums of other nodes are added
};

// The blocks of a launch that do the same: within the node, or between nodes.
struct SpareBlocks {
  uint32_t first, number;

  template <class A>
  HEP_DEVICE uint32_t warp(A& a) const {
    return (uint32_t(a.block_idx()) - first) * uint32_t(a.num_warps()) + uint32_t(a.warp_idx());
  }
  template <class A>
  HEP_DEVICE uint32_t warps(A& a) const {
    return number * uint32_t(a.num_warps());
  }
};

struct SpareMatrix {
  uint64_t bytes, weights_at;  // of one expert's weights; of the stack, in the region
  uint64_t elements, gradients_at;

  // What parts of a matrix are counted in: 16 bytes of weights, 16 of gradients.
  HEP_DEVICE uint32_t weight_units() const { return uint32_t(bytes / sizeof(Vec16)); }
  HEP_DEVICE uint32_t sum_units() const { return uint32_t(elements / 4); }
};

struct SpareParams {
  static constexpr uint64_t kStride = BufferLayout::kFlagStride / 8;
  static constexpr int kPieces = int(SpareShape::kMostPieces);

  World world;         // of one node
  int32_t first_rank;  // of it, in the group; the plan and the columns are the group's
  SpareProgress* progress;
  uint32_t spare_slots, num_owners, num_matrices;
  uint32_t num_experts;  // of the group; where no host looks at a plan, what is none of them is an empty slot
  uint32_t chunk_bytes;  // of a stage, a multiple of 16
  SpareMatrix matrices[SpareShape::kMostMatrices];
  const int32_t* slot_expert;  // [R][S] of the plan, -1: empty
  const int64_t* columns;      // [E] of each expert's owner in a map over physical slots
  // [owners][matrices] addresses: of weights to be pushed, or of fp32 sums that gradients are added to.
  const uint64_t* experts;
  // Warps that have stored their share of a piece of what a slot gets from this rank [R][S][pieces], and that have
  // summed theirs of this rank's own slots [S][pieces]; zero between kernels.
  uint64_t *stored, *summed;
  // Registered memory: regions by their bytes from a rank's receive rows, which `recv` [L] has. Flags have a line each.
  unsigned char* const* recv;
  int64_t weights, gradients;
  int64_t free, full, ready, sums,
      taken;  // [L] by rank, [S][L][pieces] by slot and who stores, [L], [L][S][pieces], [L]
  // The blocks that push or collect within the node; between_nodes: others of the launch do between nodes.
  SpareBlocks blocks;
  bool between_nodes;
  // Set for a launch: a warp's stages, and how far those of the next lie behind them.
  FifoLayout fifo;
  uint64_t fifo_stride;

  HEP_DEVICE int num_slots() const { return world.num_ranks() * int(spare_slots); }
  HEP_DEVICE int first_slot() const { return first_rank * int(spare_slots); }
  // Of the owner of what slot j of the group holds; -1: empty.
  template <class A>
  HEP_DEVICE int32_t column_of(A& a, int j) const {
    const uint32_t expert = uint32_t(a.ld_global(slot_expert + j));
    return expert < num_experts ? int32_t(a.ld_global(columns + expert)) : -1;
  }
  // The same of the owner's in this node, of what slot j of the node holds; -1: empty, or its owner lives elsewhere.
  template <class A>
  HEP_DEVICE int32_t column_in_node(A& a, int j) const {
    const int32_t column = column_of(a, first_slot() + j) - first_rank * width();
    return column >= 0 && column < world.num_ranks() * width() ? column : -1;
  }
  HEP_DEVICE int name(int rank) const { return first_rank + rank; }  // as the group counts
  HEP_DEVICE int rank_of(int slot) const { return slot / int(spare_slots); }
  HEP_DEVICE unsigned char* at(int rank, int64_t region) const {
    return reinterpret_cast<unsigned char*>(reinterpret_cast<uint64_t>(recv[rank]) + uint64_t(region));
  }
  HEP_DEVICE uint64_t* flag(int rank, int64_t region, int number) const {
    return reinterpret_cast<uint64_t*>(at(rank, region)) + uint64_t(number) * kStride;
  }
  // Of a slot of `rank`: what `source` has stored of a piece is there.
  HEP_DEVICE uint64_t* full_flag(int rank, int slot, int source, int piece) const {
    return flag(rank, full, (slot * world.num_ranks() + source) * kPieces + piece);
  }
  // Of a slot of the group, in its owner's memory: the part of the sum that its holder forms.
  HEP_DEVICE uint64_t* sum_flag(int rank, int slot, int piece) const {
    return flag(rank, sums, slot * kPieces + piece);
  }
  // Addresses of matrix m in a slot of the group.
  HEP_DEVICE uint64_t weights_of(int slot, uint32_t m) const {
    const uint64_t before = uint64_t(slot % int(spare_slots)) * matrices[m].bytes;
    return reinterpret_cast<uint64_t>(at(rank_of(slot), weights)) + matrices[m].weights_at + before;
  }
  HEP_DEVICE uint64_t gradients_of(int slot, uint32_t m) const {
    const uint64_t before = uint64_t(slot % int(spare_slots)) * matrices[m].elements * 4;
    return reinterpret_cast<uint64_t>(at(rank_of(slot), gradients)) + matrices[m].gradients_at + before;
  }
  HEP_DEVICE int width() const { return int(num_owners + spare_slots); }
};

}  // namespace hep
