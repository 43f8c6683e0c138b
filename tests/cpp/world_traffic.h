// What an operation of a test world must count as traffic of one rank, from the routing alone.
#pragma once
#include <algorithm>

#include "layout/line.h"
#include "layout/message.h"
#include "roles/exchange_params.h"
#include "runtime/plan.h"
#include "world_case.h"

namespace hep::test {

struct WorldTraffic {
  using Token = Reference::Token;
  const WorldCase& w;
  const Reference& ref;
  const Plan& plan;
  const int rank;

  // Every token crosses a link once per node; how often within its last node is up to where it lands or how it is read.
  TrafficCounters of(const OpCase& op) const {
    const World shape = plan.world();
    TrafficCounters c{};
    uint64_t node = 0, self = 0;  // rows as they are moved
    for (int n = 0; n < shape.num_nodes; ++n) {
      const int peer = shape.rail_peer(n);
      for (uint32_t t = 0; t < num_tokens(peer); ++t) {
        if (n != shape.node() && op.combine) c.rail_rows += ref.needs({peer, t}, shape.node());
        for (int l = 0; l < shape.num_local_ranks; ++l) {
          const int d = shape.rank_of(shape.node(), l);
          if (!ref.arrives({peer, t}, d)) continue;
          (d == rank ? self : node) += times_moved(op, {peer, t}, d);
          ++(d == rank ? c.self_rows : c.node_rows);
        }
      }
      if (n == shape.node() || op.combine) continue;
      for (uint32_t t = 0; t < num_tokens(rank); ++t) c.rail_rows += ref.needs({rank, t}, n);
    }
    for (const Token t : ref.received[size_t(rank)]) {
      c.partial_rows += op.combine && forms_partial(op, t);
      c.copied_rows += op.combine ? 0 : times_copied(op, t);
    }
    const uint64_t weights = op.weights ? plan.weight_stride() * 4 : 0;  // once: however often the row moves
    const uint64_t once = op.combine ? weights : message(op).metadata_bytes();
    const uint64_t row = op.combine ? partial_bytes(op) - weights : op.row_bytes + op.scale_bytes;
    c.rail_bytes = c.rail_rows * (row + once);
    c.node_bytes = node * row + c.node_rows * once;
    c.self_bytes = self * row + c.self_rows * once;
    c.copied_bytes = c.copied_rows * row;
    return c;
  }

  // A row crosses NVLink once, from its sender or who hands it on in a dispatch, from its owner in a combine, in whole
  // lines, and the rail once a node, as plain bytes. Of a plan's first
  // dispatch nobody knows yet what finds no room.
  TrafficCounters by_lines(const OpCase& op, bool fresh) const {
    TrafficCounters c{};
    const World shape = plan.world();
    if (op.combine)  // to its source, or to who sums this node's rows for it
      for (const Token t : ref.received[size_t(rank)])
        ++(t.rank % shape.num_local_ranks == shape.local_rank() ? c.self_rows : c.node_rows);
    for (int n = 0; n < shape.num_nodes; ++n) {  // of this rail: its own, or handed on
      const int peer = shape.rail_peer(n);
      for (uint32_t t = 0; t < num_tokens(peer) && !op.combine; ++t)
        for (int l = 0; l < shape.num_local_ranks; ++l) {
          const int d = shape.rank_of(shape.node(), l);
          (d == rank ? c.self_rows : c.node_rows) += fresh ? ref.needs_rank({peer, t}, d) : ref.arrives({peer, t}, d);
        }
      if (n == shape.node()) continue;
      for (uint32_t t = 0; t < num_tokens(peer) && op.combine; ++t) c.rail_rows += ref.needs({peer, t}, shape.node());
      for (uint32_t t = 0; t < num_tokens(rank) && !op.combine; ++t) c.rail_rows += ref.needs({rank, t}, n);
    }
    c.rail_bytes = c.rail_rows * (op.combine ? partial_bytes(op) : message(op).token_bytes());
    const uint64_t bytes = sizeof(Line) * Line::lines_of(op.combine ? partial_bytes(op) : message(op).token_bytes());
    c.node_bytes = c.node_rows * bytes;
    c.self_bytes = c.self_rows * bytes;
    return c;
  }

 private:
  uint32_t num_tokens(int r) const { return uint32_t(ref.pairs[size_t(r)].size()); }
  MessageLayout message(const OpCase& op) const {
    return MessageLayout::make(plan.world(), plan.topk(), op.weights, op.scale_bytes, op.row_bytes);
  }
  uint64_t partial_bytes(const OpCase& op) const {
    return op.hidden * dtype_bytes(op.fp32_partials ? DType::kFp32 : op.dtype) +
           (op.weights ? plan.weight_stride() * 4 : 0);
  }
  uint64_t pairs_with_row(Token t, int d) const {
    return uint64_t(std::ranges::count_if(ref.pairs_of(t), [&](const auto& pair) {
      return ref.rank_of(pair.first) == d && ref.computes(t, pair.first);
    }));
  }
  // How rank d's rows are read by a combine.
  static bool in_place(const OpCase& op, int d) {
    return op.landed[size_t(d)] != Landed::kAside && !op.multiply && (!op.fp32_partials || op.dtype == DType::kFp32);
  }
  bool every_pair(const OpCase& op, int d) const {
    return w.executor == "host" && op.landed[size_t(d)] == Landed::kEveryPair;
  }
  bool forms_partial(const OpCase& op, Token t) const {
    if (!in_place(op, rank)) return true;
    const uint64_t pairs = pairs_with_row(t, rank);
    return op.permute && (every_pair(op, rank) ? pairs == 0 : pairs != 1);
  }
  // How often the row of a token that came to rank d is stored there by the rank that has it, or read there.
  uint64_t times_moved(const OpCase& op, Token t, int d) const {
    const Landed landed = op.landed[size_t(d)];
    if (!op.permute || landed == Landed::kAside) return 1;
    const uint64_t pairs = pairs_with_row(t, d);
    if (op.combine) return in_place(op, d) && every_pair(op, d) ? std::max<uint64_t>(pairs, 1) : 1;
    return landed == Landed::kFirstPair ? std::min<uint64_t>(pairs, 1) : pairs;
  }
  // By this rank, to where its caller reads the row.
  uint64_t times_copied(const OpCase& op, Token t) const {
    const uint64_t rows = op.permute ? pairs_with_row(t, rank) : 1;
    if (op.landed[size_t(rank)] == Landed::kAside) return rows;
    return op.landed[size_t(rank)] == Landed::kFirstPair && op.permute && rows ? rows - 1 : 0;
  }
};

}  // namespace hep::test
