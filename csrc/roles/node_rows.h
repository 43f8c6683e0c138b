// Rows that this node's ranks hold for one token: their partials, or, where a rank said so, what its experts wrote
// (layout/reading.h). And how many of them came over NVLink.
#pragma once
#include "common/bugs.h"
#include "roles/record_window.h"
#include "roles/sum_feed.h"

namespace hep {

// What a rank said, in shared memory.
struct alignas(16) RowsOfRank {
  const unsigned char* x;  // row 0 of its outputs, as mapped here
  const unsigned char* partials;
  SumFrom from;
  uint32_t rows, unused[2];
};

template <Arch A>
struct NodeRows {
  A& a;
  const CombineParams& p;
  using Words = HeadWords<RowsOfRank>;
  static constexpr uint32_t kWords = sizeof(Words) / sizeof(Vec16);
  RecordWindow<A> records;
  Vec16* const ranks;    // [L] RowsOfRank, shared memory
  uint32_t* const seen;  // [L], likewise: 1 + the group of each rank's partials that was waited for last; 0 = none yet,
                         // kNever = there will be none: its rows are of another type or size than this rank's
  uint32_t* const seen_weights;  // [L], likewise of their weights
  uint64_t epoch = 0, node_rows = 0, self_rows = 0, node_payloads = 0, self_payloads = 0;

  HEP_DEVICE NodeRows(A& arch, const CombineParams& params, std::byte* smem, int feed)
      : a(arch),
        p(params),
        records(arch, {smem, params.records[feed]}, params.record_bytes),
        ranks(reinterpret_cast<Vec16*>(smem + params.node_rows_at[feed])),
        seen(reinterpret_cast<uint32_t*>(ranks + kWords * uint32_t(params.world.num_local_ranks))),
        seen_weights(seen + params.world.num_local_ranks) {}

