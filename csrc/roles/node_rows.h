// Rows that this node's ranks hold for one token: their partials, or, where a rank said so, what its experts wrote
// (layout/reading.h). And how many of them came over NVLink.
#pragma once
#include "common/bugs.h"
#include "roles/partial_looks.h"
#include "roles/record_window.h"
#include "roles/sum_feed.h"

namespace hep {

// kTogether: all lanes of the feed's warp are here, of which one sums. kMayLook: they may look at flags together,
// by looks(), in place of that one row by row.
template <Arch A, bool kTogether, bool kMayLook = false>
struct NodeRows {
  A& a;
  const CombineParams& p;
  RecordWindow<A> records;
  const RankRows<A> ranks;
  uint64_t epoch = 0;
  uint32_t node_rows = 0, self_rows = 0;    // came over NVLink; of this rank
  uint32_t node_parts = 0, self_parts = 0;  // rows that were added in place of those, beyond one each

  HEP_DEVICE NodeRows(A& arch, const CombineParams& params, std::byte* smem, int feed)
      : a(arch),
        p(params),
        records(arch, {smem, params.records[feed]}, params.record_bytes),
        ranks(arch, params, smem, feed) {}

  // By all lanes, or by the one: waits until all ranks are ready, and reads what they said. counts: see NodeGate.
  HEP_DEVICE bool begin(bool counts) {
    if (!p.gate.template wait_all_ready<kTogether>(a, counts)) return false;
    epoch = p.gate.epoch();
    ranks.template read<kTogether>(epoch);
    return !kTogether || a.warp_whole();
  }
  HEP_DEVICE bool look_together() const {
    if constexpr (kMayLook) return a.looks_together();
    return false;
  }
  HEP_DEVICE PartialLooks<A> looks() const { return {a, p, ranks}; }
  // Rows of the j-th record's sum, each when it is there. They ascend with tokens: a group is waited for but once.
  HEP_DEVICE void add_to(SumFeed<A>& feed, uint32_t j) {
    const unsigned char* const record = records.at(j);
    const auto rec = std::bit_cast<RecordHeader>(records.load(reinterpret_cast<const Vec16*>(record)));
    const auto* dsts = reinterpret_cast<const uint64_t*>(record + MessageLayout::dsts_at());
    Pairs pairs{reinterpret_cast<const uint64_t*>(record + p.pairs_at), rec.num_pairs};
    for (uint32_t i = 0; i < rec.num_dsts; ++i) {
      const auto dst = std::bit_cast<DstEntry>(records.load(dsts + i));
      const bool own = dst.local_rank == uint32_t(p.world.local_rank());
      [[maybe_unused]] const uint32_t before = feed.num_rows;
      add_rows_of(feed, pairs, dst);
      own ? ++self_rows : ++node_rows;
      if constexpr (kAddsParts) (own ? self_parts : node_parts) += feed.num_rows - before - 1;
      a.did(LoopStep::kSumDestination);
    }
  }
  HEP_DEVICE void report() {
    const uint64_t payload = p.partial.payload_bytes, weights = p.partial.weight_bytes;
    a.count_rank(&p.traffic->node_rows, node_rows);
    a.count_rank(&p.traffic->node_bytes, (node_rows + node_parts) * payload + node_rows * weights);
    a.count_rank(&p.traffic->self_rows, self_rows);
    a.count_rank(&p.traffic->self_bytes, (self_rows + self_parts) * payload + self_rows * weights);
  }

 private:
  static constexpr bool kAddsParts = TileMath<A>::kReadsRows;

  struct Pairs {  // of a record
    const uint64_t* entries;
    uint32_t number, next = 0;  // the first that may be of a rank not dealt with yet
  };
  HEP_DEVICE void add_rows_of(SumFeed<A>& feed, Pairs& pairs, const DstEntry& dst) {
    const RowsOfRank said = ranks.said_by(dst.local_rank);
    const uint32_t group = dst.row / BufferLayout::kGroupRows;
    const unsigned char* const partial = said.partials + uint64_t(dst.row) * p.partial.row_bytes();
    const unsigned char* const weights = partial + p.partial.weights_at();
    if (p.partial.weight_bytes) await(PartialFlags::kWeights, dst.local_rank, group);
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
    await(PartialFlags::kPayload, dst.local_rank, group);
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
  HEP_DEVICE void await(PartialFlags::Part part, uint32_t owner, uint32_t group) {
    constexpr uint32_t kNever = RankRows<A>::kNever;
    if (look_together() && ranks.looked_at(part, owner)) return;
    uint32_t* const groups = ranks.groups(part);
    const uint32_t last = a.ld_shared(groups + owner);
    if (last == group + 1) return;
    p.partials.await(a, part, owner, group, epoch | uint64_t(last & kNever) << 32);
    a.st_shared(groups + owner, group + 1);
  }
};

}  // namespace hep
