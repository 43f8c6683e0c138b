// Plans of the host: placed by the code of roles/place.h, with one lane.
#include "runtime/plan.h"

#include <algorithm>
#include <stdexcept>

#include "kernels/place.h"
#include "layout/headers.h"

namespace hep {

Plan::Plan(std::shared_ptr<const Routing> routing, const PlacementOptions& options)
    : routing_(std::move(routing)),
      world_(routing_->world),
      num_experts_(routing_->counts_layout.num_experts),
      num_tokens_(routing_->num_tokens) {
  if (options.pad_multiple < 1) throw std::invalid_argument("pad_multiple: must be at least 1");
  if (options.budgets.size() != size_t(world_.num_ranks()))
    throw std::invalid_argument("budgets: need one entry per rank of the group");
  place(options);
}

Plan::Plan(const DevicePlan& d, const PlacedCounts* counts)
    : world_(d.world),
      num_experts_(d.num_experts),
      num_tokens_(d.view.num_tokens),
      on_device_(true),
      device_view_(d.view),
      device_weights_(d.weights),
      topk_(d.view.topk),
      weight_stride_(d.view.weight_stride),
      record_bytes_(d.record_bytes),
      pairs_at_(d.pairs_at),
      dropped_per_rank_(size_t(d.world.num_ranks())) {
  numbers_.recv_rows = numbers_.max_recv_rows = uint32_t(d.recv_capacity);
  numbers_.permuted_rows = uint32_t(d.budget);
  if (!counts) return;
  numbers_ = counts->numbers;
  dropped_per_rank_.assign(counts->dropped.begin(), counts->dropped.end());
  tokens_per_expert_ = counts->tokens_per_expert, padded_ = counts->padded_tokens_per_expert;
  source_rows_ = counts->source_rows;
  for (int n = 0; n < world_.num_nodes; ++n)
    rail_tokens_.push_back(counts->header(world_.rail_peer(n), kHeaderNumTokens));
}

void Plan::place(const PlacementOptions& o) {
  const CountsView counts = routing_->view();
  const uint32_t nodes = uint32_t(world_.num_nodes), ranks = uint32_t(world_.num_ranks());
  for (uint32_t r = 0; r < ranks; ++r) topk_ = std::max(topk_, counts.header(int(r), kHeaderTopk));
  const MessageLayout m = MessageLayout::make(world_, topk_, true, 0, 0);
  weight_stride_ = m.weight_bytes / 4, record_bytes_ = m.record_bytes, pairs_at_ = m.pairs_at();
  records_.resize(nodes);
  for (uint32_t n = 0; n < nodes; ++n) {
    records_[n].resize(uint64_t(counts.node_tokens(world_.rank, int(n))) * record_bytes_);
    record_ptrs_.push_back(records_[n].data());
  }
  node_count_.resize(nodes), rail_count_.resize(nodes);
  tokens_per_expert_.resize(num_local_experts()), padded_.resize(num_local_experts());
  zero_ranges_.resize(2 * num_local_experts()), dropped_per_rank_.resize(ranks);
  std::vector<uint32_t> row_base(ranks), rank_rows(ranks), pair_base(num_experts_), expert_pairs(num_experts_);
  PlaceParams p{};
  p.world = world_, p.counts_layout = routing_->counts_layout, p.counts = routing_->counts.data();
  p.num_tokens = num_tokens_, p.topk = routing_->topk;
  p.record_bytes = record_bytes_, p.pairs_at = pairs_at_, p.max_dsts = m.max_dsts;
  p.pad_multiple = o.pad_multiple, p.pad_empty = o.pad_empty;
  p.budgets = o.budgets.data(), p.recv_capacity = o.recv_capacity;
  p.pair_expert = routing_->pair_expert.data();
  p.pair_pos = routing_->pair_pos.data(), p.row_pos = routing_->row_pos.data();
  p.node_tokens = routing_->node_tokens.data();
  p.numbers = &numbers_, p.node_count = node_count_.data(), p.rail_count = rail_count_.data();
  p.tokens_per_expert = tokens_per_expert_.data(), p.padded_tokens_per_expert = padded_.data();
  p.zero_ranges = zero_ranges_.data(), p.dropped_per_rank = dropped_per_rank_.data();
  p.row_base = row_base.data(), p.rank_rows = rank_rows.data();
  p.pair_base = pair_base.data(), p.expert_pairs = expert_pairs.data();
  p.records = record_ptrs_.data();
  place_here(p);

  for (int n = 0; n < world_.num_nodes; ++n)
    rail_tokens_.push_back(counts.header(world_.rail_peer(n), kHeaderNumTokens));
  for (int s = 0; s < world_.num_ranks(); ++s) source_rows_.push_back(counts.rows(s, world_.rank));
  rail_record_stride_ = uint64_t(*std::max_element(rail_count_.begin(), rail_count_.end())) * record_bytes_;
  rail_records_.resize(nodes * rail_record_stride_);
  row_records_.resize(uint64_t(num_recv_rows()) * record_bytes_);
  row_weights_.resize(uint64_t(num_recv_rows()) * weight_stride_);
  weights_.assign(uint64_t(num_tokens_) * weight_stride_, 0.f);
  for (uint32_t t = 0; t < num_tokens_; ++t)
    std::copy_n(&routing_->pair_weight[uint64_t(t) * routing_->weight_stride], routing_->topk,
                &weights_[uint64_t(t) * weight_stride_]);
}

PlanView Plan::view() {
  if (on_device_) {
    PlanView v = device_view_;
    v.fresh = !complete_;
    return v;
  }
  const int nodes = world().num_nodes;
  node_token_ptrs_.resize(nodes), record_ptrs_.resize(nodes);
  for (int n = 0; n < nodes; ++n) {
    node_token_ptrs_[n] = routing_->node_tokens.data() + uint64_t(n) * num_tokens_;
    record_ptrs_[n] = records_[n].data();
  }
  PlanView v{};
  v.num_tokens = num_tokens(), v.topk = topk_, v.weight_stride = weight_stride_;
  v.node_tokens = node_token_ptrs_.data();
  v.records = const_cast<const unsigned char* const*>(record_ptrs_.data());
  v.numbers = &numbers_, v.zero_ranges = zero_ranges_.data();
  v.node_count = node_count_.data();
  v.node_pos = routing_->node_pos.data();
  v.rail_count = rail_count_.data();
  v.rail_records = rail_records_.data(), v.rail_record_stride = rail_record_stride_;
  v.first_expert = uint32_t(world().rank) * num_local_experts();
  v.num_local_experts = num_local_experts();
  v.row_records = row_records_.data();
  v.row_weights = row_weights_.data();
  v.fresh = !complete_;
  return v;
}

}  // namespace hep
