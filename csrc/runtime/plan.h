// A plan: everything that dispatch, combine and their backwards need of one routing decision. Pure function of
// the routing and the counts; knows no buffer, no SM count, no chunk size. What only arriving tokens can tell
// (records of rail tokens and of receive rows) is written by the first dispatch, then the plan is frozen.
//
// The exchange kernel places it, in memory that the caller owns and kernels read. The host knows its counts where
// they came by notification, else their limits.
#pragma once
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "layout/count_notification.h"
#include "layout/headers.h"
#include "roles/params.h"

namespace hep {

// What the exchange kernel was told to place, and where.
struct PlacedPlan {
  World world;
  uint32_t num_experts, record_bytes, pairs_at;
  uint64_t recv_capacity, budget;         // receive rows and permuted rows at most
  const float* weights;                   // [T][weight_stride], as routed; in the kernels' memory
  std::span<const unsigned char> memory;  // all of it, but what is learned
  PlanView view;                          // fresh is the plan's own
};

// A count notification that was read; see layout/count_notification.h.
struct PlacedCounts {
  bool placed = false;
  std::vector<CallHeader> headers;  // [R]
  // The rest only when placed.
  PlanNumbers numbers{};
  std::vector<uint32_t> rank_rows;    // [R] receive rows of every rank, before the capacity cut
  std::vector<uint32_t> source_rows;  // [R] of ours from every rank, likewise
  std::vector<uint32_t> dropped;      // [R] pairs lost to budgets
  std::vector<uint32_t> from_nodes;   // [N] tokens for this node that the rank of this rail on each node has
  std::vector<int64_t> tokens_per_expert, padded_tokens_per_expert;  // [local experts]
};

class Plan {
 public:
  // Of a plan whose counts only kernels know: sizes are their limits, and there are no tokens_per_expert.
  explicit Plan(const PlacedPlan& placed) : placed_(placed) {
    counts_.numbers.recv_rows = counts_.numbers.max_recv_rows = uint32_t(placed.recv_capacity);
    counts_.numbers.permuted_rows = uint32_t(placed.budget);
  }
  Plan(const PlacedPlan& placed, const PlacedCounts& counts) : placed_(placed), counts_(counts) {}

  const World& world() const { return placed_.world; }
  uint32_t num_experts() const { return placed_.num_experts; }
  uint32_t num_local_experts() const { return num_experts() / uint32_t(world().num_ranks()); }
  uint32_t num_tokens() const { return placed_.view.num_tokens; }
  uint32_t topk() const { return placed_.view.topk; }  // of all ranks: sizes records and weights
  uint32_t weight_stride() const { return placed_.view.weight_stride; }
  uint32_t record_bytes() const { return placed_.record_bytes; }
  uint32_t pairs_at() const { return placed_.pairs_at; }
  const float* weights() const { return placed_.weights; }
  std::span<const unsigned char> memory() const { return placed_.memory; }  // of the kernels; see PlaceCall
  uint32_t num_recv_rows() const { return counts_.numbers.recv_rows; }
  uint32_t max_recv_rows() const { return counts_.numbers.max_recv_rows; }
  uint64_t num_permuted_rows() const { return counts_.numbers.permuted_rows; }
  bool overflow() const { return counts_.numbers.overflow; }
  bool has_holes() const { return counts_.numbers.has_holes; }

  // What came by notification. std::logic_error of a plan whose counts only kernels know.
  const PlacedCounts& counts() const {
    if (!counts_.placed) throw std::logic_error("plan: only kernels know its counts");
    return counts_;
  }
  // The whole batch of the rank of this rail on `node`.
  uint32_t num_rail_tokens(int node) const { return counts().headers[size_t(world().rail_peer(node))].num_tokens; }

  PlanView view() const {
    PlanView v = placed_.view;
    v.fresh = !complete_;
    return v;
  }
  bool complete() const { return complete_; }
  void freeze() { complete_ = true; }

 private:
  PlacedPlan placed_;
  PlacedCounts counts_;
  bool complete_ = false;
};

}  // namespace hep
