// Routing of a caller, before and behind its clones.
#include "sim/caller_routing.h"

#include <utility>

namespace hep::sim {

CallerRouting::CallerRouting(const WorldSpec& s, const RoutingDecision& d, size_t r) {
  in.num_tokens = d.num_tokens[r];
  in.topk = s.topk;
  static constexpr int64_t kNothing = 0;
  if (!s.dense) {
    in.topk_idx = d.topk_idx[r].empty() ? &kNothing : d.topk_idx[r].data();
    in.weights = d.topk_weights[r].data();
    return;
  }
  const uint64_t experts = s.num_logical_experts();
  map_.assign(uint64_t(in.num_tokens) * experts + 1, 0);
  probs_.assign(map_.size(), 0.f);
  for (uint64_t i = 0; i < d.topk_idx[r].size(); ++i)
    if (const int64_t e = d.topk_idx[r][i]; e >= 0) {
      map_[i / s.topk * experts + uint64_t(e)] = 1;
      probs_[i / s.topk * experts + uint64_t(e)] += d.topk_weights[r][i];
    }
  in.routing_map = map_.data();
  in.weights = probs_.data();
}

void CallerRouting::rewrite(const WorldSpec& s, const SlotRouting& slots) {
  if (!s.dense) {
    in.topk_idx = slots.topk_idx.data();
    return;
  }
  const uint64_t experts = s.num_logical_experts(), width = s.num_experts();
  std::vector<float> over_slots(uint64_t(in.num_tokens) * width + 1, 0.f);
  for (uint64_t i = 0; i < uint64_t(in.num_tokens) * experts; ++i)
    if (map_[i]) over_slots[i / experts * width + uint64_t(slots.columns[i])] = probs_[i];
  probs_ = std::move(over_slots);
  in.routing_map = slots.map.data();
  in.weights = probs_.data();
}

}  // namespace hep::sim
