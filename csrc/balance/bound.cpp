// What no plan beats, by what clones can hold; hybrid_ep/balance/bounds.py has the same to read.
#include <algorithm>
#include <functional>
#include <numeric>

#include "balance/microbatch.h"

namespace hep::balance {
namespace {

constexpr int kMostHot = 8;   // hottest ranks that are priced together
constexpr int64_t kFull = 8;  // price of a token on the other ranks; on cold ones it is 0, on hot ones 1 to 7

}  // namespace

ClonesFit::ClonesFit(int num_ranks, int spare_slots, const int64_t* load, int num_experts, const int32_t* owner)
    : spare_slots_(spare_slots), rank_load_(num_ranks), by_place_(num_experts) {
  std::vector<int> order(num_ranks), place(num_ranks);
  for (int e = 0; e < num_experts; ++e) rank_load_[owner[e]] += load[e];
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rank_load_[a] < rank_load_[b]; });
  for (int i = 0; i < num_ranks; ++i) place[order[i]] = i;
  std::sort(rank_load_.begin(), rank_load_.end());
  for (int e = 0; e < num_experts; ++e) by_place_[e] = {place[owner[e]], load[e]};
  std::sort(by_place_.begin(), by_place_.end());
  sum_ = std::accumulate(rank_load_.begin(), rank_load_.end(), int64_t(0));
}

// The k emptiest ranks can only be filled by k * spare slots clones of other ranks' experts, each no more than the
// expert has and than the emptiest rank has room for; what is left over has the other ranks to go to. first: expert of
// a rank that is not among the k emptiest; below: tokens of these.
bool ClonesFit::slots_hold(int64_t limit, int k, size_t first, int64_t below) {
  const int R = int(rank_load_.size());
  if (rank_load_[k - 1] >= limit) return true;
  const int64_t need = sum_ - (R - k) * limit - below, clones = int64_t(k) * spare_slots_;
  if (need <= 0) return true;
  const int64_t room = limit - rank_load_[0];
  int64_t whole = 0;
  rest_.clear();
  for (size_t i = first; i < by_place_.size(); ++i) {
    const int64_t tokens = by_place_[i].second, times = tokens < room ? 0 : tokens / room;
    whole += times;
    rest_.push_back(tokens - times * room);
  }
  int64_t filled = std::min(whole, clones) * room;
  const size_t parts = size_t(std::clamp<int64_t>(clones - whole, 0, int64_t(rest_.size())));
  if (parts && parts < rest_.size())
    std::nth_element(rest_.begin(), rest_.begin() + parts, rest_.end(), std::greater<int64_t>());
  filled = std::accumulate(rest_.begin(), rest_.begin() + parts, filled);
  return need <= filled;
}

int64_t ClonesFit::raised_by_slots(int64_t limit) {
  size_t first = 0;
  int64_t below = 0;
  for (int k = 1; k < int(rank_load_.size()) && rank_load_[k - 1] < limit; ++k) {
    below += rank_load_[k - 1];
    while (first < by_place_.size() && by_place_[first].first < k) ++first;
    limit = least_that(limit, [&](int64_t l) { return slots_hold(l, k, first, below); });
  }
  return limit;
}

// The most that slots of cold and hot ranks can take off in price: of other ranks' experts a cold slot takes the whole,
// a hot one what is above the hot price; of hot ranks' experts a cold slot takes the hot price. The larger of the
// others go to cold ranks, so that only their number is open, and the sum is concave in it.
int64_t ClonesFit::most_priced(int64_t cold_slots, int64_t hot_slots, int64_t price) const {
  const auto at = [](const std::vector<int64_t>& sums, int64_t n) {
    return sums[std::min(n, int64_t(sums.size()) - 1)];
  };
  const auto taken = [&](int64_t n) {
    return price * (at(of_others_, n) + at(of_hot_, cold_slots - n)) + (kFull - price) * at(of_others_, n + hot_slots);
  };
  int64_t low = 0, high = cold_slots;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (taken(middle + 1) > taken(middle))
      low = middle + 1;
    else
      high = middle;
  }
  return taken(low);
}

