// What the exchange kernel is told, and the counters that every kernel of a rank shares.
#pragma once
#include "common/bugs.h"
#include "roles/place_params.h"

namespace hep {

// Tokens handed over (rows) and bytes stored for them, per link; a token's row may be stored more than once. Summed
// over blocks with count_rank.
struct TrafficCounters {
  uint64_t rail_rows, rail_bytes;      // puts to rail peers
  uint64_t node_rows, node_bytes;      // copies to or from other ranks of the node
  uint64_t self_rows, self_bytes;      // the same within this rank
  uint64_t copied_rows, copied_bytes;  // dispatched rows that did not land where the caller reads them, or not all
  uint64_t count_bytes;                // count vectors sent, rail and node together
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
  uint64_t* excess;       // choices of experts that do not exist, tokens of more than topk
  uint64_t* misfits;      // header words that rule out placement, where the host gets a mail
  uint32_t walkers;       // warps that count; see plan_exchange_smem
  PlaceParams place;
  uint32_t must_agree;  // words of the header that all ranks must give alike, one bit a word
  uint32_t max_tokens;  // that a rank may have
  unsigned char* mail;  // layout/count_mail.h; null = the host wants to know nothing
  uint64_t mail_ticket;
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
    return (injected(Bug::kCountVectorsShared) ? 0 : sequence() & 1) * layout.num_ranks * layout.vector_bytes();
  }
};

}  // namespace hep
