// What the counters of a rank must have gone up by after one operation of a world case, from its routing alone.
#pragma once
#include <algorithm>

#include "roles/exchange_params.h"
#include "runtime/plan.h"
#include "world_case.h"

namespace hep::test {

class OperationTraffic {
 public:
  OperationTraffic(const WorldCase& w, const Reference& ref, const OpCase& op, int rank)
      : ref_(ref),
        op_(op),
        rank_(rank),
        shape_{int32_t(w.num_nodes), int32_t(w.num_local_ranks), rank},
        reads_every_pair_(w.executor == "host") {}

  // Every token crosses a link once per node; how often within its last node is up to where it lands or how it is read.
  TrafficCounters expected(const Plan& plan) const {
    uint64_t rail = 0, node = 0, self = 0;
    TrafficCounters c{};
    for (int n = 0; n < shape_.num_nodes; ++n) {
      const int peer = shape_.rail_peer(n);
      for (uint32_t t = 0; t < num_tokens(peer); ++t) {
        if (n != shape_.node() && op_.combine) rail += ref_.needs({peer, t}, shape_.node());
        for (int l = 0; l < shape_.num_local_ranks; ++l) {
          const int d = shape_.rank_of(shape_.node(), l);
          if (!ref_.arrives({peer, t}, d)) continue;
          (d == rank_ ? self : node) += times_moved({peer, t}, d);
          ++(d == rank_ ? c.self_rows : c.node_rows);
        }
      }
      if (n == shape_.node() || op_.combine) continue;
      for (uint32_t t = 0; t < num_tokens(rank_); ++t) rail += ref_.needs({rank_, t}, n);
    }
    for (const Token t : ref_.received[size_t(rank_)]) {
      c.partial_rows += op_.combine && forms_partial(t);
      c.copied_rows += op_.combine ? 0 : times_copied(t);
    }
    uint64_t row = op_.row_bytes + op_.scale_bytes, once = 0;  // once: of a token's bytes, however often its row moves
    if (op_.combine) {
      row = op_.hidden * dtype_bytes(op_.fp32_partials ? DType::kFp32 : op_.dtype);
      once = op_.weights ? plan.weight_stride() * 4 : 0;
    } else {
      once = MessageLayout::make(shape_, plan.topk(), op_.weights, op_.scale_bytes, op_.row_bytes).metadata_bytes();
    }
    c.rail_rows = rail;
    c.rail_bytes = rail * (row + once);
    c.node_bytes = node * row + c.node_rows * once;
    c.self_bytes = self * row + c.self_rows * once;
    c.copied_bytes = c.copied_rows * row;
    return c;
  }

 private:
  using Token = Reference::Token;

  uint32_t num_tokens(int rank) const { return uint32_t(ref_.pairs[size_t(rank)].size()); }
  uint64_t pairs_with_row(Token t, int d) const {
    return uint64_t(std::ranges::count_if(ref_.pairs_of(t), [&](const auto& pair) {
      return ref_.rank_of(pair.first) == d && ref_.computes(t, pair.first);
    }));
  }
  // How rank d's rows are read by a combine.
  bool in_place(int d) const {
    return op_.landed[size_t(d)] != Landed::kAside && !op_.multiply &&
           (!op_.fp32_partials || op_.dtype == DType::kFp32);
  }
  bool every_pair(int d) const { return reads_every_pair_ && op_.landed[size_t(d)] == Landed::kEveryPair; }
  bool forms_partial(Token t) const {
    if (!in_place(rank_)) return true;
    const uint64_t pairs = pairs_with_row(t, rank_);
    return op_.permute && (every_pair(rank_) ? pairs == 0 : pairs != 1);
  }
  // How often the row of a token that came to rank d is stored there by the rank that has it, or read there.
  uint64_t times_moved(Token t, int d) const {
    const Landed landed = op_.landed[size_t(d)];
    if (!op_.permute || landed == Landed::kAside) return 1;
    const uint64_t pairs = pairs_with_row(t, d);
    if (op_.combine) return in_place(d) && every_pair(d) ? std::max<uint64_t>(pairs, 1) : 1;
    return landed == Landed::kFirstPair ? std::min<uint64_t>(pairs, 1) : pairs;
  }
  // By this rank, to where its caller reads the row.
  uint64_t times_copied(Token t) const {
    const uint64_t rows = op_.permute ? pairs_with_row(t, rank_) : 1;
    if (op_.landed[size_t(rank_)] == Landed::kAside) return rows;
    return op_.landed[size_t(rank_)] == Landed::kFirstPair && op_.permute && rows ? rows - 1 : 0;
  }

  const Reference& ref_;
  const OpCase& op_;
  const int rank_;
  const World shape_;
  const bool reads_every_pair_;
};

}  // namespace hep::test
