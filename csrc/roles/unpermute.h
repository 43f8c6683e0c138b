// Unpermute: this rank's experts' outputs -> one partial per receive row, in its own receive rows, but for those whose
// readers read the outputs themselves (layout/reading.h). Its last section, the pairs' weights or their gradients, is
// another warp's (roles/pack_weights.h).
#pragma once
#include "common/bugs.h"
#include "roles/group_records.h"
#include "roles/partial_groups.h"
#include "roles/sum_feed.h"

namespace hep {

template <Arch A>
struct UnpermuteRole {
  A& a;
  const CombineParams& p;
  SumFeed<A>& feed;
  PartialGroups<A> groups;
  GroupRecords<A> records;

  HEP_DEVICE UnpermuteRole(A& arch, const CombineParams& params, SumFeed<A>& to, std::byte* smem)
      : a(arch), p(params), feed(to), groups(arch, params, smem), records(arch, params, smem, to.index) {}

  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    a.set_role(Role::kUnpermuteG2s);
    if (p.reading.from == SumFrom::kReceiveRow) return;
    uint32_t partials = 0;
    groups.each(worker, workers, [&](uint32_t group, uint32_t source) {
      const SumEnd told{.flags = SumHead::kGroupEnd, .peer = source, .chunk = group};
      const uint32_t begin = group * BufferLayout::kGroupRows, end = groups.end_of(group);
      bool formed = false;
      const uint32_t before = partials;
      HEP_NO_UNROLL
      for (uint32_t i = begin; i < end; ++i) {
        if (p.permuted) records.reach(i, end);
        formed = row(i, i + 1 == end ? told : SumEnd{});
        partials += formed;
      }
      if (partials != before && !formed) feed.emit_end(told);
    });
    records.close();
    if (partials) a.count_rank(&p.traffic->partial_rows, partials);
  }

 private:
  HEP_DEVICE bool row(uint32_t i, const SumEnd& end) {
    unsigned char* dst = p.recv + uint64_t(i + injected(Bug::kPartialsOneRowOff)) * p.partial.row_bytes();
    feed.begin();
    a.did(LoopStep::kSumPartial);
    if (p.permuted)
      add_pairs(i);
    else
      feed.add({p.x + uint64_t(i) * feed.payload_row_bytes()});
    if (p.reading.from != SumFrom::kPartials && is_read_in_place(feed.num_rows)) return false;
    const uint32_t scaled = p.multiply ? uint32_t(SumHead::kScaled) : 0u;
    feed.emit({dst, p.hidden, SumHead::types(p.dtype, p.partial_dtype) | scaled, false}, end);
    return true;
  }
  HEP_DEVICE bool is_read_in_place(uint32_t pairs) const {
    if (p.reading.from == SumFrom::kEveryPair) return pairs != 0;
    return pairs == 1 || (injected(Bug::kPartialLeftOut) && pairs == 2);
  }
  HEP_DEVICE void add_pairs(uint32_t i) {
    const unsigned char* const record = records.at(i);
    const auto rec = std::bit_cast<RecordHeader>(records.load(reinterpret_cast<const Vec16*>(record)));
    const auto* pairs = reinterpret_cast<const uint64_t*>(record + p.pairs_at);
    const float* weights = records.weights_at(i) + rec.first_pair;
    HEP_NO_UNROLL
    for (uint32_t k = 0; k < rec.num_pairs; ++k) {
      const auto pair = std::bit_cast<PairEntry>(records.load(pairs + k));
      if (!p.plan.has_row(pair)) continue;
      const float scale = p.multiply ? records.load(weights + k) : 1.f;
      feed.add({p.x + uint64_t(pair.row) * feed.payload_row_bytes(), nullptr, scale});
      a.did(LoopStep::kSumPair);
    }
  }
};

}  // namespace hep
