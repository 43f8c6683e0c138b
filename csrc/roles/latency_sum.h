// Latency combine, the receiving half: the partials of this rank's own tokens, by ascending rank of its node, then the
// sums of other nodes, ascending, each line of the sum when the ranks' lines for it have come.
#pragma once
#include "roles/latency_rows.h"
#include "roles/line_sum.h"

namespace hep {

template <Arch A, Transport<A> Net, class In, class P>
struct LatencySumRole {
  A& a;
  Net& net;
  const LatencyCombineParams& p;
  const uint64_t flag;
  const LinePart<A> part;
  std::byte* const scratch;

  HEP_DEVICE LatencySumRole(A& arch, Net& n, const LatencyCombineParams& params, uint64_t step, std::byte* of_warp)
      : a(arch), net(n), p(params), flag(step), part(arch), scratch(of_warp) {}

  // By all lanes of a warp.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    a.set_role(Role::kLatencySum);
    const auto share = LineShare<A>::of(p.plan.num_tokens, p.lines(), workers, 1, TileMath<A>::kReadsRows);
    for (uint32_t i = worker; i < share.count(); i += workers)
      if (const uint32_t first = share.first(i); first < p.lines())
        token(share.row(i), first, share.end(first, p.lines()));
  }

 private:
  // What there is to add up for a token.
  struct Rows {
    uint32_t token, num_dsts, num_sums;
    const DstEntry* dsts;  // of its own node
  };
  HEP_DEVICE int32_t position(uint32_t t, int node) const {
    return p.plan.node_pos[kHasRail<Net> ? uint64_t(t) * uint32_t(p.world.num_nodes) + uint32_t(node) : t];
  }
  // Lines [first, n) of its sum.
  HEP_DEVICE void token(uint32_t t, uint32_t first, uint32_t n) {
    const int own = kHasRail<Net> ? p.world.node() : 0;
    const int32_t at = position(t, own);
    const unsigned char* record = p.plan.records[own] + uint64_t(at < 0 ? 0 : at) * p.record_bytes;
    const uint32_t num_dsts = at < 0 ? 0 : reinterpret_cast<const RecordHeader*>(record)->num_dsts;
    Rows rows{t, num_dsts, 0, reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at())};
    each_sum(t, [&](int, uint32_t) { ++rows.num_sums; });
    if constexpr (TileMath<A>::kReadsRows) return sum_whole(rows);
    each_sum(t, [&](int node, uint32_t j) { (void)p.link.rail.await_token(a, net, flag, node, j); });  // once a share
    for (uint32_t line = first + part.group; line - part.group < n; line += part.kAtOnce) sum(rows, line, n);
  }
  // f(node, the token's position among those for it) for every other node that has a sum.
  template <class F>
  HEP_DEVICE void each_sum(uint32_t t, F&& f) const {
    if (!kHasRail<Net> || injected(Bug::kOtherNodesForgotten)) return;
    for (int node = 0; node < p.world.num_nodes; ++node)
      if (const int32_t at = node == p.world.node() ? -1 : position(t, node); at >= 0) f(node, uint32_t(at));
  }
  // Each partial row is put together from its lines, then added as a whole: arithmetic on tiles is several times as
  // fast there as on what one line has.
  HEP_DEVICE void sum_whole(const Rows& r) {
    LatencyRows<A> rows(p, scratch);
    const auto sum = rows.of_token(r.token);
    const uint32_t all = r.num_dsts + r.num_sums;
    if (all == 0) return rows.add_partial(sum, rows.row, 0, 0);
    uint32_t i = 0;
    for (uint32_t d = 0; d < r.num_dsts; ++d)
      rows.add_partial(sum, rows.assemble(a, part, flag, p.world.node(), int(r.dsts[d].local_rank), r.token), i++, all);
    each_sum(r.token, [&](int node, uint32_t at) {
      rows.add_partial(sum, p.link.rail.await_token(a, net, flag, node, at), i++, all);
    });
  }
  HEP_DEVICE void sum(const Rows& r, uint32_t line, uint32_t n) {
    const uint32_t payload = p.partial.payload_bytes / 8, all = p.partial.row_bytes() / 8, m = part.word(line);
    const uint32_t of_row = part.count(line, payload), both = part.count(line, all);
    LineSum<A, In, P> sums;
    LineSum<A, float, float> weights;  // of the words behind the payload
    sums.begin(r.num_dsts + r.num_sums == 0);
    if (both > of_row) weights.begin(r.num_dsts + r.num_sums == 0);
    const auto add = [&](const uint64_t (&words)[A::kLineWords]) {
      if (of_row) sums.add(words);
      if (both > of_row) weights.add(words);
    };
    for (uint32_t d = 0; d < r.num_dsts; ++d) {
      const int rank = p.link.template rank_of<Net>(int(r.dsts[d].local_rank));
      const Line* from = p.link.slot(flag, p.link.template own<Net>(), rank, r.token) + line;
      uint64_t words[A::kLineWords] = {};
      p.link.wait(a, line < n ? from : nullptr, flag, words, {Site::kLatencyRow, rank, int64_t(r.token)});
      add(words);
    }
    each_sum(r.token, [&](int node, uint32_t at) {
      const auto* from = reinterpret_cast<const uint64_t*>(p.link.rail.came(flag, node, at));
      uint64_t words[A::kLineWords] = {};
      part.each_word(line, [&](uint32_t i, uint32_t w) { words[i] = line < n && w < all ? a.ld_global(from + w) : 0; });
      add(words);
    });
    sums.store(a, p.out_x + uint64_t(r.token) * p.hidden * sizeof(In), m, of_row);
    if (both == of_row) return;
    uint64_t words[A::kLineWords];
    weights.round_into(words);
    auto* slots = reinterpret_cast<uint64_t*>(p.out_weights + uint64_t(r.token) * p.plan.weight_stride);
    part.each_word(line, [&](uint32_t i, uint32_t word) {
      if (word >= payload && word < all) a.st_global(slots + (word - payload), words[i]);
    });
  }
};

}  // namespace hep
