// Placement: from everybody's counts to finished records. Every rank computes from the same counts, so all agree on
// every receive row and every permuted row without another message. By all lanes of the block that has just gathered
// the counts; nothing returns to the host.
#pragma once
#include "layout/headers.h"
#include "roles/place_params.h"

namespace hep {

template <class A>
struct PlaceRole {
  A& a;
  const PlaceParams& p;
  const CountsView counts;
  const uint32_t width, me;  // lanes over all warps of the block

  HEP_DEVICE PlaceRole(A& arch, const PlaceParams& params)
      : a(arch),
        p(params),
        counts{params.counts_layout, params.counts},
        width(uint32_t(arch.num_warps() * A::kLanes)),
        me(uint32_t(arch.warp_idx() * A::kLanes + arch.lane())) {}

  // All but the records: where every group of rows begins, and how many there are.
  HEP_DEVICE void count_rows() {
    count();
    a.block_sync();
    for (uint32_t r = me; r < counts.layout.num_ranks; r += width) place_experts(r);
    a.block_sync();
    if (me == 0) conclude();
  }
  HEP_DEVICE void finish_records() {
    for (int n = 0; n < p.world.num_nodes; ++n) {
      const uint32_t tokens = counts.node_tokens(p.world.rank, n);
      for (uint32_t j = me; j < tokens; j += width) finish_record(n, j);
    }
  }

 private:
  HEP_DEVICE uint32_t experts_per_rank() const { return counts.layout.num_experts / counts.layout.num_ranks; }
  HEP_DEVICE int64_t budget(uint32_t r) const { return int64_t(counts.header(int(r), kHeaderBudget)) - 1; }
  // Permuted rows of an expert with this many pairs.
  HEP_DEVICE int64_t group_rows(int64_t pairs) const {
    return int64_t(align_up(uint64_t(p.pad_empty && pairs == 0 ? 1 : pairs), p.pad_multiple));
  }
  HEP_DEVICE static int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
  HEP_DEVICE static int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

  // Column sums of the counts: of all sources, and of those before this rank.
  HEP_DEVICE void count() {
    for (uint32_t e = me; e < counts.layout.num_experts; e += width) {
      uint32_t all = 0;
      for (uint32_t s = 0; s < counts.layout.num_ranks; ++s) {
        if (int(s) == p.world.rank) p.pair_base[e] = all;
        all += counts.pairs(int(s), int(e));
      }
      p.expert_pairs[e] = all;
    }
    for (uint32_t d = me; d < counts.layout.num_ranks; d += width) {
      uint64_t all = 0;
      for (uint32_t s = 0; s < counts.layout.num_ranks; ++s) {
        if (int(s) == p.world.rank) p.row_base[d] = uint32_t(all);
        all += counts.rows(int(s), int(d));
      }
      p.rank_rows[d] = uint32_t(all);
    }
    for (uint32_t n = me; n < uint32_t(p.world.num_nodes); n += width) {
      p.node_count[n] = counts.node_tokens(p.world.rank, int(n));
      p.rail_count[n] = int(n) == p.world.node() ? 0 : counts.node_tokens(p.world.rail_peer(int(n)), p.world.node());
    }
  }
  // The groups of rank r, one after another. A budget cuts the permuted rows at its end: later experts starve first.
  HEP_DEVICE void place_experts(uint32_t r) {
    const int64_t room_of_rank = budget(r);
    int64_t row = 0, dropped = 0, rows_kept = 0;
    for (uint32_t i = 0; i < experts_per_rank(); ++i) {
      const uint32_t e = r * experts_per_rank() + i;
      const int64_t pairs = p.expert_pairs[e], padded = group_rows(pairs);
      const int64_t room = room_of_rank < 0 ? padded : most(0, room_of_rank - row);
      const int64_t kept = least(pairs, room), kept_padded = least(padded, room);
      p.pair_base[e] += uint32_t(row);
      dropped += pairs - kept;
      if (int(r) == p.world.rank) {
        p.tokens_per_expert[i] = kept, p.padded_tokens_per_expert[i] = kept_padded;
        p.zero_ranges[2 * i] = uint32_t(row + kept), p.zero_ranges[2 * i + 1] = uint32_t(row + kept_padded);
        rows_kept += kept_padded;
      }
      row += padded;
    }
    p.dropped_per_rank[r] = uint64_t(dropped);
    if (int(r) == p.world.rank) p.numbers->permuted_rows = uint32_t(rows_kept);
  }
  HEP_DEVICE void conclude() {
    uint64_t largest = 0;
    for (uint32_t d = 0; d < counts.layout.num_ranks; ++d)
      largest = p.rank_rows[d] > largest ? p.rank_rows[d] : largest;
    const uint64_t rows = p.rank_rows[p.world.rank], capacity = p.recv_capacity;
    PlanNumbers& n = *p.numbers;
    n.recv_rows = uint32_t(rows < capacity ? rows : capacity);
    n.max_recv_rows = uint32_t(largest < capacity ? largest : capacity);
    n.has_holes = rows > capacity;
    n.overflow = n.has_holes || p.dropped_per_rank[p.world.rank] > 0 || *p.excess > 0;
  }
  // The j-th token for node n: its destination ranks and rows, its pairs and permuted rows.
  HEP_DEVICE void finish_record(int n, uint32_t j) {
    const uint32_t per_rank = experts_per_rank(), per_node = per_rank * uint32_t(p.world.num_local_ranks);
    const uint32_t t = p.node_tokens[uint64_t(n) * p.num_tokens + j];
    const uint64_t cells = uint64_t(t) * p.topk;
    const int32_t* experts = p.pair_expert + cells;
    unsigned char* at = p.records[n] + uint64_t(j) * p.record_bytes;
    auto* dsts = reinterpret_cast<DstEntry*>(at + MessageLayout::dsts_at());
    auto* pairs = reinterpret_cast<PairEntry*>(at + p.pairs_at);
    uint32_t k = 0, num_dsts = 0, num_pairs = 0;
    while (uint32_t(experts[k]) / per_node != uint32_t(n)) ++k;
    const uint32_t first = k;
    bool kept = false;
    for (uint32_t last = ~0u; k < p.topk && experts[k] >= 0 && uint32_t(experts[k]) / per_node == uint32_t(n); ++k) {
      const uint32_t rank = uint32_t(experts[k]) / per_rank;
      if (rank != last) {
        const uint64_t row = uint64_t(p.row_base[rank]) + p.row_pos[cells + k];
        kept = row < p.recv_capacity;
        if (kept) dsts[num_dsts++] = {rank % uint32_t(p.world.num_local_ranks), uint32_t(row)};
        last = rank;
      }
      const int64_t row = int64_t(p.pair_base[experts[k]]) + p.pair_pos[cells + k], room = budget(rank);
      pairs[num_pairs++] = {experts[k], kept && (room < 0 || row < room) ? int32_t(row) : -1};
    }
    *reinterpret_cast<RecordHeader*>(at) = {uint16_t(num_dsts), uint16_t(num_pairs), first, uint32_t(p.world.rank), t};
    for (uint32_t i = num_dsts; i < p.max_dsts; ++i) dsts[i] = {0, 0};  // bytes that travel are never left over
    for (auto* v = reinterpret_cast<uint64_t*>(pairs + num_pairs); v < reinterpret_cast<uint64_t*>(at + p.record_bytes);
         ++v)
      *v = 0;
  }
};

}  // namespace hep
