// Placement: from everybody's counts to where every group of rows begins. Every rank computes from the same counts, so
// all agree on every receive row and every permuted row without another message. By all lanes of a block, each block
// for itself, in its shared memory; one of them, the lead, also stores what others read. Nothing returns to the host.
#pragma once
#include "layout/headers.h"
#include "roles/exchange_share.h"

namespace hep {

template <class A>
struct PlaceRole {
  static constexpr uint32_t kAhead = A::kLanes < 32 ? 1 : 8;

  A& a;
  const ExchangeParams& p;
  const PlaceParams& q;
  const CountsView counts;
  const ExchangeSmem smem;
  uint32_t* const words;
  const bool lead;
  const uint32_t width, me;  // lanes over all warps of the block

  HEP_DEVICE PlaceRole(A& arch, const ExchangeParams& params, const CountsView& view, std::byte* shared, bool leads)
      : a(arch),
        p(params),
        q(params.place),
        counts(view),
        smem{params.layout, params.walkers},
        words(reinterpret_cast<uint32_t*>(shared)),
        lead(leads),
        width(uint32_t(arch.num_warps() * A::kLanes)),
        me(uint32_t(arch.warp_idx() * A::kLanes + arch.lane())) {}

  // Where every group of rows begins, and how many there are.
  HEP_DEVICE void count_rows() {
    for (uint32_t e = me; e < p.layout.num_experts; e += width) {
      const Sums pairs = over_sources(p.layout.experts_at() + e);
      set(smem.expert_pairs_at() + e, pairs.all);
      set(smem.pair_base_at() + e, pairs.before);
    }
    for (uint32_t d = me; d < p.layout.num_ranks; d += width) {
      const Sums rows = over_sources(p.layout.rows_at() + d);
      const uint32_t budget = counts.header(int(d), kHeaderBudget);
      set(smem.rank_rows_at() + d, rows.all);
      set(smem.row_base_at() + d, rows.before);
      set(smem.room_at() + d, budget ? budget - 1 : ExchangeSmem::kUnlimited);
      if (lead) {
        q.rank_rows[d] = rows.all;
        q.source_rows[d] = counts.rows(int(d), p.world.rank);
      }
    }
    const int own_node = p.world.node(), own_local = p.world.local_rank();
    for (uint32_t n = me; lead && n < p.layout.num_nodes; n += width) {
      q.records[n] = q.record_base + uint64_t(n) * p.num_tokens * q.record_bytes;
      q.node_token_table[n] = p.node_tokens + uint64_t(n) * p.num_tokens;
      q.node_count[n] = counts.node_tokens(p.world.rank, int(n));
      q.rail_count[n] = int(n) == own_node ? 0 : counts.node_tokens(p.world.rank_of(int(n), own_local), own_node);
    }
    a.block_sync();
    for (uint32_t r = me; r < p.layout.num_ranks; r += width) place_experts(r);
    a.block_sync();
    if (lead && me == 0) conclude();
  }

 private:
  HEP_DEVICE uint32_t get(uint32_t word) const { return a.ld_shared(words + word); }
  HEP_DEVICE void set(uint32_t word, uint32_t value) { a.st_shared(words + word, value); }
  HEP_DEVICE static int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
  HEP_DEVICE static int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }
  // Permuted rows of an expert with this many pairs, which are fewer than 2^31.
  HEP_DEVICE int64_t group_rows(uint32_t pairs) const {
    if (pairs == 0) return q.pad_empty ? q.pad_multiple : 0;
    return (int64_t(q.by_pad.quotient(pairs - 1)) + 1) * q.pad_multiple;
  }

  // A word of the count vectors, summed over all sources and over those before this rank.
  struct Sums {
    uint32_t all = 0, before = 0;
  };
  HEP_DEVICE Sums over_sources(uint32_t word) {
    const uint32_t sources = p.layout.num_ranks, rank = uint32_t(p.world.rank);
    Sums sums;
    for (uint32_t s = 0; s < sources; s += kAhead) {
      uint32_t n[kAhead];
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) n[i] = counts.vector(int(s + i < sources ? s + i : s))[word];
      HEP_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        sums.all += s + i < sources ? n[i] : 0;
        sums.before += s + i < rank ? n[i] : 0;
      }
    }
    return sums;
  }
  // The groups of rank r, one after another. A budget cuts the permuted rows at its end: later experts starve first.
  HEP_DEVICE void place_experts(uint32_t r) {
    const uint32_t limit = get(smem.room_at() + r), first = r * q.experts_of_rank;
    const bool own = lead && int(r) == p.world.rank;
    int64_t row = 0, dropped = 0, rows_kept = 0;
    for (uint32_t i = 0; i < q.experts_of_rank; ++i) {
      const uint32_t pairs = get(smem.expert_pairs_at() + first + i), base = smem.pair_base_at() + first + i;
      const int64_t padded = group_rows(pairs);
      const int64_t room = limit == ExchangeSmem::kUnlimited ? padded : most(0, int64_t(limit) - row);
      const int64_t kept = least(pairs, room), kept_padded = least(padded, room);
      set(base, get(base) + uint32_t(row));
      dropped += pairs - kept;
      if (own) {
        q.tokens_per_expert[i] = kept;
        q.padded_tokens_per_expert[i] = kept_padded;
        q.zero_ranges[2 * i] = uint32_t(row + kept);
        q.zero_ranges[2 * i + 1] = uint32_t(row + kept_padded);
        rows_kept += kept_padded;
      }
      row += padded;
    }
    if (lead) q.dropped_per_rank[r] = uint64_t(dropped);
    if (own) q.numbers->permuted_rows = uint32_t(rows_kept);
  }
  HEP_DEVICE void conclude() {
    uint32_t largest = 0;
    for (uint32_t d = 0; d < p.layout.num_ranks; ++d) {
      const uint32_t rows = get(smem.rank_rows_at() + d);
      largest = rows > largest ? rows : largest;
    }
    const uint64_t rows = get(smem.rank_rows_at() + uint32_t(p.world.rank)), capacity = q.recv_capacity;
    PlanNumbers& n = *q.numbers;
    n.recv_rows = uint32_t(rows < capacity ? rows : capacity);
    n.max_recv_rows = uint32_t(largest < capacity ? largest : capacity);
    n.has_holes = rows > capacity;
    n.overflow = n.has_holes || q.dropped_per_rank[p.world.rank] > 0 || p.progress->excess > 0;
  }
};

}  // namespace hep
