// What no plan beats, by the size of clones alone; hybrid_ep/balance/bounds.py has the same to read.
#include <algorithm>
#include <numeric>

#include "balance/microbatch.h"

namespace hep::balance {

ClonesFit::ClonesFit(int num_ranks, int spare_slots, const int64_t* load, int num_experts, const int32_t* home)
    : spare_slots_(spare_slots), rank_load_(num_ranks), by_place_(num_experts) {
  std::vector<int> order(num_ranks), place(num_ranks);
  for (int e = 0; e < num_experts; ++e) rank_load_[home[e]] += load[e];
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rank_load_[a] < rank_load_[b]; });
  for (int i = 0; i < num_ranks; ++i) place[order[i]] = i;
  std::sort(rank_load_.begin(), rank_load_.end());
  for (int e = 0; e < num_experts; ++e) by_place_[e] = {place[home[e]], load[e]};
  std::sort(by_place_.begin(), by_place_.end());
  sum_ = std::accumulate(rank_load_.begin(), rank_load_.end(), int64_t(0));
}

// The k emptiest ranks can only be filled by k * spare slots clones of other ranks' experts, each no more than the
// expert has and than the emptiest rank has room for; what is left over has the other ranks to go to.
bool ClonesFit::allows(int64_t limit) {
  const int R = int(rank_load_.size());
  const int64_t room = limit - rank_load_[0];
  size_t first = 0;  // expert of a rank that is not among the k emptiest
  int64_t below = 0;
  for (int k = 1; k < R && rank_load_[k - 1] < limit; ++k) {
    below += rank_load_[k - 1];
    const int64_t need = sum_ - (R - k) * limit - below, clones = int64_t(k) * spare_slots_;
    while (first < by_place_.size() && by_place_[first].first < k) ++first;
    if (need <= 0) continue;
    int64_t whole = 0;
    rest_.clear();
    for (size_t i = first; i < by_place_.size(); ++i) {
      whole += by_place_[i].second / room;
      rest_.push_back(by_place_[i].second % room);
    }
    int64_t filled = std::min(whole, clones) * room;
    const size_t parts = size_t(std::clamp<int64_t>(clones - whole, 0, int64_t(rest_.size())));
    if (parts && parts < rest_.size())
      std::nth_element(rest_.begin(), rest_.begin() + parts, rest_.end(), std::greater<int64_t>());
    filled = std::accumulate(rest_.begin(), rest_.begin() + parts, filled);
    if (need > filled) return false;
  }
  return true;
}

int64_t ClonesFit::least() {
  const int64_t R = int64_t(rank_load_.size());
  int64_t low = (sum_ + R - 1) / R, high = rank_load_.back();
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (allows(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

}  // namespace hep::balance
