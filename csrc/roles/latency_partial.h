// Latency combine, the sending half: the sum of this rank's experts for every token that came here, rounded, in lines
// to the token's slot in the slab of this rank at its source; for a source on another node, at the rank of this node
// that shares its rail, in the slab of that node's rank with this one's local number. It waits for nobody. Behind the
// payload travel the weights (or their gradients) of the token's pairs, as in a partial row of the throughput path.
#pragma once
#include "pipeline/side_by_side.h"
#include "roles/latency_rows.h"
#include "roles/line_sum.h"

namespace hep {

template <Arch A, class Net, class In, class P>
struct LatencyPartialRole {
  A& a;
  const LatencyCombineParams& p;
  const uint64_t flag;
  const LinePart<A> part;
  std::byte* const scratch;
  LineTraffic traffic;

  HEP_DEVICE LatencyPartialRole(A& arch, const LatencyCombineParams& params, uint64_t step, std::byte* of_warp)
      : a(arch), p(params), flag(step), part(arch), scratch(of_warp) {}

  // By all lanes of a warp.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    a.set_role(Role::kLatencyPartial);
    const uint32_t rows = p.plan.numbers->recv_rows;
    const auto order = SideBySide::of(rows, uint32_t(p.world.num_ranks()));
    const auto share = LineShare<A>::of(order.count(), p.lines(), workers, 1, TileMath<A>::kReadsRows);
    for (uint32_t i = worker; i < share.count(); i += workers)
      if (const uint32_t first = share.first(i), row = order.row(share.row(i)); first < p.lines() && row < rows)
        send(row, first, share.end(first, p.lines()));
    traffic.report(a, p.traffic, p.lines(), 0);
  }

 private:
  // Lines [first, n) of it.
  HEP_DEVICE void send(uint32_t row, uint32_t first, uint32_t n) {
    const auto& rec = *reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(row) * p.record_bytes);
    const auto* pairs = p.pairs_of(&rec);
    const int source = int(rec.source_rank);
    const int owner = p.link.template owner<Net>(source);
    if (first == 0) traffic.add(owner == p.link.template own<Net>());
    const uint32_t all = p.partial.row_bytes() / 8;
    Line* lines = p.link.slot(flag, owner, p.link.template name_for<Net>(source), rec.source_token);
    if constexpr (TileMath<A>::kReadsRows) sum_whole(row, rec, pairs);
    for (uint32_t line = first + part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      if constexpr (TileMath<A>::kReadsRows)
        std::memcpy(words, scratch + 8 * part.word(line), 8 * part.count(line, all));
      else
        fill(words, line, row, rec, pairs);
      a.st_line(line < n ? lines + line : nullptr, words, flag);
    }
  }
  HEP_DEVICE void sum_whole(uint32_t row, const RecordHeader& rec, const PairEntry* pairs) {
    LatencyRows<A> rows(p, scratch);
    uint32_t num_rows = p.permuted ? 0 : 1;
    for (uint32_t k = 0; p.permuted && k < rec.num_pairs; ++k) num_rows += p.plan.has_row(pairs[k]);
    rows.sum_experts(num_rows, [&](auto&& add) { each_row(row, rec, pairs, add); });
    auto* weights = reinterpret_cast<uint64_t*>(rows.row + p.partial.weights_at());
    for (uint32_t i = 0; i < p.partial.weight_bytes / 8; ++i) weights[i] = this->weights(rec, pairs, row, 2 * i);
  }
  HEP_DEVICE void fill(uint64_t (&words)[A::kLineWords], uint32_t line, uint32_t row, const RecordHeader& rec,
                       const PairEntry* pairs) {
    const uint32_t payload = p.partial.payload_bytes / 8, all = p.partial.row_bytes() / 8;
    if (part.count(line, payload)) sum(words, line, payload, row, rec, pairs);
    if (part.word(line) + A::kLineWords <= payload) return;
    part.each_word(line, [&](uint32_t i, uint32_t m) {
      if (m >= payload) words[i] = m < all ? weights(rec, pairs, row, 2 * (m - payload)) : 0;
    });
  }
  // Rows of this rank's experts for a receive row, and their scales.
  template <class F>
  HEP_DEVICE void each_row(uint32_t row, const RecordHeader& rec, const PairEntry* pairs, F&& f) {
    const uint64_t row_bytes = uint64_t(p.hidden) * sizeof(In);
    const float* scales = p.plan.row_weights + uint64_t(row) * p.plan.weight_stride + rec.first_pair;
    if (!p.permuted) f(p.x + row * row_bytes, 1.f);
    for (uint32_t k = 0; p.permuted && k < rec.num_pairs; ++k)
      if (p.plan.has_row(pairs[k])) f(p.x + uint64_t(pairs[k].row) * row_bytes, p.multiply ? scales[k] : 1.f);
  }
  HEP_DEVICE void sum(uint64_t (&words)[A::kLineWords], uint32_t line, uint32_t payload, uint32_t row,
                      const RecordHeader& rec, const PairEntry* pairs) {
    LineSum<A, In, P> sums;
    const uint32_t m = part.word(line), n = part.count(line, payload);
    bool any = !p.permuted;
    for (uint32_t k = 0; p.permuted && k < rec.num_pairs; ++k) any |= p.plan.has_row(pairs[k]);
    sums.begin(!any);
    each_row(row, rec, pairs,
             [&](const unsigned char* x, float scale) { sums.add_row(a, x, m, n, p.multiply, scale); });
    sums.round_into(words);
  }
  // A word of them: of the slot-th pair and the next.
  HEP_DEVICE uint64_t weights(const RecordHeader& rec, const PairEntry* pairs, uint32_t row, uint32_t slot) const {
    return uint64_t(std::bit_cast<uint32_t>(weight(rec, pairs, row, slot + 1))) << 32 |
           std::bit_cast<uint32_t>(weight(rec, pairs, row, slot));
  }
  // Of the token's slot-th pair, where it is one of this node's and has a row.
  HEP_DEVICE float weight(const RecordHeader& rec, const PairEntry* pairs, uint32_t row, uint32_t slot) const {
    const uint32_t k = slot - rec.first_pair;
    if (k >= rec.num_pairs) return 0;
    if (!p.permuted)
      return p.x_weights[uint64_t(row) * p.num_node_experts + uint32_t(pairs[k].expert) - p.first_node_expert];
    return p.plan.has_row(pairs[k]) ? p.x_weights[pairs[k].row] : 0;
  }
};

}  // namespace hep
