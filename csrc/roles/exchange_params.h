// What the exchange kernel is told, and the counters that every kernel of a rank shares.
#pragma once
#include "common/bugs.h"
#include "common/reciprocal.h"
#include "layout/buffer.h"
#include "roles/place_params.h"

namespace hep {

// Tokens handed over (rows) and bytes stored for them, per link; a token's row may be stored more than once. Summed
// over blocks with count_rank.
struct TrafficCounters {
  uint64_t rail_rows, rail_bytes;      // puts to rail peers
  uint64_t node_rows, node_bytes;      // copies to or from other ranks of the node
  uint64_t self_rows, self_bytes;      // the same within this rank
  uint64_t copied_rows, copied_bytes;  // dispatched rows that did not land where the caller reads them, or not all
  uint64_t partial_rows;               // sums that a rank formed of its experts' rows for others to read
  uint64_t count_bytes;                // count vectors sent, rail and node together
};

// What a rank has finished, in its kernels' memory: kernels read it when they start and the last to leave moves it on,
// so that a launch needs no number from the host and may be replayed.
struct RankProgress {
  uint64_t exchanges, operations;
  uint64_t leaving;  // lanes that have left the kernel in progress
  // Of the exchange in progress, zero between: blocks that have met, and choices that no plan can hold, for there is no
  // such expert or they are more than topk.
  uint64_t met, excess;
  uint64_t steps;  // of the latency path
  uint64_t plans;  // of clones, made together
};

// Blocks of an exchange at most. More have less to count each and more to add up: a block's columns are read by all
// blocks behind it.
inline constexpr uint32_t kMostExchangeBlocks = 32;

struct ExchangeParams {
  World world;
  CountsLayout layout;
  RankProgress* progress;
  uint32_t header[kCountHeaderWords];  // CallHeader, which this rank says of its call
  // Routing: exactly one of topk_idx [T, topk_in] (-1 = dropped) and routing_map [T, E].
  const int64_t* topk_idx;
  const unsigned char* routing_map;
  const float* weights;  // [T, topk_in] or [T, E], may be null
  uint32_t num_tokens, topk_in, topk;
  uint32_t weight_stride;
  // Outputs, rank-private.
  int32_t* pair_expert;  // [T][topk] ascending, -1 padded
  float* pair_weight;    // [T][weight_stride]
  // Positions among the pairs of a warp's tokens while it counts; see roles/route.h.
  uint32_t* pair_pos;     // [T][topk] of the expert's pairs
  uint32_t* row_pos;      // [T][topk] at the first pair of each rank: of the tokens for it
  int32_t* node_pos;      // [T][N] of the tokens for the node, -1: none; in the end among all of this rank's
  uint32_t* node_tokens;  // [N][T]
  // Of the rank's blocks.
  uint32_t* block_counts;  // [blocks][columns]
  uint64_t* misfits;       // [blocks] header words that rule out placement, where the host is notified; zero between
  PlaceParams place;
  // Set for a launch by plan_exchange: warps of a block that count, tokens of each, tokens that a warp takes in a step,
  // lanes of one, and reciprocals of run_tokens and lanes_of_token.
  // And blocks that count: a kernel may have more, which have no tokens.
  uint32_t blocks, walkers, run_tokens, step_tokens, lanes_of_token;
  Reciprocal by_run, by_token_lanes;
  bool map_words;               // rows of the routing map are whole words of 8 bytes
  uint32_t max_tokens;          // that a rank may have
  unsigned char* notification;  // layout/count_notification.h; null = the host wants to know nothing
  uint64_t notification_ticket;
  // Registered memory. Two parities of the vectors, [2][R]; see roles/exchange.h.
  unsigned char* counts;
  unsigned char* const* peer_counts;  // [L] the same of the ranks of the node
  uint64_t counts_offset;             // of the vectors in every segment
  uint64_t* rail_flags;               // [2][N] cache lines, written by rail peers
  uint64_t* node_flags;               // [R] cache lines, written by ranks of the node
  uint64_t* const* peer_node_flags;   // [L] start of local rank l's node_flags
  uint64_t rail_flag_offset;          // of OUR entry in a rail peer's rail_flags, parity 0
  TrafficCounters* traffic;
  uint64_t* waited;  // [R] nanoseconds that exchanges of counts waited for each rank, as count_rank sums

  HEP_DEVICE uint64_t sequence() const { return progress->exchanges + 1; }
  HEP_DEVICE uint64_t parity_bytes() const {
    return (injected(Bug::kCountVectorsShared) ? 0 : sequence() & 1) * layout.num_ranks * layout.vector_bytes();
  }
  HEP_DEVICE uint64_t parity_flag_bytes() const {
    return (injected(Bug::kCountFlagsShared) ? 0 : sequence() & 1) * layout.num_nodes * BufferLayout::kFlagStride;
  }
};

}  // namespace hep
