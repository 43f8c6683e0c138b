// Unpermute: this rank's experts' outputs -> one partial per receive row, in its own receive rows. The weights (or
// their gradients) of the row's pairs go into the partial's last section.
#pragma once
#include "common/bugs.h"
#include "roles/sum_feed.h"

namespace hep {

HEP_DEVICE const PairEntry* pairs_of(const CombineParams& p, const RecordHeader* rec) {
  return reinterpret_cast<const PairEntry*>(reinterpret_cast<const unsigned char*>(rec) + p.pairs_at);
}

template <Arch A>
struct UnpermuteRole {
  A& a;
  const CombineParams& p;
  SumFeed<A> feed;

  HEP_DEVICE UnpermuteRole(A& arch, const CombineParams& params, const StageFifo<A, SumHead>& fifo)
      : a(arch), p(params), feed(arch, params, fifo) {}

  HEP_DEVICE void run() {
    a.set_role("unpermute_g2s");
    for (uint32_t i = a.block_idx(); i < p.plan.numbers->recv_rows; i += a.num_blocks()) {
      unsigned char* dst = p.recv + uint64_t(i + injected(Bug::kPartialsOneRowOff)) * p.partial.row_bytes();
      auto rows = [&](auto&& add) {
        if (!p.permuted) return add(SumRow{p.x + uint64_t(i) * feed.payload_row_bytes()});
        const auto* rec = reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.record_bytes);
        const PairEntry* pairs = pairs_of(p, rec);
        for (uint32_t k = 0; k < rec->num_pairs; ++k) {
          if (!p.plan.has_row(pairs[k])) continue;
          const float w =
              p.multiply ? p.plan.row_weights[uint64_t(i) * p.plan.weight_stride + rec->first_pair + k] : 1.f;
          add(SumRow{p.x + uint64_t(pairs[k].row) * feed.payload_row_bytes(), w});
        }
      };
      feed.emit(rows, dst, 0, p.hidden, p.dtype, p.partial_dtype, p.multiply ? uint32_t(SumHead::kScaled) : 0u,
                SumHead{});
    }
    feed.stop();
  }
};

// Gradients or probabilities of the row's pairs into its partial: slot k of the token belongs to pair k of the
// token, so rows of different ranks add up without meeting.
template <Arch A>
struct PackWeightsRole {
  HEP_DEVICE static void run(A& a, const CombineParams& p) {
    a.set_role("pack_weights");
    if (!p.partial.weight_bytes) return;
    for (uint32_t i = a.block_idx() * A::kLanes + a.lane(); i < p.plan.numbers->recv_rows;
         i += a.num_blocks() * A::kLanes) {
      auto* slots = reinterpret_cast<float*>(p.recv + uint64_t(i) * p.partial.row_bytes() + p.partial.weights_at());
      for (uint32_t k = 0; k < p.partial.weight_bytes / 4; ++k) a.st_global(slots + k, 0.f);
      const auto* rec = reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.record_bytes);
      const PairEntry* pairs = pairs_of(p, rec);
      for (uint32_t k = 0; k < rec->num_pairs; ++k) {
        if (!p.permuted) {
          const uint64_t column = uint32_t(pairs[k].expert) - p.first_node_expert;
          a.st_global(slots + rec->first_pair + k, p.x_weights[uint64_t(i) * p.num_node_experts + column]);
        } else if (p.plan.has_row(pairs[k])) {
          const uint32_t slot = (injected(Bug::kWeightsInFirstPairs) ? 0 : rec->first_pair) + k;
          a.st_global(slots + slot, p.x_weights[pairs[k].row]);
        }
      }
    }
  }
};

}  // namespace hep
