// What kernels see of a plan.
#pragma once
#include <cstdint>

#include "layout/message.h"
#include "roles/place_params.h"

namespace hep {

// The part of a plan that kernels read (and, on the first dispatch, complete).
struct PlanView {
  uint32_t num_tokens, topk, weight_stride;
  const PlanNumbers* numbers;
  const uint32_t* const* node_tokens;   // [N] -> [count] token index, ascending
  const unsigned char* const* records;  // [N] -> [count][record_bytes], finished records
  const uint32_t* node_count;           // [N] tokens of ours that node n needs
  const int32_t* node_pos;              // [T][N] position in node_tokens[n], -1 = not needed there
  const uint32_t* rail_count;           // [N] tokens that the rail peer on node n has for this node
  unsigned char* rail_records;          // [N] -> [rail_count][record_bytes], filled by the first dispatch
  uint64_t rail_record_stride;          // bytes from one node's to the next
  uint32_t first_expert, num_local_experts;
  unsigned char* row_records;   // [M][record_bytes], filled by the first dispatch
  float* row_weights;           // [M][weight_stride], likewise; zeros when no weights travelled
  const uint32_t* zero_ranges;  // [local experts][2] permuted rows of the expert's group without a token
  const uint32_t* source_rows;  // [R] receive rows from each rank, before the capacity cut
  bool fresh;                   // the first dispatch of this plan: metadata is to be written

  // Whether the pair is an expert's of this rank, and has a permuted row.
  HEP_DEVICE bool has_row(const PairEntry& e) const {
    return uint32_t(e.expert) - first_expert < num_local_experts && e.row >= 0;
  }
  HEP_DEVICE unsigned char* rail_record(int node, uint64_t i, uint32_t record_bytes) const {
    return rail_records + uint64_t(node) * rail_record_stride + i * record_bytes;
  }
};

}  // namespace hep
