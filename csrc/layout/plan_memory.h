// The memory of a plan, which the host does not read on a GPU: where each of its arrays lies. Most are known in size
// before the counts are, and share a block. What arriving tokens tell ("learned") comes last: of the worst-case size in
// the same block where nobody waits for the counts, else in a block of its own, of the right one.
#pragma once
#include "layout/counts.h"
#include "layout/message.h"

namespace hep {

struct PlanMemory {
  static constexpr uint32_t kNumbersBytes = 32;

  MessageLayout message;  // of records; no payload
  uint32_t weight_stride = 0;
  uint64_t numbers = 0;  // PlanNumbers
  uint64_t pair_expert = 0, pair_weight = 0, pair_pos = 0, row_pos = 0, node_pos = 0, node_tokens = 0;
  uint64_t node_count = 0, rail_count = 0, tokens_per_expert = 0, padded_tokens_per_expert = 0, zero_ranges = 0;
  uint64_t dropped = 0, rank_rows = 0, source_rows = 0;
  uint64_t record_table = 0, token_table = 0;
  uint64_t records = 0;
  uint64_t rail_records = 0, rail_record_stride = 0, row_records = 0, row_weights = 0;
  uint64_t total = 0;

  // tokens: of this rank. Without what is learned.
  static PlanMemory make(const World& w, const CountsLayout& c, uint64_t tokens, uint32_t topk) {
    PlanMemory m;
    m.message = MessageLayout::make(w, topk, true, 0, 0);
    m.weight_stride = m.message.weight_bytes / 4;
    const uint64_t N = c.num_nodes, R = c.num_ranks, Er = c.num_experts / R, record = m.message.record_bytes;
    m.numbers = m.add(kNumbersBytes);
    m.tokens_per_expert = m.add(8 * Er);
    m.padded_tokens_per_expert = m.add(8 * Er);
    m.pair_expert = m.add(4 * tokens * topk);
    m.pair_weight = m.add(4 * tokens * m.weight_stride);
    m.pair_pos = m.add(4 * tokens * topk);
    m.row_pos = m.add(4 * tokens * topk);
    m.node_pos = m.add(4 * tokens * N);
    m.node_tokens = m.add(4 * tokens * N);
    m.node_count = m.add(4 * N);
    m.rail_count = m.add(4 * N);
    m.zero_ranges = m.add(8 * Er);
    m.dropped = m.add(8 * R);
    m.rank_rows = m.add(4 * R);
    m.source_rows = m.add(4 * R);
    m.record_table = m.add(8 * N);
    m.token_table = m.add(8 * N);
    m.records = m.add(N * tokens * record);
    return m;
  }
  // From the current end on, or, with begin = 0, in a block of their own. rail_tokens: of any rail peer at most.
  void add_learned(uint32_t num_nodes, uint64_t rail_tokens, uint64_t recv_rows) {
    rail_record_stride = align_up(rail_tokens * message.record_bytes, 128);
    rail_records = add(num_nodes > 1 ? num_nodes * rail_record_stride : 0);
    row_records = add(recv_rows * message.record_bytes);
    row_weights = add(recv_rows * 4 * weight_stride);
  }

 private:
  uint64_t add(uint64_t bytes) {
    const uint64_t at = total;
    total = align_up(total + bytes, 128);
    return at;
  }
};

}  // namespace hep
