// Weights of partials: gradients or probabilities of a receive row's pairs, into the last section of its partial.
#pragma once
#include "common/bugs.h"
#include "roles/partial_groups.h"

namespace hep {

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
    a.set_role(Role::kPackWeights);
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
