// What the runtime hands to a kernel: plain pointers and numbers, the same for every executor.
#pragma once
#include <cstdint>

#include "common/numeric.h"
#include "layout/message.h"
#include "layout/smem.h"
#include "pipeline/node_gate.h"
#include "pipeline/rail_ring.h"
#include "roles/place_params.h"

namespace hep {

// Bytes and rows that left a role, per link. Summed over blocks with add_acq_rel_rank.
struct TrafficCounters {
  uint64_t rail_rows, rail_bytes;  // puts to rail peers
  uint64_t node_rows, node_bytes;  // copies to or from other ranks of the node
  uint64_t self_rows, self_bytes;  // the same within this rank
  uint64_t count_bytes;            // count vectors sent, rail and node together
};

// Where one rank of this node keeps its receive rows, as mapped here.
struct NodePeers {
  unsigned char* const* recv;  // [L]
};

// The part of a plan that kernels read (and, on the first dispatch, complete).
struct PlanView {
  uint32_t num_tokens, topk, weight_stride;
  const PlanNumbers* numbers;
  const uint32_t* const* node_tokens;   // [N] -> [count] token index, ascending
  const unsigned char* const* records;  // [N] -> [count][record_bytes], finished records
  const uint32_t* node_count;           // [N] tokens of ours that node n needs
  const int32_t* node_pos;              // [T][N] position in node_tokens[n], -1 = not needed there
  const uint32_t* rail_count;           // [N] tokens that the rail peer on node n has for this node
  unsigned char* const* rail_records;   // [N] -> [rail_count][record_bytes], filled by the first dispatch
  uint32_t first_expert, num_local_experts;
  unsigned char* row_records;   // [M][record_bytes], filled by the first dispatch
  float* row_weights;           // [M][weight_stride], likewise; zeros when no weights travelled
  const uint32_t* zero_ranges;  // [local experts][2] permuted rows of the expert's group without a token
  bool fresh;                   // the first dispatch of this plan: facts are to be written
};

struct RailSide {
  RailGeometry geometry;
  const RailPeer* peers;  // [num_peers], nodes other than ours, ascending
  uint32_t num_peers;

  // The peers in the order of their nodes behind `node`, so that no node is everybody's first target.
  HEP_DEVICE const RailPeer& peer_behind(int node, uint32_t i) const { return peers[(uint32_t(node) + i) % num_peers]; }
};

// What a rank has finished, in its kernels' memory: kernels read it when they start and the last to leave moves it on,
// so that a launch needs no number from the host and may be replayed.
struct RankProgress {
  uint64_t exchanges, operations;
  uint64_t leaving;  // lanes that have left the kernel in progress
};

struct ExchangeParams {
  World world;
  CountsLayout layout;
  RankProgress* progress;
  uint32_t header[kCountHeaderWords];  // what this rank says of its call
  // Routing: exactly one of topk_idx [T, topk_in] (-1 = dropped) and routing_map [T, E].
  const int64_t* topk_idx;
  const unsigned char* routing_map;
  const float* weights;  // [T, topk_in] or [T, E], may be null
  uint32_t num_tokens, topk_in, topk;
  uint32_t weight_stride;
  // Outputs, rank-private.
  int32_t* pair_expert;   // [T][topk] ascending, -1 padded
  float* pair_weight;     // [T][weight_stride]
  uint32_t* pair_pos;     // [T][topk] position among this rank's pairs for the expert
  uint32_t* row_pos;      // [T][topk] at the first pair of each rank: position among our tokens for it
  int32_t* node_pos;      // [T][N]
  uint32_t* node_tokens;  // [N][T]
  uint64_t* excess;       // choices of experts that do not exist, tokens of more than topk; null = the host has looked
  uint32_t* columns;      // [warps][R + N + E] workspace
  PlaceParams place;
  uint32_t must_agree;  // words of the header that all ranks must give alike, one bit a word
  uint32_t max_tokens;  // that a rank may have, when placed in the kernel
  // Registered memory. Two parities of the vectors, [2][R]; see roles/exchange.h.
  unsigned char* counts;
  unsigned char* const* peer_counts;  // [L] the same of the ranks of the node
  uint64_t counts_offset;             // of the vectors in every segment
  uint64_t* rail_flags;               // [N] cache lines, written by rail peers
  uint64_t* node_flags;               // [R] cache lines, written by ranks of the node
  uint64_t* const* peer_node_flags;   // [L] start of local rank l's node_flags
  uint64_t rail_flag_offset;          // of OUR entry in a rail peer's rail_flags
  TrafficCounters* traffic;

  HEP_DEVICE uint64_t sequence() const { return progress->exchanges + 1; }
  HEP_DEVICE uint64_t parity_bytes() const {
    return (kMutant == 24 ? 0 : sequence() & 1) * layout.num_ranks * layout.vector_bytes();
  }
};

struct DispatchParams {
  World world;
  MessageLayout message;
  PlanView plan;
  RailSide rail;
  NodeGate gate;
  NodePeers peers;
  const unsigned char *x, *scales;  // [T][row_bytes], [T][scale_bytes]
  const float* weights;             // [T][weight_stride] in plan order, null = none
  unsigned char *out_x, *out_scales;
  float* out_weights;  // permuted: [out_rows]; else [M][experts of this node]
  uint32_t out_rows;
  bool permute, deliver_apart;  // apart: the deliver roles are the next kernel's
  uint32_t first_node_expert, num_node_experts;
  RankProgress* progress;
  uint64_t* exit_counter;  // rank-private, zero between kernels
  TrafficCounters* traffic;
  // Shared memory.
  uint32_t tile_bytes;
  uint64_t arrival_cursors_at, credit_cursors_at;  // [N] words each, see ChunkSweep
  FifoLayout scatter, rail_stage, deliver;
  uint64_t smem_bytes;
};

struct CombineParams {
  World world;
  PartialLayout partial;
  PlanView plan;
  uint32_t record_bytes, pairs_at;  // as in MessageLayout
  RailSide rail;
  NodeGate gate;
  NodePeers peers;
  DType dtype, partial_dtype;
  uint32_t hidden;
  const unsigned char* x;  // experts' outputs: [P][hidden] or [M][hidden]
  const float* x_weights;  // permuted: [P]; else [M][experts of this node]; null = none
  bool permuted, multiply;
  uint32_t first_node_expert, num_node_experts;
  unsigned char* recv;   // this rank's receive rows: the partials
  unsigned char* out_x;  // [T][hidden]
  float* out_weights;    // [T][weight_stride], null = none
  RankProgress* progress;
  uint64_t* exit_counter;
  TrafficCounters* traffic;
  uint32_t tile_elems;
  uint64_t credit_cursors_at;      // [N] words, see ChunkSweep
  FifoLayout node_sum, final_sum;  // the unpermute kernel uses final_sum
  uint64_t out_stage_at[2];        // two output tiles for each of the two reductions
  uint64_t smem_bytes;
};

}  // namespace hep
