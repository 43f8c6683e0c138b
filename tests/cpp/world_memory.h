// Memory of test worlds: outputs, with an edge behind them that nobody may touch; plans; routing; buffers.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "layout/buffer.h"
#include "runtime/arena.h"
#include "runtime/engine.h"
#include "world_case.h"

namespace hep::test {

using Bytes = std::vector<unsigned char>;

// Memory that an operation may write, with an edge behind it that nobody may touch. Never null.
class Output {
 public:
  explicit Output(size_t bytes, Arena* arena = nullptr) : bytes_(bytes), own_(arena ? 0 : bytes + kEdge) {
    if (arena) lent_ = arena->take(bytes + kEdge);
    if (arena && !lent_) throw check::Failure("the arena is full");
    data_ = arena ? lent_.get() : own_.data();
    std::fill_n(data_, bytes + kEdge, kUntouched);
  }
  static size_t size_in_arena(size_t bytes) { return align_up(bytes + kEdge, Arena::kAlignment); }
  unsigned char* data() { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }
  bool edge_is_intact() const {
    return std::all_of(data_ + bytes_, data_ + bytes_ + kEdge, [](unsigned char b) { return b == kUntouched; });
  }
  // Keeps the block, and says what is in it.
  std::pair<std::shared_ptr<unsigned char>, Bytes> keep() const { return {lent_, {data_, data_ + bytes_}}; }

 private:
  static constexpr unsigned char kUntouched = 0xab;
  static constexpr size_t kEdge = 64;
  size_t bytes_;
  Bytes own_;
  std::shared_ptr<unsigned char> lent_;
  unsigned char* data_;
};

// Memory of a plan: 128-byte aligned, full of ones.
class PlanBlock {
 public:
  explicit PlanBlock(uint64_t bytes) : bytes_(bytes + 128, 0xff) {}
  unsigned char* data() { return reinterpret_cast<unsigned char*>(align_up(uint64_t(bytes_.data()), 128)); }

 private:
  Bytes bytes_;
};

// Rank r's routing: its experts as the case has them, or, where that says dense, a map of them.
struct RoutingMemory {
  RoutingMemory(const WorldCase& w, const RoutingCase& c, const Reference& ref, size_t r) {
    in.num_tokens = c.num_tokens[r];
    in.topk = c.topk[r];
    static constexpr int64_t kNothing = 0;
    in.topk_idx = c.topk_idx[r].empty() ? &kNothing : c.topk_idx[r].data();
    in.weights = c.weights[r].data();
    if (!c.dense) return;
    map.resize(size_t(c.num_tokens[r]) * w.num_experts + 1);
    probs.resize(map.size());
    for (uint32_t t = 0; t < c.num_tokens[r]; ++t)
      for (const auto& [expert, weight] : ref.pairs[r][t]) {
        map[size_t(t) * w.num_experts + size_t(expert)] = 1;
        probs[size_t(t) * w.num_experts + size_t(expert)] = weight;
      }
    in.topk_idx = nullptr;
    in.routing_map = map.data();
    in.weights = probs.data();
  }
  RoutingMemory(const RoutingMemory&) = delete;
  Bytes map;
  std::vector<float> probs;
  RoutingInput in;
};

// The smallest buffer that the case fits into.
inline BufferShape shape_of(const WorldCase& w, const std::vector<Reference>& references) {
  BufferShape s;
  s.num_nodes = w.num_nodes;
  s.num_local_ranks = w.num_local_ranks;
  s.num_experts = w.num_experts;
  s.chunk_tokens = w.chunk_tokens;
  s.rail_slots = w.rail_slots;
  for (const Reference& ref : references) {
    for (const auto& tokens : ref.pairs) s.max_tokens = std::max<uint64_t>(s.max_tokens, tokens.size());
    s.max_topk = std::max(s.max_topk, ref.widest());
    for (const auto& rows : ref.received) s.recv_rows = std::max<uint64_t>(s.recv_rows, rows.size());
  }
  if (w.latency) s.latency_tokens = s.max_tokens;
  for (const OpCase& op : w.ops) {
    if (!op.combine) {
      s.row_bytes = std::max(s.row_bytes, op.row_bytes);
      s.scale_bytes = std::max(s.scale_bytes, op.scale_bytes);
    }
    if (op.combine)
      s.partial_row_bytes =
          std::max(s.partial_row_bytes, op.hidden * dtype_bytes(op.fp32_partials ? DType::kFp32 : op.dtype));
    const Reference& ref = references[op.plan];
    uint64_t rows = 0;
    for (uint32_t r = 0; r < w.num_ranks(); ++r)
      rows = std::max<uint64_t>(
          rows, op.permute ? std::max<uint64_t>(ref.permuted[r].size(), w.plans[op.plan].budgets[r].value_or(0)) +
                                 op.extra_rows
                           : ref.received[r].size());
    if (w.latency && !op.permute) rows = s.recv_rows;
    s.arena_bytes += Output::size_in_arena(rows * (op.combine ? op.hidden * dtype_bytes(op.dtype) : op.row_bytes));
    if (!op.combine) s.arena_bytes += Output::size_in_arena(rows * op.scale_bytes);
  }
  return s;
}

}  // namespace hep::test
