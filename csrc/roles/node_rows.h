// Rows that this node's ranks hold for one token: their partials, or, where a rank said so, what its experts wrote
// (layout/reading.h). And how many of them came over NVLink.
#pragma once
#include "common/bugs.h"
#include "roles/sum_feed.h"

namespace hep {

// What a rank said, in shared memory.
struct alignas(16) RowsOfRank {
  const unsigned char* x;  // row 0 of its outputs, as mapped here
  SumFrom from;
  uint32_t rows;
};

template <Arch A>
struct NodeRows {
  A& a;
  const CombineParams& p;
  Vec16* const ranks;    // [L] RowsOfRank, shared memory
  uint32_t* const seen;  // [L], likewise: 1 + the group of each rank's partials that was waited for last; 0 = none yet
  uint32_t* const seen_weights;  // [L], likewise of their weights
  uint64_t epoch = 0, node_rows = 0, self_rows = 0, node_payloads = 0, self_payloads = 0;

  HEP_DEVICE NodeRows(A& arch, const CombineParams& params, std::byte* smem, int feed)
      : a(arch),
        p(params),
        ranks(reinterpret_cast<Vec16*>(smem + params.node_rows_at[feed])),
        seen(reinterpret_cast<uint32_t*>(ranks + params.world.num_local_ranks)),
        seen_weights(seen + params.world.num_local_ranks) {}

  // Of one feed.
  HEP_HOST_DEVICE static uint64_t bytes(const CombineParams& p) {
    return align_up((sizeof(RowsOfRank) + 8) * uint64_t(p.world.num_local_ranks), 128);
  }
  // Waits until all ranks are ready, and reads what they said.
  HEP_DEVICE void begin() {
    p.gate.wait_all_ready(a);
    epoch = p.gate.epoch();
    const uint32_t num_ranks = uint32_t(p.world.num_local_ranks), row_bytes = p.hidden * dtype_bytes(p.dtype);
    constexpr uint32_t kAtOnce = 4;  // loads side by side
    for (uint32_t first = 0; first < num_ranks; first += kAtOnce) {
      Reading said[kAtOnce];
      HEP_UNROLL
      for (uint32_t i = 0; i < kAtOnce; ++i)
        said[i] = p.gate.template said<Reading>(a, first + i < num_ranks ? first + i : first);
      HEP_UNROLL
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t l = first + i;
        if (l >= num_ranks) break;
        const bool meant = said[i].is_for(epoch, row_bytes, p.partial.row_bytes());
        a.st_shared(ranks + l,
                    std::bit_cast<Vec16>(RowsOfRank{p.peers.recv[l] + said[i].x,
                                                    meant ? said[i].from : SumFrom::kPartials, said[i].rows}));
        a.st_shared(seen + l, 0u);
        a.st_shared(seen_weights + l, 0u);
      }
    }
  }
  // Rows of the next sum, each when it is there. Rows of a rank ascend with tokens, so that a group is waited for once
  // for up to kGroupRows tokens.
  HEP_DEVICE void add_to(SumFeed<A>& feed, const unsigned char* record) {
    const auto* rec = reinterpret_cast<const RecordHeader*>(record);
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
    uint32_t pair = 0;
    for (uint32_t i = 0; i < rec->num_dsts; ++i) {
      const DstEntry dst = dsts[i];
      const bool own = dst.local_rank == uint32_t(p.world.local_rank());
      const uint32_t before = feed.num_rows;
      add_rows_of(feed, rec, pair, dst);
      own ? ++self_rows : ++node_rows;
      (own ? self_payloads : node_payloads) += feed.num_rows - before;
    }
  }
  HEP_DEVICE void report() {
    const uint64_t payload = p.partial.payload_bytes, weights = p.partial.weight_bytes;
    a.count_rank(&p.traffic->node_rows, node_rows);
    a.count_rank(&p.traffic->node_bytes, node_payloads * payload + node_rows * weights);
    a.count_rank(&p.traffic->self_rows, self_rows);
    a.count_rank(&p.traffic->self_bytes, self_payloads * payload + self_rows * weights);
  }