// Experts in parts of no more than the limit, the largest first.
void ClonesFit::cut(int64_t limit) {
  if (limit == cut_at_) return;
  cut_at_ = limit;
  pieces_.clear();
  for (auto [place, tokens] : by_place_) {
    for (; tokens > limit; tokens -= limit) pieces_.emplace_back(place, limit);
    pieces_.emplace_back(place, tokens);
  }
  std::sort(pieces_.begin(), pieces_.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
}

// The largest experts mostly live on the hottest ranks. A rank that gives them away is cold itself, and its slots too
// must be filled, which counting what the cold ranks can hold does not see. So tokens get a price by rank: no plan pays
// more than the limit on every rank does, and clones can only take off so much. Of so many cold and hot ranks, and
// their tokens.
bool ClonesFit::drained_ranks_fill(int64_t limit, int cold, int64_t cold_load, int hot, int64_t hot_load) {
  const int R = int(rank_load_.size());
  if (rank_load_[R - hot] <= limit) return true;
  cut(limit);
  const size_t cold_slots = size_t(cold) * spare_slots_;
  const int64_t above = hot_load - hot * limit, others = sum_ - cold_load - hot_load - (R - cold - hot) * limit;
  // Linear in the price: the lowest and the highest one decide for all that cold slots hold enough, whosever experts.
  const int64_t enough = std::max(above + others * kFull, above * (kFull - 1) + others * kFull);
  if (enough <= 0) return true;
  int64_t whole = 0;
  size_t taken = 0;
  for (size_t i = 0; i < pieces_.size() && taken < cold_slots; ++i)
    if (pieces_[i].first >= cold) {
      whole += pieces_[i].second;
      ++taken;
    }
  if (above - whole + others * kFull <= 0 && (above - whole) * (kFull - 1) + others * kFull <= 0) return true;
  const size_t slots = cold_slots + size_t(hot) * spare_slots_;
  of_hot_.assign(1, 0);
  of_others_.assign(1, 0);
  for (const auto& [place, tokens] : pieces_) {
    auto& sums = place < R - hot ? of_others_ : of_hot_;
    if (place >= cold && sums.size() <= slots) sums.push_back(sums.back() + tokens);
    if (of_others_.size() > slots && of_hot_.size() > cold_slots) break;
  }
  for (int64_t price = 1; price < kFull; ++price)
    if (price * above + kFull * others > most_priced(int64_t(cold_slots), int64_t(slots - cold_slots), price))
      return false;
  return true;
}

int64_t ClonesFit::raised_by_drained_ranks(int64_t limit) {
  const int R = int(rank_load_.size());
  int64_t cold_load = 0;
  for (int cold = 1; cold < R && rank_load_[cold - 1] < limit; ++cold) {
    cold_load += rank_load_[cold - 1];
    int64_t hot_load = 0;
    for (int hot = 1; hot <= std::min(kMostHot, R - cold) && rank_load_[R - hot] > limit; ++hot) {
      hot_load += rank_load_[R - hot];
      limit = least_that(limit, [&](int64_t l) { return drained_ranks_fill(l, cold, cold_load, hot, hot_load); });
    }
  }
  return limit;
}

// From `limit` on the least that holds, if that does not; the fullest rank's tokens, without a plan, always do.
template <class Holds>
int64_t ClonesFit::least_that(int64_t limit, const Holds& holds) const {
  if (holds(limit)) return limit;
  int64_t low = limit + 1;
  for (int64_t above = rank_load_.back(); low < above;) {
    const int64_t middle = low + (above - low) / 2;
    if (holds(middle))
      above = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Each condition holds from some limit on, so that one is raised by one of them after the other. The counting of slots
// first, which costs less; mostly the other adds nothing to its limit.
int64_t ClonesFit::least() {
  const int64_t R = int64_t(rank_load_.size()), low = raised_by_slots((sum_ + R - 1) / R);
  return low == rank_load_.back() ? low : raised_by_drained_ranks(low);
}

}  // namespace hep::balance
