// Placement: from counts to finished records. Every rank computes from the same counts, so all agree on every
// receive row and every permuted row without another message.
#include "runtime/plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "layout/headers.h"

namespace hep {

Plan::Plan(std::shared_ptr<const Routing> routing, const PlacementOptions& options) : routing_(std::move(routing)) {
  const World& w = world();
  if (options.pad_multiple < 1) throw std::invalid_argument("pad_multiple: must be at least 1");
  if (options.budgets.size() != size_t(w.num_ranks()))
    throw std::invalid_argument("budgets: need one entry per rank of the group");
  place(options);
}

void Plan::place(const PlacementOptions& o) {
  const World& w = world();
  const CountsView counts = routing_->view();
  for (int r = 0; r < w.num_ranks(); ++r) topk_ = std::max(topk_, counts.header(r, kHeaderTopk));
  const MessageLayout m = MessageLayout::make(w, topk_, true, 0, 0);
  weight_stride_ = m.weight_bytes / 4, record_bytes_ = m.record_bytes, pairs_at_ = m.pairs_at();

  std::vector<uint32_t> row_base(w.num_ranks());
  for (int d = 0; d < w.num_ranks(); ++d) {
    uint64_t rows = 0;
    for (int s = 0; s < w.num_ranks(); ++s) {
      if (s == w.rank) row_base[d] = uint32_t(rows);
      rows += counts.rows(s, d);
    }
    const uint32_t kept = uint32_t(std::min<uint64_t>(rows, o.recv_capacity));
    max_recv_rows_ = std::max(max_recv_rows_, kept);
    if (d == w.rank) recv_rows_ = kept, has_holes_ = rows > kept;
  }
  node_count_.resize(w.num_nodes);
  rail_count_.assign(w.num_nodes, 0);
  rail_records_.resize(w.num_nodes);
  for (int n = 0; n < w.num_nodes; ++n) {
    node_count_[n] = uint32_t(routing_->node_tokens[n].size());
    if (n == w.node()) continue;
    rail_count_[n] = counts.node_tokens(w.rail_peer(n), w.node());
    rail_records_[n].resize(uint64_t(rail_count_[n]) * record_bytes_);
  }
  row_records_.resize(uint64_t(recv_rows_) * record_bytes_);
  row_weights_.resize(uint64_t(recv_rows_) * weight_stride_);
  weights_.assign(uint64_t(num_tokens()) * weight_stride_, 0.f);
  for (uint32_t t = 0; t < num_tokens(); ++t)
    std::copy_n(&routing_->pair_weight[uint64_t(t) * routing_->weight_stride], routing_->topk,
                &weights_[uint64_t(t) * weight_stride_]);

  // First permuted row of this source's pairs for every expert of the group.
  std::vector<int64_t> pair_base(num_experts());
  for (int r = 0; r < w.num_ranks(); ++r) {
    int64_t row = 0;
    for (uint32_t e = r * num_local_experts(); e < (r + 1) * num_local_experts(); ++e) {
      int64_t pairs = 0;
      for (int s = 0; s < w.num_ranks(); ++s) {
        if (s == w.rank) pair_base[e] = row + pairs;
        pairs += counts.pairs(s, e);
      }
      row += o.group_rows(pairs);
    }
  }
  count_dropped(o);
  count_experts(o);
  finish_records(o, row_base, pair_base);
}

// This rank's experts. A budget cuts the permuted rows at its end: later experts starve first.
void Plan::count_experts(const PlacementOptions& o) {
  const World& w = world();
  const CountsView counts = routing_->view();
  const int64_t budget = o.budgets[w.rank];
  int64_t row = 0;
  for (uint32_t e = 0; e < num_local_experts(); ++e) {
    int64_t pairs = 0;
    for (int s = 0; s < w.num_ranks(); ++s) pairs += counts.pairs(s, w.rank * num_local_experts() + e);
    const int64_t padded = o.group_rows(pairs);
    const int64_t room = budget < 0 ? padded : std::max<int64_t>(0, budget - row);
    tokens_per_expert_.push_back(std::min(pairs, room));
    padded_.push_back(std::min(padded, room));
    zero_ranges_.push_back(uint32_t(row + tokens_per_expert_.back()));
    zero_ranges_.push_back(uint32_t(row + padded_.back()));
    permuted_rows_ += uint64_t(padded_.back());
    row += padded;
  }
  overflow_ = has_holes_ || dropped_per_rank_[size_t(w.rank)] > 0;
}

void Plan::count_dropped(const PlacementOptions& o) {
  const CountsView counts = routing_->view();
  for (int r = 0; r < world().num_ranks(); ++r) {
    uint64_t dropped = 0;
    int64_t row = 0;
    for (uint32_t e = r * num_local_experts(); e < (r + 1) * num_local_experts(); ++e) {
      int64_t pairs = 0;
      for (int s = 0; s < world().num_ranks(); ++s) pairs += counts.pairs(s, e);
      if (o.budgets[r] >= 0) dropped += uint64_t(pairs - std::clamp<int64_t>(o.budgets[r] - row, 0, pairs));
      row += o.group_rows(pairs);
    }
    dropped_per_rank_.push_back(dropped);
  }
}

void Plan::finish_records(const PlacementOptions& o, const std::vector<uint32_t>& row_base,
                          const std::vector<int64_t>& pair_base) {
  const World& w = world();
  const uint32_t k_in = routing_->topk, experts_per_node = num_local_experts() * w.num_local_ranks;
  records_.resize(w.num_nodes);
  for (int n = 0; n < w.num_nodes; ++n) {
    records_[n].assign(uint64_t(node_count_[n]) * record_bytes_, 0);
    for (uint32_t j = 0; j < node_count_[n]; ++j) {
      const uint32_t t = routing_->node_tokens[n][j];
      const int32_t* experts = &routing_->pair_expert[uint64_t(t) * k_in];
      unsigned char* at = &records_[n][uint64_t(j) * record_bytes_];
      auto* header = reinterpret_cast<RecordHeader*>(at);
      auto* dsts = reinterpret_cast<DstEntry*>(at + MessageLayout::dsts_at());
      auto* pairs = reinterpret_cast<PairEntry*>(at + pairs_at_);
      header->source_rank = uint32_t(w.rank), header->source_token = t;
      uint32_t k = 0;
      while (uint32_t(experts[k]) / experts_per_node != uint32_t(n)) ++k;
      header->first_pair = k;
      bool kept = false;
      for (uint32_t last = ~0u; k < k_in && experts[k] >= 0 && uint32_t(experts[k]) / experts_per_node == uint32_t(n);
           ++k) {
        const uint32_t rank = uint32_t(experts[k]) / num_local_experts();
        if (rank != last) {
          const uint64_t row = uint64_t(row_base[rank]) + routing_->row_pos[uint64_t(t) * k_in + k];
          kept = row < o.recv_capacity;
          if (kept) dsts[header->num_dsts++] = {rank % w.num_local_ranks, uint32_t(row)};
          last = rank;
        }
        const int64_t row = pair_base[experts[k]] + routing_->pair_pos[uint64_t(t) * k_in + k];
        const bool fits = kept && (o.budgets[rank] < 0 || row < o.budgets[rank]);
        pairs[header->num_pairs++] = {experts[k], fits ? int32_t(row) : -1};
      }
    }
  }
}

std::vector<uint32_t> Plan::zero_ranges(uint64_t out_rows) const {
  std::vector<uint32_t> ranges;
  for (size_t i = 0; i < zero_ranges_.size(); i += 2)
    if (zero_ranges_[i] < zero_ranges_[i + 1]) ranges.insert(ranges.end(), {zero_ranges_[i], zero_ranges_[i + 1]});
  if (permuted_rows_ < out_rows) ranges.insert(ranges.end(), {uint32_t(permuted_rows_), uint32_t(out_rows)});
  return ranges;
}

PlanView Plan::view() {
  const int nodes = world().num_nodes;
  node_token_ptrs_.resize(nodes), record_ptrs_.resize(nodes), rail_record_ptrs_.resize(nodes);
  for (int n = 0; n < nodes; ++n) {
    node_token_ptrs_[n] = routing_->node_tokens[n].data();
    record_ptrs_[n] = records_[n].data();
    rail_record_ptrs_[n] = rail_records_[n].data();
  }
  PlanView v{};
  v.num_tokens = num_tokens(), v.topk = topk_, v.weight_stride = weight_stride_;
  v.node_tokens = node_token_ptrs_.data();
  v.records = record_ptrs_.data();
  v.node_count = node_count_.data();
  v.node_pos = routing_->node_pos.data();
  v.rail_count = rail_count_.data();
  v.rail_records = rail_record_ptrs_.data();
  v.recv_rows = recv_rows_;
  v.first_expert = uint32_t(world().rank) * num_local_experts();
  v.num_local_experts = num_local_experts();
  v.row_records = row_records_.data();
  v.row_weights = row_weights_.data();
  v.fresh = !complete_;
  return v;
}

}  // namespace hep
