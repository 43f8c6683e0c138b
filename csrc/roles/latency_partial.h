// Latency combine, the sending half: the sum of this rank's experts for every token that came here, rounded, in lines
// to the token's slot in the slab of this rank at its source. It waits for nobody. Behind the payload travel the
// weights (or their gradients) of the token's pairs, as in a partial row of the throughput path.
#pragma once
#include "roles/latency_params.h"
#include "roles/word_sum.h"

namespace hep {

template <Arch A, class In, class P>
struct LatencyPartialRole {
  using Sum = WordSum<A, In, P>;

  A& a;
  const LatencyCombineParams& p;
  const uint64_t flag;
  const LinePart<A> part;
  uint64_t node_rows = 0, self_rows = 0;

  HEP_DEVICE LatencyPartialRole(A& arch, const LatencyCombineParams& params, uint64_t step)
      : a(arch), p(params), flag(step), part(arch) {}

  // By all lanes of a warp.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    a.set_role("latency_partial");
    const uint32_t rows = p.plan.numbers->recv_rows;
    for (uint32_t i = worker; i < rows; i += workers) send(i);
    if (a.lane() != 0) return;
    const uint64_t bytes = p.lines() * sizeof(Line);
    a.count_rank(&p.traffic->node_rows, node_rows);
    a.count_rank(&p.traffic->node_bytes, node_rows * bytes);
    a.count_rank(&p.traffic->self_rows, self_rows);
    a.count_rank(&p.traffic->self_bytes, self_rows * bytes);
  }

 private:
  HEP_DEVICE void send(uint32_t row) {
    const auto& rec = *reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(row) * p.record_bytes);
    const auto* pairs = reinterpret_cast<const PairEntry*>(reinterpret_cast<const unsigned char*>(&rec) + p.pairs_at);
    const int source = int(rec.source_rank);
    source == p.world.rank ? ++self_rows : ++node_rows;
    const uint32_t n = p.lines(), payload = p.partial.payload_bytes / 8, all = p.partial.row_bytes() / 8;
    Line* lines = p.link.slot(flag, source, p.world.rank, rec.source_token);
    for (uint32_t line = part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      sum(words, line, payload, row, rec, pairs);
      part.each_word(line, [&](uint32_t i, uint32_t m) {
        if (m < payload || m >= all) return;
        const uint32_t slot = 2 * (m - payload);
        words[i] = uint64_t(std::bit_cast<uint32_t>(weight(rec, pairs, row, slot + 1))) << 32 |
                   std::bit_cast<uint32_t>(weight(rec, pairs, row, slot));
      });
      a.st_line(line < n ? lines + line : nullptr, words, flag);
    }
  }
  HEP_DEVICE void sum(uint64_t* words, uint32_t line, uint32_t payload, uint32_t row, const RecordHeader& rec,
                      const PairEntry* pairs) {
    Sum sums[A::kLineWords];
    const uint64_t row_bytes = uint64_t(p.hidden) * sizeof(In);
    bool any = !p.permuted;
    for (uint32_t k = 0; p.permuted && k < rec.num_pairs; ++k) any |= p.plan.has_row(pairs[k]);
    HEP_UNROLL
    for (Sum& s : sums) s.begin(!any);
    const auto add = [&](uint64_t from, float scale) {
      part.each_word(line, [&](uint32_t i, uint32_t m) {
        if (m < payload) sums[i].add(a, p.x + from * row_bytes, m, p.multiply, scale);
      });
    };
    const float* weights = p.plan.row_weights + uint64_t(row) * p.plan.weight_stride + rec.first_pair;
    if (!p.permuted) add(row, 1.f);
    for (uint32_t k = 0; p.permuted && k < rec.num_pairs; ++k)
      if (p.plan.has_row(pairs[k])) add(uint64_t(pairs[k].row), p.multiply ? weights[k] : 1.f);
    part.each_word(line, [&](uint32_t i, uint32_t m) {
      if (m < payload) words[i] = sums[i].partial();
    });
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