 private:
  static constexpr bool kAddsParts = TileMath<A>::kReadsRows;

  // `pair`: the record's first pair that may be this rank's, then that behind its last.
  HEP_DEVICE void add_rows_of(SumFeed<A>& feed, const RecordHeader* rec, uint32_t& pair, const DstEntry& dst) {
    const auto said = std::bit_cast<RowsOfRank>(a.ld_shared(ranks + dst.local_rank));
    const uint32_t group = dst.row / BufferLayout::kGroupRows;
    const unsigned char* const partial = p.peers.recv[dst.local_rank] + uint64_t(dst.row) * p.partial.row_bytes();
    const unsigned char* const weights = partial + p.partial.weights_at();
    if (p.partial.weight_bytes) await(PartialFlags::kWeights, seen_weights, dst.local_rank, group);
    if (said.from == SumFrom::kReceiveRow && dst.row < said.rows) return feed.add({row(feed, said, dst.row), weights});
    if (said.from >= SumFrom::kSinglePair) {
      const uint32_t begin = pair;
      uint32_t last = 0;  // row, the largest: rows ascend with experts
      const uint32_t n = each_pair(rec, pair, dst.local_rank, [&](uint32_t r) { last = r; });
      if ((n == 1 || (n == 2 && injected(Bug::kFirstOfTwoPairs))) && last < said.rows)
        return feed.add({row(feed, said, last), weights});
      if constexpr (kAddsParts)
        if (said.from == SumFrom::kEveryPair && n != 0 && last < said.rows)
          return add_part(feed, rec, begin, dst.local_rank, said, n, weights);
    }
    // Also for a row that its rank does not have: it goes by another handle, and never tells of this group.
    await(PartialFlags::kPayload, seen, dst.local_rank, group);
    feed.add({partial, weights});
  }
  HEP_DEVICE void add_part(SumFeed<A>& feed, const RecordHeader* rec, uint32_t pair, uint32_t owner,
                           const RowsOfRank& said, uint32_t n, const unsigned char* weights) {
    uint32_t flags = SumHead::kPart | SumHead::kPartFirst;
    each_pair(rec, pair, owner, [&](uint32_t r) {
      if (--n == 0) flags |= SumHead::kPartLast;
      feed.add({row(feed, said, r), n ? nullptr : weights, 1.f, 0, uint16_t(flags)});
      flags = SumHead::kPart;
    });
  }
  // Rows of the record's pairs that are of the rank's experts and have one; how many.
  template <class F>
  HEP_DEVICE uint32_t each_pair(const RecordHeader* rec, uint32_t& pair, uint32_t owner, F&& f) const {
    const PairEntry* pairs = p.pairs_of(rec);
    const uint32_t first = p.first_node_expert + owner * p.plan.num_local_experts,
                   end = first + p.plan.num_local_experts;
    uint32_t n = 0;
    for (; pair < rec->num_pairs && uint32_t(pairs[pair].expert) < end; ++pair) {
      if (uint32_t(pairs[pair].expert) < first || pairs[pair].row < 0) continue;
      f(uint32_t(pairs[pair].row));
      ++n;
    }
    return n;
  }
  HEP_DEVICE const unsigned char* row(const SumFeed<A>& feed, const RowsOfRank& said, uint32_t i) {
    return said.x + uint64_t(i + (injected(Bug::kReadOneRowOff) && i + 1 < said.rows)) * feed.payload_row_bytes();
  }
  HEP_DEVICE void await(PartialFlags::Part part, uint32_t* groups, uint32_t owner, uint32_t group) {
    if (a.ld_shared(groups + owner) == group + 1) return;
    p.partials.await(a, part, owner, group, epoch);
    a.st_shared(groups + owner, group + 1);
  }
};

}  // namespace hep
