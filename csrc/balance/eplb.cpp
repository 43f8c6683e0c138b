// DeepSeek's published placement (EPLB), written anew from its description, in the arithmetic that it is published in:
// float32 shares, sums added in the order of packing, the first of equals. Fresh placements are measured against it, so
// it has to be this one, to the last bit; sums of groups come from the caller, because their order is the caller's
// library's. Nothing keeps two replicas of an expert off one rank.
#include <algorithm>
#include <numeric>

#include "balance/placement.h"

namespace hep::balance {
namespace {

struct Packed {
  std::vector<int> pack, position;
};

// The heaviest item first into the lightest of the packs that have room, all packs with equally many items.
Packed pack(const std::vector<float>& weight, int num_packs) {
  const int n = int(weight.size()), room = n / num_packs;
  Packed p{std::vector<int>(n), std::vector<int>(n)};
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  if (room == 1) {
    p.pack = order;
    return p;
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weight[a] > weight[b]; });
  std::vector<float> load(num_packs);
  std::vector<int> used(num_packs), heap(num_packs);
  std::iota(heap.begin(), heap.end(), 0);
  const auto after = [&](int a, int b) { return load[a] != load[b] ? load[a] > load[b] : a > b; };
  for (int item : order) {
    std::pop_heap(heap.begin(), heap.end(), after);
    const int to = heap.back();
    p.pack[item] = to;
    p.position[item] = used[to]++;
    load[to] += weight[item];
    if (used[to] == room)
      heap.pop_back();
    else
      std::push_heap(heap.begin(), heap.end(), after);
  }
  return p;
}

// Every extra slot goes to the expert whose replica carries most.
std::vector<int> replicate(const std::vector<float>& weight, int num_slots, std::vector<float>& share) {
  const int n = int(weight.size());
  std::vector<int> expert(num_slots), count(n, 1), heap(n);
  std::iota(expert.begin(), expert.begin() + n, 0);
  std::iota(heap.begin(), heap.end(), 0);
  share = weight;
  const auto after = [&](int a, int b) { return share[a] != share[b] ? share[a] < share[b] : a > b; };
  std::make_heap(heap.begin(), heap.end(), after);
  for (int slot = n; slot < num_slots; ++slot) {
    std::pop_heap(heap.begin(), heap.end(), after);
    const int e = expert[slot] = heap.back();
    share[e] = weight[e] / float(++count[e]);
    std::push_heap(heap.begin(), heap.end(), after);
  }
  return expert;
}

}  // namespace

void eplb(const PlacementShape& shape, const float* load, const float* group_load, int32_t* phy2log) {
  const int E = shape.num_experts, G = std::max(shape.num_groups, 1), N = shape.num_groups ? shape.num_nodes : 1;
  const int size = E / G, per_node = E / N, slots = shape.num_slots / N, ranks = shape.num_ranks / N;
  const Packed groups = pack(std::vector<float>(group_load, group_load + G), N);
  std::vector<int> experts(E);  // in the order of nodes
  for (int g = 0; g < G; ++g) {
    const int first = (groups.pack[g] * (G / N) + groups.position[g]) * size;
    std::iota(&experts[first], &experts[first] + size, g * size);
  }
  for (int n = 0; n < N; ++n) {
    const int* mine = &experts[n * per_node];
    std::vector<float> weight(per_node), share, of_slot(slots);
    std::transform(mine, mine + per_node, weight.begin(), [&](int e) { return load[e]; });
    const std::vector<int> expert = replicate(weight, slots, share);
    std::transform(expert.begin(), expert.end(), of_slot.begin(), [&](int e) { return share[e]; });
    const Packed packed = pack(of_slot, ranks);
    for (int i = 0; i < slots; ++i)
      phy2log[n * slots + packed.pack[i] * (slots / ranks) + packed.position[i]] = mine[expert[i]];
  }
}

}  // namespace hep::balance
