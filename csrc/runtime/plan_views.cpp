// Views of a plan in the callers' layouts: dense and top-k weights, and the maps of the compatible handles.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "runtime/plan.h"

namespace hep {

void Plan::weights_from_dense(const float* probs, float* out) const {
  const uint32_t k_in = routing().topk;
  for (uint32_t t = 0; t < num_tokens(); ++t)
    for (uint32_t k = 0; k < weight_stride_; ++k) {
      const int32_t e = k < k_in ? routing().pair_expert[uint64_t(t) * k_in + k] : -1;
      out[uint64_t(t) * weight_stride_ + k] = e < 0 ? 0.f : probs[uint64_t(t) * num_experts() + e];
    }
}

void Plan::weights_to_dense(const float* weights, float* out) const {
  const uint32_t k_in = routing().topk;
  std::memset(out, 0, sizeof(float) * uint64_t(num_tokens()) * num_experts());
  for (uint32_t t = 0; t < num_tokens(); ++t)
    for (uint32_t k = 0; k < k_in; ++k)
      if (const int32_t e = routing().pair_expert[uint64_t(t) * k_in + k]; e >= 0)
        out[uint64_t(t) * num_experts() + e] = weights[uint64_t(t) * weight_stride_ + k];
}

namespace {
// Slot of an expert in a token's ascending list.
uint32_t find_pair(const int32_t* experts, uint32_t n, int64_t e) {
  uint32_t k = 0;
  while (k < n && experts[k] != e) ++k;
  if (k == n)
    throw std::invalid_argument(
        "topk_idx: expert " + std::to_string(e) +
        " is not in the handle's routing of this token; pass the topk_idx that the handle was made with");
  return k;
}
}  // namespace

void Plan::weights_from_topk(const int64_t* idx, uint32_t k_idx, const float* in, float* out) const {
  const uint32_t k_in = routing().topk;
  std::memset(out, 0, sizeof(float) * uint64_t(num_tokens()) * weight_stride_);
  for (uint32_t t = 0; t < num_tokens(); ++t)
    for (uint32_t i = 0; i < k_idx; ++i)
      if (const int64_t e = idx[uint64_t(t) * k_idx + i]; e >= 0)
        out[uint64_t(t) * weight_stride_ + find_pair(&routing().pair_expert[uint64_t(t) * k_in], k_in, e)] +=
            in[uint64_t(t) * k_idx + i];
}

void Plan::weights_to_topk(const int64_t* idx, uint32_t k_idx, const float* weights, float* out) const {
  const uint32_t k_in = routing().topk;
  for (uint32_t t = 0; t < num_tokens(); ++t)
    for (uint32_t i = 0; i < k_idx; ++i) {
      const int64_t e = idx[uint64_t(t) * k_idx + i];
      out[uint64_t(t) * k_idx + i] =
          e < 0
              ? 0.f
              : weights[uint64_t(t) * weight_stride_ + find_pair(&routing().pair_expert[uint64_t(t) * k_in], k_in, e)];
    }
}

uint32_t Plan::num_rail_rows() const {
  uint32_t rows = 0;
  for (int n = 0; n < world().num_nodes; ++n) rows += num_rail_tokens(n);
  return rows;
}

std::vector<uint32_t> Plan::recv_rows_per_source() const {
  std::vector<uint32_t> rows;
  uint32_t left = num_recv_rows();
  for (const uint32_t sent : source_rows_) {
    rows.push_back(std::min(left, sent));
    left -= rows.back();
  }
  return rows;
}

namespace {
template <class F>
void for_each_record(const unsigned char* records, uint32_t count, uint32_t record_bytes, F&& f) {
  for (uint32_t j = 0; j < count; ++j) {
    const auto* header = reinterpret_cast<const RecordHeader*>(records + uint64_t(j) * record_bytes);
    f(j, *header,
      reinterpret_cast<const DstEntry*>(reinterpret_cast<const unsigned char*>(header) + MessageLayout::dsts_at()));
  }
}
}  // namespace

void Plan::fill_sparse_to_dense(int32_t* out) const {
  const World& w = world();
  std::fill_n(out, uint64_t(num_rail_rows()) * w.num_local_ranks, -1);
  uint64_t first = 0;
  for (int n = 0; n < w.num_nodes; ++n) {
    const unsigned char* records = n == w.node() ? records_[n].data() : rail_records_.data() + n * rail_record_stride_;
    const uint32_t count = n == w.node() ? node_count_[n] : rail_count_[n];
    for_each_record(records, count, record_bytes_, [&](uint32_t, const RecordHeader& h, const DstEntry* dsts) {
      for (uint32_t i = 0; i < h.num_dsts; ++i)
        out[(first + h.source_token) * w.num_local_ranks + dsts[i].local_rank] = int32_t(dsts[i].row);
    });
    first += num_rail_tokens(n);
  }
}

void Plan::fill_rail_to_node(unsigned char* out) const {
  const World& w = world();
  std::memset(out, 0, num_rail_rows());
  uint64_t first = 0;
  for (int n = 0; n < w.num_nodes; ++n) {
    const unsigned char* records = n == w.node() ? records_[n].data() : rail_records_.data() + n * rail_record_stride_;
    const uint32_t count = n == w.node() ? node_count_[n] : rail_count_[n];
    for_each_record(records, count, record_bytes_,
                    [&](uint32_t, const RecordHeader& h, const DstEntry*) { out[first + h.source_token] = 1; });
    first += num_rail_tokens(n);
  }
}

void Plan::fill_node_to_rail(unsigned char* out) const {
  const World& w = world();
  for (uint32_t t = 0; t < num_tokens(); ++t)
    for (int n = 0, column = 0; n < w.num_nodes; ++n) {
      if (n == w.node()) continue;
      out[uint64_t(t) * (w.num_nodes - 1) + column++] = routing().node_pos[uint64_t(t) * w.num_nodes + n] >= 0;
    }
}

void Plan::fill_local_routing(unsigned char* out) const {
  const uint32_t experts = num_local_experts(), first = world().rank * experts;
  std::memset(out, 0, uint64_t(num_recv_rows()) * experts);
  for_each_record(
      row_records_.data(), num_recv_rows(), record_bytes_, [&](uint32_t row, const RecordHeader& h, const DstEntry*) {
        const auto* pairs = reinterpret_cast<const PairEntry*>(reinterpret_cast<const unsigned char*>(&h) + pairs_at_);
        for (uint32_t k = 0; k < h.num_pairs; ++k)
          if (const uint32_t e = uint32_t(pairs[k].expert) - first; e < experts) out[uint64_t(row) * experts + e] = 1;
      });
}

void Plan::fill_permuted_rows(int32_t* out) const {
  const uint32_t experts = num_local_experts(), first = world().rank * experts;
  std::fill_n(out, uint64_t(num_recv_rows()) * experts, -1);
  for_each_record(
      row_records_.data(), num_recv_rows(), record_bytes_, [&](uint32_t row, const RecordHeader& h, const DstEntry*) {
        const auto* pairs = reinterpret_cast<const PairEntry*>(reinterpret_cast<const unsigned char*>(&h) + pairs_at_);
        for (uint32_t k = 0; k < h.num_pairs; ++k)
          if (const uint32_t e = uint32_t(pairs[k].expert) - first; e < experts)
            out[uint64_t(row) * experts + e] = pairs[k].row;
      });
}

}  // namespace hep
