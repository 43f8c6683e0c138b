// Latency combine, the receiving half: the partials of this rank's own tokens, by ascending rank, each line of the sum
// when the ranks' lines for it have come.
#pragma once
#include "roles/latency_rows.h"
#include "roles/line_sum.h"

namespace hep {

template <Arch A, class In, class P>
struct LatencySumRole {
  A& a;
  const LatencyCombineParams& p;
  const uint64_t flag;
  const LinePart<A> part;
  std::byte* const scratch;

  HEP_DEVICE LatencySumRole(A& arch, const LatencyCombineParams& params, uint64_t step, std::byte* of_warp)
      : a(arch), p(params), flag(step), part(arch), scratch(of_warp) {}

  // By all lanes of a warp.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    a.set_role(Role::kLatencySum);
    const auto share = LineShare<A>::of(p.plan.num_tokens, p.lines(), workers, 1, TileMath<A>::kReadsRows);
    for (uint32_t i = worker; i < share.count(); i += workers)
      if (const uint32_t first = share.first(i); first < p.lines())
        token(share.row(i), first, share.end(first, p.lines()));
  }

 private:
  // Lines [first, n) of its sum.
  HEP_DEVICE void token(uint32_t t, uint32_t first, uint32_t n) {
    const int32_t at = p.plan.node_pos[uint64_t(t) * uint32_t(p.world.num_nodes) + uint32_t(p.world.node())];
    const unsigned char* record = p.plan.records[p.world.node()] + uint64_t(at < 0 ? 0 : at) * p.record_bytes;
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
    const uint32_t num_dsts = at < 0 ? 0 : reinterpret_cast<const RecordHeader*>(record)->num_dsts;
    if constexpr (TileMath<A>::kReadsRows) return sum_whole(t, dsts, num_dsts);
    for (uint32_t line = first + part.group; line - part.group < n; line += part.kAtOnce)
      sum(t, line, n, dsts, num_dsts);
  }
  // Each partial row is put together from its lines, then added as a whole: arithmetic on tiles is several times as
  // fast there as on what one line has.
  HEP_DEVICE void sum_whole(uint32_t t, const DstEntry* dsts, uint32_t num_dsts) {
    LatencyRows<A> rows(p, scratch);
    if (num_dsts == 0) return rows.add_partial(t, 0, 0);
    const uint32_t n = p.lines(), all = p.partial.row_bytes() / 8;
    for (uint32_t d = 0; d < num_dsts; ++d) {
      const int rank = int(dsts[d].local_rank);
      const Line* from = p.link.slot(flag, p.world.rank, rank, t);
      for (uint32_t line = part.group; line - part.group < n; line += part.kAtOnce) {
        uint64_t words[A::kLineWords];
        p.link.wait(a, line < n ? from + line : nullptr, flag, words, {Site::kLatencyRow, rank, int64_t(t)});
        std::memcpy(rows.row + 8 * part.word(line), words, 8 * part.count(line, all));
      }
      rows.add_partial(t, d, num_dsts);
    }
  }
  HEP_DEVICE void sum(uint32_t t, uint32_t line, uint32_t n, const DstEntry* dsts, uint32_t num_dsts) {
    const uint32_t payload = p.partial.payload_bytes / 8, all = p.partial.row_bytes() / 8, m = part.word(line);
    const uint32_t of_row = part.count(line, payload), both = part.count(line, all);
    LineSum<A, In, P> sums;
    LineSum<A, float, float> weights;  // of the words behind the payload
    sums.begin(num_dsts == 0);
    if (both > of_row) weights.begin(num_dsts == 0);
    for (uint32_t d = 0; d < num_dsts; ++d) {
      const int rank = int(dsts[d].local_rank);
      const Line* from = p.link.slot(flag, p.world.rank, rank, t) + line;
      uint64_t words[A::kLineWords] = {};
      p.link.wait(a, line < n ? from : nullptr, flag, words, {Site::kLatencyRow, rank, int64_t(t)});
      if (of_row) sums.add(words);
      if (both > of_row) weights.add(words);
    }
    sums.store(a, p.out_x + uint64_t(t) * p.hidden * sizeof(In), m, of_row);
    if (both == of_row) return;
    uint64_t words[A::kLineWords];
    weights.round_into(words);
    auto* slots = reinterpret_cast<uint64_t*>(p.out_weights + uint64_t(t) * p.plan.weight_stride);
    part.each_word(line, [&](uint32_t i, uint32_t word) {
      if (word >= payload && word < all) a.st_global(slots + (word - payload), words[i]);
    });
  }
};

}  // namespace hep
