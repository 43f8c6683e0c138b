// A plan: everything that dispatch, combine and their backwards need of one routing decision. Pure function of
// the routing and the counts; knows no buffer, no SM count, no chunk size. What only arriving tokens can tell
// (records of rail tokens and of receive rows) is written by the first dispatch, then the plan is frozen.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "layout/count_mail.h"
#include "roles/params.h"

namespace hep {

// This rank's side of the routing, as the exchange kernel leaves it.
struct Routing {
  World world;
  CountsLayout counts_layout;
  uint32_t num_tokens = 0, topk = 1, weight_stride = 4;
  std::vector<int32_t> pair_expert;
  std::vector<float> pair_weight;
  std::vector<uint32_t> pair_pos, row_pos;
  std::vector<int32_t> node_pos;
  std::vector<uint32_t> node_tokens;  // [N][num_tokens], of which view().node_tokens count
  std::vector<unsigned char> counts;  // all ranks' vectors

  CountsView view() const { return {counts_layout, counts.data()}; }
};

struct PlacementOptions {
  uint32_t pad_multiple = 1;
  std::vector<int64_t> budgets;  // [R] permuted rows that rank r has room for, -1 = as many as it takes
  uint64_t recv_capacity = 0;    // receive rows that every rank has
  bool pad_empty = false;        // an expert without pairs gets pad_multiple zero rows too
};

// A plan that was placed by the exchange kernel, in the kernels' memory. The host knows its limits, and its counts
// where they came by mail.
struct DevicePlan {
  World world;
  uint32_t num_experts, record_bytes, pairs_at;
  uint64_t recv_capacity, budget;  // receive rows and permuted rows at most
  const float* weights;            // [T][weight_stride], in the kernels' memory
  PlanView view;                   // fresh is the plan's own
};

// A mail that was read; see layout/count_mail.h.
struct PlacedCounts {
  bool placed = false;
  std::vector<uint32_t> headers;  // [R][kCountHeaderWords]
  // The rest only when placed.
  PlanNumbers numbers{};
  std::vector<uint32_t> rank_rows;    // [R] receive rows of every rank, before the capacity cut
  std::vector<uint32_t> source_rows;  // [R] of ours from every rank, likewise
  std::vector<uint32_t> dropped;      // [R] pairs lost to budgets
  std::vector<uint32_t> from_nodes;   // [N] tokens for this node that the rank of this rail on each node has
  std::vector<int64_t> tokens_per_expert, padded_tokens_per_expert;  // [local experts]

  uint32_t header(int rank, int word) const { return headers[size_t(rank) * kCountHeaderWords + size_t(word)]; }
};

class Plan {
 public:
  Plan(std::shared_ptr<const Routing> routing, const PlacementOptions& options);
  // Its memory is the caller's. Where counts is null, only kernels know them, and they have their limits' values here.
  explicit Plan(const DevicePlan& plan, const PlacedCounts* counts = nullptr);

  bool on_device() const { return on_device_; }
  const World& world() const { return world_; }
  uint32_t num_experts() const { return num_experts_; }
  uint32_t num_local_experts() const { return num_experts_ / uint32_t(world_.num_ranks()); }
  uint32_t num_tokens() const { return num_tokens_; }
  uint32_t topk() const { return topk_; }  // of all ranks: sizes records and weights
  uint32_t weight_stride() const { return weight_stride_; }
  uint32_t record_bytes() const { return record_bytes_; }
  uint32_t pairs_at() const { return pairs_at_; }
  uint32_t num_recv_rows() const { return numbers_.recv_rows; }
  uint32_t max_recv_rows() const { return numbers_.max_recv_rows; }
  uint32_t num_rail_tokens(int node) const { return rail_tokens_.at(size_t(node)); }  // of the rank of this rail on
                                                                                      // `node` (its whole batch)
  std::vector<uint32_t> recv_rows_per_source() const;                                 // [R], after the capacity cut
  std::vector<uint64_t> num_dropped_per_rank() const { return dropped_per_rank_; }    // pairs lost to budgets
  uint64_t num_permuted_rows() const { return numbers_.permuted_rows; }
  const std::vector<int64_t>& tokens_per_expert() const { return tokens_per_expert_; }
  const std::vector<int64_t>& padded_tokens_per_expert() const { return padded_; }
  bool overflow() const { return numbers_.overflow; }
  bool has_holes() const { return numbers_.has_holes; }
  uint64_t num_dropped() const { return dropped_per_rank_[size_t(world().rank)]; }
  bool complete() const { return complete_; }
  const float* weights() const { return on_device_ ? device_weights_ : weights_.data(); }

  PlanView view();
  void freeze() { complete_ = true; }

  // Conversions between plan order [T, weight_stride] and the caller's layouts, all fp32.
  void weights_from_dense(const float* probs, float* out) const;  // [T, E]
  void weights_to_dense(const float* weights, float* out) const;  // [T, E], zero-filled
  void weights_from_topk(const int64_t* idx, uint32_t k, const float* in, float* out) const;
  void weights_to_topk(const int64_t* idx, uint32_t k, const float* weights, float* out) const;

  // Tensors of the compatible handles; need a complete plan.
  uint32_t num_rail_rows() const;                     // tokens of all ranks of this rail
  void fill_sparse_to_dense(int32_t* out) const;      // [num_rail_rows, L] receive row, -1 = not sent
  void fill_rail_to_node(unsigned char* out) const;   // [num_rail_rows] needed by this node
  void fill_node_to_rail(unsigned char* out) const;   // [T, N - 1] other nodes, ascending
  void fill_local_routing(unsigned char* out) const;  // [M, local experts]
  void fill_permuted_rows(int32_t* out) const;        // [M, local experts] permuted row, -1 = none

 private:
  // What only the host's plans have.
  const Routing& routing() const {
    if (!routing_) throw std::logic_error("this plan lies on the device; the host has no view of it");
    return *routing_;
  }
  void place(const PlacementOptions& o);

  std::shared_ptr<const Routing> routing_;  // null on device
  World world_;
  uint32_t num_experts_ = 0, num_tokens_ = 0;
  bool on_device_ = false;
  PlanView device_view_{};
  const float* device_weights_ = nullptr;
  PlanNumbers numbers_{};
  uint32_t topk_ = 1, weight_stride_ = 4, record_bytes_ = 0, pairs_at_ = 0;
  bool complete_ = false;
  std::vector<int64_t> tokens_per_expert_, padded_;
  std::vector<uint64_t> dropped_per_rank_;
  std::vector<float> weights_;  // [T, weight_stride], as routed
  std::vector<uint32_t> node_count_, rail_count_;
  std::vector<uint32_t> rail_tokens_, source_rows_;  // [N], [R]
  std::vector<std::vector<unsigned char>> records_;
  std::vector<unsigned char> rail_records_, row_records_;
  uint64_t rail_record_stride_ = 0;
  std::vector<float> row_weights_;
  std::vector<uint32_t> zero_ranges_;
  std::vector<const uint32_t*> node_token_ptrs_;
  std::vector<unsigned char*> record_ptrs_;
};

}  // namespace hep
