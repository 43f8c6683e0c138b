// Unpermute: this rank's experts' outputs -> one partial per receive row, in its own receive rows, but for those whose
// readers read the outputs themselves (layout/reading.h). The weights (or their gradients) of the row's pairs go into
// the partial's last section. Group by group, in their readers' order, who are told of each (pipeline/partial_flags.h).
#pragma once
#include "common/bugs.h"
#include "roles/group_walk.h"
#include "roles/sum_feed.h"

namespace hep {

// Groups of receive rows of one worker of a combine.
template <Arch A>
struct PartialGroups {
  A& a;
  const CombineParams& p;
  const uint32_t* begins;  // see GroupWalk
  const uint32_t rows;

  HEP_DEVICE PartialGroups(A& arch, const CombineParams& params, const std::byte* smem)
      : a(arch),
        p(params),
        begins(reinterpret_cast<const uint32_t*>(smem + params.source_begins_at)),
        rows(params.plan.numbers->recv_rows) {}

  template <class F>
  HEP_DEVICE void each(uint32_t worker, uint32_t workers, F&& f) const {
    GroupWalk<A>{a, begins, uint32_t(p.world.num_ranks()), worker, workers}.template run<true>(f);
  }
  HEP_DEVICE uint32_t end_of(uint32_t group) const {
    const uint32_t end = (group + 1) * BufferLayout::kGroupRows;
    return end < rows ? end : rows;
  }
  // Its part is written. Readers are the sources' rail peers here: those of all that have a row of it. None behind
  // `source` has.
  HEP_DEVICE void tell(PartialFlags::Part part, uint32_t group, uint32_t source, uint64_t epoch) const {
    const uint32_t end = end_of(group), last = uint32_t(p.world.num_ranks()) - 1;
    while (source > 0 && a.ld_shared(begins + source) > group * BufferLayout::kGroupRows) --source;  // of the first row
    uint32_t s = source;
    while (s < last && a.ld_shared(begins + s + 1) < end && !injected(Bug::kPartialsToOneReader)) ++s;
    const int readers = int(s - source) + 1, most = p.world.num_local_ranks;
    p.partials.tell(a, part, group, source, readers < most ? readers : most, epoch);
  }
};

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
      for (uint32_t i = group * BufferLayout::kGroupRows; i < end; ++i) {
        formed = row(i, i + 1 == end ? told : SumEnd{});
        untold |= formed;
        partials += formed;
      }
      if (untold && !formed) feed.emit_end(told);
    });
    if (partials) a.count_rank(&p.traffic->partial_rows, partials);
  }

 private:
  HEP_DEVICE bool row(uint32_t i, const SumEnd& end) {
    unsigned char* dst = p.recv + uint64_t(i + injected(Bug::kPartialsOneRowOff)) * p.partial.row_bytes();
    feed.begin();
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
    const auto* rec = reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.record_bytes);
    const PairEntry* pairs = p.pairs_of(rec);
    const float* weights = p.plan.row_weights + uint64_t(i) * p.plan.weight_stride + rec->first_pair;
    for (uint32_t k = 0; k < rec->num_pairs; ++k) {
      if (!p.plan.has_row(pairs[k])) continue;
      const float scale = p.multiply ? weights[k] : 1.f;
      feed.add({p.x + uint64_t(pairs[k].row) * feed.payload_row_bytes(), nullptr, scale});
    }
  }
};

// Gradients or probabilities of the row's pairs into its partial: slot k of the token belongs to pair k of the
// token, so rows of different ranks add up without meeting.
template <Arch A>
struct PackWeightsRole {
  // Lanes side by side in a row's slots; the others have other rows.
  static constexpr uint32_t kAcross = A::kLanes < 8 ? A::kLanes : 8;

  A& a;
  const CombineParams& p;
  PartialGroups<A> groups;

  HEP_DEVICE PackWeightsRole(A& arch, const CombineParams& params, const std::byte* smem)
      : a(arch), p(params), groups(arch, params, smem) {}

  // By all lanes of a warp; `elected` of them tells.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers, bool elected) {
    a.set_role("pack_weights");
    if (!p.partial.weight_bytes) return;
    const uint64_t epoch = elected ? p.gate.epoch() : 0;  // the others may still be here when the operation has ended
    const uint32_t lane = uint32_t(a.lane());
    groups.each(worker, workers, [&](uint32_t group, uint32_t source) {
      const uint32_t end = groups.end_of(group);
      for (uint32_t i = group * BufferLayout::kGroupRows + lane / kAcross; i < end; i += A::kLanes / kAcross)
        row(i, lane % kAcross);
      a.warp_sync();
      if (elected) groups.tell(PartialFlags::kWeights, group, source, epoch);
    });
  }

 private:
  HEP_DEVICE void row(uint32_t i, uint32_t first_slot) {
    auto* slots = reinterpret_cast<float*>(p.recv + uint64_t(i) * p.partial.row_bytes() + p.partial.weights_at());
    const auto* rec = reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.record_bytes);
    const PairEntry* pairs = p.pairs_of(rec);
    const uint32_t begin = injected(Bug::kWeightsInFirstPairs) ? 0 : rec->first_pair, n = rec->num_pairs;
    for (uint32_t slot = first_slot; slot < p.partial.weight_bytes / 4; slot += kAcross) {
      float weight = 0;
      if (const uint32_t k = slot - begin; k < n) {
        if (!p.permuted)
          weight = p.x_weights[uint64_t(i) * p.num_node_experts + uint32_t(pairs[k].expert) - p.first_node_expert];
        else if (p.plan.has_row(pairs[k]))
          weight = p.x_weights[pairs[k].row];
      }
      a.st_global(slots + slot, weight);
    }
  }
};

}  // namespace hep
