// What the runtime hands to a kernel: plain pointers and numbers, the same for every executor.
#pragma once
#include <cstdint>

#include "common/numeric.h"
#include "layout/landing.h"
#include "layout/message.h"
#include "layout/reading.h"
#include "layout/smem.h"
#include "pipeline/chunk_sweep.h"
#include "pipeline/landed_rows.h"
#include "pipeline/node_gate.h"
#include "pipeline/partial_flags.h"
#include "pipeline/rail_ring.h"
#include "roles/sum_params.h"

namespace hep {

// Where one rank of this node has its receive region, as mapped here. In a dispatch it begins with a metadata entry a
// receive row; where rows land is in the Landing. The arena is said as if it lay behind the region, and need not.
struct NodePeers {
  unsigned char* const* recv;   // [L]
  unsigned char* const* arena;  // [L]
  uint64_t arena_begin;         // the offset from a receive region at which its rank's arena begins
  uint64_t landed_below;        // bytes from a rank's counters of landed rows to that region

  // What a rank calls so many bytes from its receive region, in a Landing or a Reading.
  HEP_HOST_DEVICE unsigned char* at(int local_rank, uint64_t offset) const {
    return offset < arena_begin ? recv[local_rank] + offset : arena[local_rank] + (offset - arena_begin);
  }
};

// What a block does. The first of the grid feed links; those behind them do the local work, which needs many, or,
// without such blocks, the first do that as well.
struct BlockSplit {
  uint32_t link, local;

  HEP_HOST_DEVICE uint32_t all() const { return link + local; }
  HEP_HOST_DEVICE bool feeds_links(uint32_t block) const { return block < link; }
  HEP_HOST_DEVICE bool works_locally(uint32_t block) const { return local == 0 || block >= link; }
  HEP_HOST_DEVICE bool is_apart() const { return local != 0; }
  // Among those that work locally.
  HEP_HOST_DEVICE uint32_t worker(uint32_t block) const { return local ? block - link : block; }
  HEP_HOST_DEVICE uint32_t workers() const { return local ? local : link; }
};

struct RailSide {
  RailGeometry geometry;
  const RailPeer* peers;  // [num_peers], nodes other than ours, ascending
  uint32_t num_peers;

  // The peers in the order of their nodes behind `node`, so that no node is everybody's first target.
  HEP_DEVICE const RailPeer& peer_behind(int node, uint32_t i) const { return peers[(uint32_t(node) + i) % num_peers]; }
};

struct DispatchParams {
  World world;
  MessageLayout message;
  PlanView plan;
  RailSide rail;
  NodeGate gate;
  ChunksTaken taken;
  NodePeers peers;
  const unsigned char *x, *scales;  // [T][row_bytes], [T][scale_bytes]
  const float* weights;             // [T][weight_stride] in plan order, null = none
  unsigned char *out_x, *out_scales;
  Landing landing;     // of the rows for this rank
  bool copies;         // some of them lie then elsewhere than the caller reads them
  float* out_weights;  // permuted: [out_rows]; else [M][experts of this node]
  uint32_t out_rows;
  bool permute;
  BlockSplit blocks;
  LandedRows landed;
  uint32_t first_node_expert, num_node_experts;
  RankProgress* progress;
  uint64_t* exit_counter;  // rank-private, zero between kernels
  TrafficCounters* traffic;
  // Shared memory.
  uint32_t tile_bytes;
  uint64_t arrival_cursors_at, credit_cursors_at;  // [num_peers + 1], [num_peers] words, see ChunkSweep
  uint64_t untold_at, landings_at;                 // [scatter warps][L], see LandedTally and LandingOfRank
  uint64_t source_begins_at;                       // see GroupWalk
  FifoLayout scatter, rail_stage, deliver, look_up;
  uint64_t smem_bytes;

  HEP_HOST_DEVICE bool reads_metadata() const { return plan.fresh || out_weights; }
};

struct CombineParams : SumParams {
  RailSide rail;
  NodeGate gate;
  ChunksTaken taken;
  NodePeers peers;
  BlockSplit blocks;
  PartialFlags partials;
  Reading reading;      // of this rank's rows
  unsigned char* recv;  // this rank's receive rows: the partials
  uint64_t* exit_counter;
  uint32_t tile_elems;
  uint64_t credit_cursors_at;      // [num_peers] words, see ChunkSweep
  uint64_t rail_tally_at;          // [num_peers], see RailTally
  uint64_t source_begins_at;       // see GroupWalk
  uint64_t node_rows_at[2];        // of each feed, see RankRows
  FifoLayout records[2];           // likewise, see RecordWindow
  uint64_t group_barriers_at;      // of both feeds, see GroupRecords
  uint64_t sum_rows_at[2];         // rows of a sum of each feed, see SumFeed
  FifoLayout node_sum, final_sum;  // of blocks that feed links; without node sums both are of final ones
  FifoLayout local_sum[2];         // of both groups of the others
  uint64_t out_stage_at[2];        // two slices for each warp of the two reductions
  uint32_t out_slice_bytes[2];     // of one
  uint64_t smem_bytes;
};

}  // namespace hep
