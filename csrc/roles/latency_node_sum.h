// Latency combine, where the group has several nodes: what this node's ranks have for a token of a rail peer, added by
// ascending rank and rounded, as a row of bytes along the rail to that peer.
#pragma once
#include "pipeline/rail_tokens.h"
#include "roles/latency_rows.h"
#include "roles/line_sum.h"

namespace hep {

template <Arch A, Transport<A> Net, class P>
struct LatencyNodeSumRole {
  A& a;
  Net& net;
  const LatencyCombineParams& p;
  const uint64_t flag;
  const LinePart<A> part;
  std::byte* const scratch;
  LineTraffic traffic;

  HEP_DEVICE LatencyNodeSumRole(A& arch, Net& n, const LatencyCombineParams& params, uint64_t step, std::byte* of_warp)
      : a(arch), net(n), p(params), flag(step), part(arch), scratch(of_warp) {}

  // By all lanes of a warp.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    a.set_role(Role::kLatencyNodeSum);
    const auto tokens = RailTokens::of(p.world, p.plan.rail_count);
    const auto share = LineShare<A>::of(tokens.count(), p.lines(), workers, 1, TileMath<A>::kReadsRows);
    for (uint32_t i = worker; i < share.count(); i += workers)
      if (const uint32_t at = share.row(i), first = share.first(i); first < p.lines() && tokens.has(at))
        token(tokens.node(at), tokens.index(at), first, share.end(first, p.lines()));
    traffic.report(a, p.traffic, p.lines(), p.partial.row_bytes());
  }

 private:
  // Lines [first, n) of the index-th token of the rail peer on `node`.
  HEP_DEVICE void token(int node, uint32_t index, uint32_t first, uint32_t n) {
    const unsigned char* record = p.plan.rail_record(node, index, p.record_bytes);
    const auto& header = *reinterpret_cast<const RecordHeader*>(record);
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
    unsigned char* to = p.link.rail.token(net, flag, node, index);
    if (first == 0) ++traffic.rail_rows;
    const uint32_t all = p.partial.row_bytes() / 8;
    if constexpr (TileMath<A>::kReadsRows) {
      sum_whole(node, header, dsts, to);
    } else {
      for (uint32_t line = first + part.group; line - part.group < n; line += part.kAtOnce)
        sum(node, line, n, header, dsts, reinterpret_cast<uint64_t*>(to));
    }
    p.link.rail.send_token(a, net, flag, node, index, LinePart<A>::words(first, n, all), all);
  }
  HEP_DEVICE void sum_whole(int node, const RecordHeader& h, const DstEntry* dsts, unsigned char* to) {
    LatencyRows<A> rows(p, scratch);
    const auto sum = rows.of_node(to);
    if (h.num_dsts == 0) return rows.add_partial(sum, rows.row, 0, 0);
    for (uint32_t d = 0; d < h.num_dsts; ++d)
      rows.add_partial(sum, rows.assemble(a, part, flag, node, int(dsts[d].local_rank), h.source_token), d, h.num_dsts);
  }
  HEP_DEVICE void sum(int node, uint32_t line, uint32_t n, const RecordHeader& h, const DstEntry* dsts, uint64_t* to) {
    const uint32_t payload = p.partial.payload_bytes / 8, all = p.partial.row_bytes() / 8;
    LineSum<A, P, P> sums;
    LineSum<A, float, float> weights;  // of the words behind the payload
    sums.begin(h.num_dsts == 0);
    weights.begin(h.num_dsts == 0);
    for (uint32_t d = 0; d < h.num_dsts; ++d) {
      const int local = int(dsts[d].local_rank);
      const Line* from = p.link.slot(flag, p.world.local_rank(), p.link.named(node, local), h.source_token) + line;
      uint64_t words[A::kLineWords] = {};
      p.link.wait(a, line < n ? from : nullptr, flag, words,
                  {Site::kLatencyRow, p.world.rank_of(p.world.node(), local), int64_t(h.source_token)});
      if (line >= n) continue;
      if (part.count(line, payload)) sums.add(words);
      if (part.count(line, all) > part.count(line, payload)) weights.add(words);
    }
    if (line >= n) return;
    uint64_t summed[A::kLineWords], with[A::kLineWords];
    sums.round_into(summed);
    weights.round_into(with);
    part.each_word(line, [&](uint32_t i, uint32_t m) {
      if (m < payload) a.st_global(to + m, summed[i]);
      if (m >= payload && m < all) a.st_global(to + m, with[i]);
    });
  }
};

}  // namespace hep
