// Latency dispatch, between its halves, where the group has several nodes: rows that rail peers send to this node come
// to this rank, which hands each on, by lines, to the slabs that its ranks have for the row's source. Of a plan that is
// being made it also keeps their records, which a combine of the other path reads.
#pragma once
#include <bit>

#include "common/bugs.h"
#include "pipeline/rail_tokens.h"
#include "roles/latency_sources.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct LatencyForwardRole {
  A& a;
  Net& net;
  const LatencyDispatchParams& p;
  const LatencySources<A> sources;
  const uint64_t flag;
  const LinePart<A> part;
  LineTraffic traffic;

  HEP_DEVICE LatencyForwardRole(A& arch, Net& n, const LatencyDispatchParams& params, std::byte* smem, uint64_t step)
      : a(arch), net(n), p(params), sources{arch, params, smem}, flag(step), part(arch) {}

  // By all lanes of a warp. room(rank): permuted rows that it has room for.
  template <class Room>
  HEP_DEVICE void run(uint32_t worker, uint32_t workers, Room&& room) {
    a.set_role(Role::kLatencyForward);
    const auto tokens = RailTokens::of(p.world, p.plan.rail_count);
    const auto share = LineShare<A>::of(tokens.count(), p.lines(), workers, 2, TileMath<A>::kReadsRows);
    for (uint32_t i = worker; i < share.count(); i += workers)
      if (const uint32_t at = share.row(i), first = share.first(i); first < p.lines() && tokens.has(at))
        hand_on(tokens.node(at), tokens.index(at), first, share.end(first, p.lines()), room);
    traffic.report(a, p.traffic, p.lines(), 0);
  }

 private:
  // Lines [first, n) of the index-th token from `node`.
  template <class Room>
  HEP_DEVICE void hand_on(int node, uint32_t index, uint32_t first, uint32_t n, Room&& room) {
    const auto* message = reinterpret_cast<const uint64_t*>(p.link.rail.await_token(a, net, flag, node, index));
    const auto header = std::bit_cast<RecordHeader>(a.ld_global(reinterpret_cast<const Vec16*>(message)));
    const auto* dsts = message + MessageLayout::dsts_at() / 8;
    const int source = p.world.rank_of(node, p.world.local_rank());
    const int as = injected(Bug::kForwardedFromNextSource) ? (source + 1) % p.world.num_ranks() : source;
    const uint32_t all = p.message.token_bytes() / 8;
    for (uint32_t line = first + part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      part.each_word(line, [&](uint32_t i, uint32_t m) { words[i] = m < all ? a.ld_global(message + m) : 0; });
      for (uint32_t d = 0; d < header.num_dsts; ++d) {
        const auto dst = std::bit_cast<DstEntry>(a.ld_global(dsts + d));
        const uint32_t slot = p.routes ? dst.row : header.source_token;
        a.st_line(line < n ? p.link.slot(flag, int(dst.local_rank), as, slot) + line : nullptr, words, flag);
      }
    }
    if (first != 0) return;
    for (uint32_t d = 0; d < header.num_dsts; ++d)
      traffic.add(int(std::bit_cast<DstEntry>(a.ld_global(dsts + d)).local_rank) == p.world.local_rank());
    if (p.plan.fresh) keep(node, index, header, message, room);
  }
  // The record with rows in place of positions, as its source would have made it (roles/records.h).
  template <class Room>
  HEP_DEVICE void keep(int node, uint32_t index, const RecordHeader& h, const uint64_t* message, Room&& room) {
    auto* record = reinterpret_cast<uint64_t*>(p.plan.rail_record(node, index, p.message.record_bytes));
    const uint32_t dsts_at = MessageLayout::dsts_at() / 8, pairs_at = p.message.pairs_at() / 8;
    const auto dst = [&](uint32_t d) { return std::bit_cast<DstEntry>(a.ld_global(message + dsts_at + d)); };
    const auto row_of = [&](const DstEntry& e) { return sources.rail_row(node, e.local_rank, e.row); };
    for (uint32_t k = uint32_t(a.lane()); k < p.message.record_bytes / 8 - pairs_at; k += A::kLanes) {
      PairEntry e = k < h.num_pairs ? std::bit_cast<PairEntry>(a.ld_global(message + pairs_at + k)) : PairEntry{};
      if (k < h.num_pairs) {
        const uint32_t in_node = uint32_t(e.expert) - p.first_node_expert, local = in_node / p.plan.num_local_experts;
        const uint32_t row = sources.rail_pair(node, in_node, uint32_t(e.row)), limit = room(local);
        bool kept = limit == ExchangeSmem::kUnlimited || row < limit;
        for (uint32_t d = 0; d < h.num_dsts; ++d)
          if (const DstEntry to = dst(d); to.local_rank == local) kept &= row_of(to) < p.route.place.recv_capacity;
        e.row = kept ? int32_t(row) : -1;
      }
      a.st_global(record + pairs_at + k, std::bit_cast<uint64_t>(e));
    }
    if (a.lane() != 0) return;
    uint32_t kept = 0;
    for (uint32_t d = 0; d < h.num_dsts; ++d)
      if (const DstEntry to = dst(d); row_of(to) < p.route.place.recv_capacity)
        a.st_global(record + dsts_at + kept++, std::bit_cast<uint64_t>(DstEntry{to.local_rank, row_of(to)}));
    for (uint32_t d = kept; d < pairs_at - dsts_at; ++d) a.st_global(record + dsts_at + d, uint64_t{0});
    const RecordHeader header{uint16_t(kept), h.num_pairs, h.first_pair, h.source_rank, h.source_token};
    a.st_global(reinterpret_cast<Vec16*>(record), std::bit_cast<Vec16>(header));
  }
};

}  // namespace hep
