// What placement is told and what it finds, see roles/place.h.
#pragma once
#include <cstdint>

#include "common/reciprocal.h"
#include "layout/counts.h"
#include "layout/message.h"

namespace hep {

// What placement finds for this rank, where kernels read it: the host need not know.
struct alignas(16) PlanNumbers {
  uint32_t recv_rows, max_recv_rows;  // receive rows of this rank, and of the rank that has most
  uint32_t permuted_rows;             // with padding, within the budget
  int32_t overflow;                   // something that was meant for this rank was dropped
  uint32_t has_holes;                 // because it has too few receive rows
  uint32_t unused[3];
};

// Placement of one rank's tokens, see roles/place.h. [R], [E], [N]: entries per rank, expert, node of the group.
struct PlaceParams {
  uint32_t record_bytes, pairs_at, max_dsts;
  uint32_t pad_multiple;
  bool pad_empty;
  uint32_t experts_of_rank, experts_of_node;
  Reciprocal by_pad, by_rank, by_node;  // of pad_multiple and of these two
  uint64_t recv_capacity;               // receive rows that every rank has
  // Results.
  PlanNumbers* numbers;
  uint32_t *node_count, *rail_count;                      // [N]
  int64_t *tokens_per_expert, *padded_tokens_per_expert;  // [local experts]
  uint32_t* zero_ranges;                                  // [local experts][2]
  uint64_t* dropped_per_rank;                             // [R] pairs lost to budgets
  uint32_t* rank_rows;                                    // [R] receive rows of each
  uint32_t* source_rows;                                  // [R] of this rank's, from each
  // [N] tables, to be filled before use: the host does not write where they lie.
  unsigned char** records;
  const uint32_t** node_token_table;
  unsigned char* record_base;
};

}  // namespace hep
