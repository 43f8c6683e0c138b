// Unpermute: this rank's experts' outputs -> one partial per receive row, in its own receive rows, but for those whose
// readers read the outputs themselves (layout/reading.h). Its last section, the pairs' weights or their gradients, is
// another warp's (roles/pack_weights.h).
#pragma once
#include "common/bugs.h"
#include "roles/partial_groups.h"
#include "roles/sum_feed.h"

namespace hep {

template <Arch A>
struct UnpermuteRole {
  A& a;
  const CombineParams& p;
  SumFeed<A>& feed;
  PartialGroups<A> groups;

  HEP_DEVICE UnpermuteRole(A& arch, const CombineParams& params, SumFeed<A>& to, const std::byte* smem)
      : a(arch), p(params), feed(to), groups(arch, params, smem) {}

  HEP_DEVICE void run(uint32_t worker, uint32_t workers) {
    a.set_role("unpermute_g2s");
    if (p.reading.from == SumFrom::kReceiveRow) return;
    uint64_t partials = 0;
    groups.each(worker, workers, [&](uint32_t group, uint32_t source) {
      const SumEnd told{.flags = SumHead::kGroupEnd, .peer = source, .chunk = group};
      const uint32_t end = groups.end_of(group);
      bool formed = false, untold = false;
      Record next = record(group * BufferLayout::kGroupRows);
      for (uint32_t i = group * BufferLayout::kGroupRows; i < end; ++i) {
        const Record now = next;
        if (i + 1 < end) next = record(i + 1);  // on its way while this one's row is formed
        formed = row(i, now, i + 1 == end ? told : SumEnd{});
        untold |= formed;
        partials += formed;
      }
      if (untold && !formed) feed.emit_end(told);
    });
    if (partials) a.count_rank(&p.traffic->partial_rows, partials);
  }

 private:
  struct Record {  // of a receive row: how it begins, and its first pair, for which it has room
    Vec16 header;
    uint64_t pair;
  };
  HEP_DEVICE const unsigned char* record_at(uint32_t i) const {
    return p.plan.row_records + uint64_t(i) * p.record_bytes;
  }
  HEP_DEVICE Record record(uint32_t i) const {
    if (!p.permuted) return {};
    const unsigned char* const at = record_at(i);
    return {*reinterpret_cast<const Vec16*>(at), *reinterpret_cast<const uint64_t*>(at + p.pairs_at)};
  }
  HEP_DEVICE bool row(uint32_t i, const Record& record, const SumEnd& end) {
    unsigned char* dst = p.recv + uint64_t(i + injected(Bug::kPartialsOneRowOff)) * p.partial.row_bytes();
    feed.begin();
    a.did(LoopStep::kSumPartial);
    if (p.permuted)
      add_pairs(i, record);
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
  HEP_DEVICE void add_pairs(uint32_t i, const Record& record) {
    const auto* pairs = reinterpret_cast<const uint64_t*>(record_at(i) + p.pairs_at);
    const auto rec = std::bit_cast<RecordHeader>(record.header);
    const float* weights = p.plan.row_weights + uint64_t(i) * p.plan.weight_stride + rec.first_pair;
    uint64_t next = record.pair;
    HEP_NO_UNROLL
    for (uint32_t k = 0; k < rec.num_pairs; ++k) {
      const auto pair = std::bit_cast<PairEntry>(next);
      if (k + 1 < rec.num_pairs) next = pairs[k + 1];  // on its way while this one is listed
      if (!p.plan.has_row(pair)) continue;
      const float scale = p.multiply ? weights[k] : 1.f;
      feed.add({p.x + uint64_t(pair.row) * feed.payload_row_bytes(), nullptr, scale});
      a.did(LoopStep::kSumPair);
    }
  }
};

}  // namespace hep