  HEP_HOST_DEVICE static uint64_t bytes(const CombineParams& p) {
    return align_up((sizeof(RowsOfRank) + 8) * uint64_t(p.world.num_local_ranks), 128);
  }
  // By all lanes of the feed's warp, or by one: waits until all ranks are ready, and reads what they said.
  template <bool kTogether>
  HEP_DEVICE bool begin() {
    if (!p.gate.template wait_all_ready<kTogether>(a)) return false;
    epoch = p.gate.epoch();
    for (int l = kTogether ? a.lane() : 0; l < p.world.num_local_ranks; l += kTogether ? A::kLanes : 1) {
      const auto said = p.gate.template said<Reading>(a, uint32_t(l));
      const bool here = said.is_of(epoch), meant = here && said.means_rows_of(p.reading);
      const auto* const recv = p.peers.recv[l];
      const auto words =
          std::bit_cast<Words>(RowsOfRank{recv + said.x, recv, meant ? said.from : SumFrom::kPartials, said.rows, {}});
      for (uint32_t i = 0; i < kWords; ++i) a.st_shared(ranks + uint32_t(l) * kWords + i, words.v[i]);
      for (uint32_t* groups : {seen, seen_weights}) a.st_shared(groups + l, here && !meant ? kNever : 0u);
    }
    return !kTogether || a.warp_whole();
  }
  // Rows of the j-th record's sum, each when it is there. They ascend with tokens: a group is waited for but once.
  HEP_DEVICE void add_to(SumFeed<A>& feed, uint32_t j) {
    const unsigned char* const record = records.at(j);
    const auto rec = std::bit_cast<RecordHeader>(records.load(reinterpret_cast<const Vec16*>(record)));
    const auto* dsts = reinterpret_cast<const uint64_t*>(record + MessageLayout::dsts_at());
    Pairs pairs{reinterpret_cast<const uint64_t*>(record + p.pairs_at), rec.num_pairs};
    for (uint32_t i = 0; i < rec.num_dsts; ++i) {
      const auto dst = std::bit_cast<DstEntry>(records.load(dsts + i));
      const bool own = dst.local_rank == uint32_t(p.world.local_rank());
      const uint32_t before = feed.num_rows;
      add_rows_of(feed, pairs, dst);
      own ? ++self_rows : ++node_rows;
      (own ? self_payloads : node_payloads) += feed.num_rows - before;
      a.did(LoopStep::kSumDestination);
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
  static constexpr uint32_t kNever = 1u << 31;

  struct Pairs {  // of a record
    const uint64_t* entries;
    uint32_t number, next = 0;  // the first that may be of a rank not dealt with yet
  };
  HEP_DEVICE RowsOfRank said_by(uint32_t l) const {
    Words words;
    for (uint32_t i = 0; i < kWords; ++i) words.v[i] = a.ld_shared(ranks + l * kWords + i);
    return std::bit_cast<RowsOfRank>(words);
  }
  HEP_DEVICE void add_rows_of(SumFeed<A>& feed, Pairs& pairs, const DstEntry& dst) {
    const RowsOfRank said = said_by(dst.local_rank);
    const uint32_t group = dst.row / BufferLayout::kGroupRows;
    const unsigned char* const partial = said.partials + uint64_t(dst.row) * p.partial.row_bytes();
    const unsigned char* const weights = partial + p.partial.weights_at();
    if (p.partial.weight_bytes) await(PartialFlags::kWeights, seen_weights, dst.local_rank, group);
    if (said.from == SumFrom::kReceiveRow && dst.row < said.rows) return feed.add({row(feed, said, dst.row), weights});
    if (said.from >= SumFrom::kSinglePair) {
      Pairs of_rank = pairs;
      uint32_t last = 0;  // row, the largest: rows ascend with experts
      const uint32_t n = each_pair(pairs, dst.local_rank, [&](uint32_t r) { last = r; });
      if ((n == 1 || (n == 2 && injected(Bug::kFirstOfTwoPairs))) && last < said.rows)
        return feed.add({row(feed, said, last), weights});
      if constexpr (kAddsParts)
        if (said.from == SumFrom::kEveryPair && n != 0 && last < said.rows)
          return add_part(feed, of_rank, dst.local_rank, said, n, weights);
    }
    // Also for a row that its rank, which goes by another handle, does not have: it never tells of this group.
    await(PartialFlags::kPayload, seen, dst.local_rank, group);
    feed.add({partial, weights});
  }
  HEP_DEVICE void add_part(SumFeed<A>& feed, Pairs& pairs, uint32_t owner, const RowsOfRank& said, uint32_t n,
                           const unsigned char* weights) {
    uint32_t flags = SumHead::kPart | SumHead::kPartFirst;
    each_pair(pairs, owner, [&](uint32_t r) {
      if (--n == 0) flags |= SumHead::kPartLast;
      feed.add({row(feed, said, r), n ? nullptr : weights, 1.f, 0, uint16_t(flags)});
      flags = SumHead::kPart;
    });
  }
  // Rows of the pairs that are of the rank's experts and have one; how many. The next pair is then the next rank's.
  template <class F>
  HEP_DEVICE uint32_t each_pair(Pairs& pairs, uint32_t owner, F&& f) const {
    const uint32_t first = p.first_node_expert + owner * p.plan.num_local_experts,
                   end = first + p.plan.num_local_experts;
    uint32_t n = 0;
    for (; pairs.next < pairs.number; ++pairs.next) {
      const auto pair = std::bit_cast<PairEntry>(records.load(pairs.entries + pairs.next));
      if (uint32_t(pair.expert) >= end) break;
      if (uint32_t(pair.expert) < first || pair.row < 0) continue;
      f(uint32_t(pair.row));
      ++n;
    }
    return n;
  }
  HEP_DEVICE const unsigned char* row(const SumFeed<A>& feed, const RowsOfRank& said, uint32_t i) {
    return said.x + uint64_t(i + (injected(Bug::kReadOneRowOff) && i + 1 < said.rows)) * feed.payload_row_bytes();
  }
  HEP_DEVICE void await(PartialFlags::Part part, uint32_t* groups, uint32_t owner, uint32_t group) {
    const uint32_t last = a.ld_shared(groups + owner);
    if (last == group + 1) return;
    p.partials.await(a, part, owner, group, epoch | uint64_t(last & kNever) << 32);
    a.st_shared(groups + owner, group + 1);
  }
};
}  // namespace hep
