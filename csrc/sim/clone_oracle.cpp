// Owners that move, the core's plan, and tokens spread over instances one by one.
#include "sim/clone_oracle.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "balance/microbatch.h"

namespace hep::sim {
namespace {

struct Instance {
  int rank;
  int64_t column, room;
};

// Each source in turn gives each instance in turn what one has left and the other has room for.
void give_all(const std::vector<size_t>& sources, const std::vector<size_t>& instances, std::vector<int64_t>& left,
              std::vector<Instance>& to, std::vector<std::vector<int64_t>>& given) {
  for (const size_t source : sources)
    for (const size_t i : instances) {
      const int64_t n = std::min(left[source], to[i].room);
      left[source] -= n;
      to[i].room -= n;
      given[source][i] += n;
    }
}

}  // namespace

CloneShape clone_shape_of(const WorldSpec& s) {
  CloneShape shape;
  shape.num_ranks = int(s.num_ranks());
  shape.num_experts = int(s.num_logical_experts());
  shape.spare_slots = int(s.spare_slots);
  shape.num_nodes = int(s.num_nodes);
  shape.within_node = s.clones_within_node;
  shape.near = mix(s.data_seed, 36) % 2;
  shape.epsilon_ppm = s.data_seed % 2 ? 10'000 : 0;
  shape.skip_below_ppm = s.data_seed % 3 ? 0 : 30'000;
  shape.search_nodes = 50;
  return shape;
}

SpareShape spare_shape_of(const WorldSpec& s) {
  SpareShape shape;
  shape.spare_slots = s.spare_slots;
  shape.num_owners = s.owners_per_rank();
  shape.element_bytes = DType(s.dtype) == DType::kFp32 ? 4 : 2;
  shape.num_matrices = 1 + uint32_t(mix(s.data_seed, 31) % 3);
  static constexpr uint64_t kElements[] = {8, 16, 40, 264};
  for (uint32_t m = 0; m < shape.num_matrices; ++m) shape.elements[m] = kElements[mix(s.data_seed, 32, m) % 4];
  static constexpr uint32_t kChunks[] = {48, 64, 512};
  shape.rail_chunk_bytes = s.clones_within_node && mix(s.data_seed, 33) % 2 ? 0 : kChunks[mix(s.data_seed, 34) % 3];
  shape.rail_slots = 1 << mix(s.data_seed, 35) % 5;
  return shape;
}

CloneOracle::CloneOracle(const WorldSpec& s, uint32_t plan, const RoutingDecision& logical) : physical(logical) {
  place_owners(s, plan);
  plan_clones(s, logical);
  for (size_t e = 0; e < columns.size(); ++e) {
    const std::vector<std::vector<int64_t>> of_source = columns_of_tokens(s, e);
    for (size_t r = 0; r < of_source.size(); ++r) {
      size_t number = 0;  // of tokens that name the expert, once or several times
      for (size_t token = 0; token < logical.num_tokens[r]; ++token) {
        bool named = false;
        for (size_t k = token * s.topk; k < (token + 1) * s.topk; ++k)
          if (logical.topk_idx[r][k] == int64_t(e)) {
            physical.topk_idx[r][k] = of_source[r][number];
            named = true;
          }
        number += named;
      }
    }
  }
}

// Owners of half the plans are where they were at first.
void CloneOracle::place_owners(const WorldSpec& s, uint32_t plan) {
  std::vector<int64_t> slots(s.num_logical_experts());
  std::iota(slots.begin(), slots.end(), 0);
  host::Rng rng(mix(s.data_seed, plan, 33));
  if (rng.one_in(2))
    for (size_t e = slots.size() - 1; e > 0; --e) std::swap(slots[e], slots[rng.below(uint32_t(e) + 1)]);
  for (const int64_t slot : slots) columns.push_back(slot + slot / s.owners_per_rank() * s.spare_slots);
}

void CloneOracle::plan_clones(const WorldSpec& s, const RoutingDecision& d) {
  const size_t experts = columns.size();
  counts.assign(s.num_ranks() * experts, 0);
  for (size_t r = 0; r < d.num_tokens.size(); ++r)
    for (size_t token = 0; token < d.num_tokens[r]; ++token) {
      const auto* const row = d.topk_idx[r].data() + token * s.topk;
      for (uint32_t k = 0; k < s.topk; ++k)
        if (row[k] >= 0 && std::find(row, row + k, row[k]) == row + k) ++counts[r * experts + size_t(row[k])];
    }
  std::vector<int32_t> owner;
  for (const int64_t column : columns) owner.push_back(int32_t(column / s.experts_per_rank));
  slot_expert.assign(s.num_ranks() * s.spare_slots, -1);
  slot_tokens.assign(slot_expert.size(), 0);
  const balance::MicrobatchShape shape{clone_shape_of(s)};
  balance::MicrobatchPlanner(shape).plan(counts.data(), owner.data(), slot_expert.data(), slot_tokens.data());
}

// By source, the column of each of its tokens for the expert, in their order: those for the owner come first, then
// those of its clones by slot.
std::vector<std::vector<int64_t>> CloneOracle::columns_of_tokens(const WorldSpec& s, size_t expert) const {
  const size_t ranks = s.num_ranks(), experts = columns.size();
  std::vector<int64_t> left(ranks);
  for (size_t r = 0; r < ranks; ++r) left[r] = counts[r * experts + expert];
  std::vector<Instance> to{{int(columns[expert] / s.experts_per_rank), columns[expert],
                            std::accumulate(left.begin(), left.end(), int64_t(0))}};
  for (size_t j = 0; j < slot_expert.size(); ++j) {
    if (slot_expert[j] != int32_t(expert)) continue;
    const size_t rank = j / s.spare_slots;
    to.push_back(
        {int(rank), int64_t(rank * s.experts_per_rank + s.owners_per_rank() + j % s.spare_slots), slot_tokens[j]});
    to[0].room -= slot_tokens[j];
  }
  std::vector<size_t> in_order(to.size());  // by rank, on the owner's rank the owner first
  std::iota(in_order.begin(), in_order.end(), size_t(0));
  std::ranges::stable_sort(in_order, {}, [&](size_t i) { return to[i].rank; });
  std::vector<std::vector<int64_t>> given(ranks, std::vector<int64_t>(to.size(), 0));
  for (const size_t group : {size_t(1), size_t(s.num_local_ranks), ranks})  // one's own, those of the node, all
    for (size_t first = 0; first < ranks; first += group) {
      std::vector<size_t> sources(group), near;
      std::iota(sources.begin(), sources.end(), first);
      for (const size_t i : in_order)
        if (size_t(to[i].rank) / group * group == first) near.push_back(i);
      give_all(sources, near, left, to, given);
    }
  std::vector<std::vector<int64_t>> found(ranks);
  for (size_t r = 0; r < ranks; ++r)
    for (size_t i = 0; i < to.size(); ++i) found[r].insert(found[r].end(), size_t(given[r][i]), to[i].column);
  return found;
}

}  // namespace hep::sim
