// What one rank has to do of a plan, so that nobody searches the plan again: which of its tokens go to clones, and
// which weights it sends or receives.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "balance/microbatch.h"

namespace hep::balance {

RankPart part_of_rank(const MicrobatchShape& shape, const int64_t* counts, const int32_t* owner, const int64_t* columns,
                      const int32_t* slot_expert, const int64_t* slot_tokens, int rank) {
  const int R = shape.num_ranks, E = shape.num_experts, S = shape.spare_slots;
  if (E % R != 0)
    throw std::invalid_argument("num_experts: " + std::to_string(E) + " must be a multiple of the " +
                                std::to_string(R) + " ranks: all have as many columns");
  const int owners = E / R;
  RankPart part;
  std::vector<int32_t> clones, pushed(size_t(R), 0);
  for (int i = 0; i < R * S; ++i) {
    const int expert = slot_expert[i];
    if (expert < 0) continue;
    const int nth = pushed[size_t(owner[expert])]++;
    if (i / S == rank || owner[expert] == rank) part.pushes.push_back({expert, owner[expert], i / S, i % S, nth});
  }
  std::vector<int64_t> take(size_t(R) * size_t(S)), first(take.size());
  share_of_source(shape, counts, owner, slot_expert, slot_tokens, rank, take.data(), first.data());
  for (int i = 0; i < R * S; ++i)
    if (take[size_t(i)] > 0) clones.push_back(i);
  std::stable_sort(clones.begin(), clones.end(), [&](int x, int y) { return slot_expert[x] < slot_expert[y]; });
  for (size_t begin = 0, end = 0; begin < clones.size(); begin = end) {
    const int64_t expert = slot_expert[clones[begin]];
    int64_t column = columns[expert];
    for (; end < clones.size() && slot_expert[clones[end]] == expert; ++end) {
      const int slot = clones[end];
      const int64_t next = int64_t(slot / S) * (owners + S) + owners + slot % S;
      part.redirects.push_back({expert, first[size_t(slot)], next - column});
      column = next;
    }
  }
  return part;
}

}  // namespace hep::balance
