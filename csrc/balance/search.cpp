// Where the constructions miss the target with one spare slot a rank: who clones what, searched in depth. Room below
// the target is a deficit, tokens above it an overload. A clone on rank r lets r's deficit flow to the expert's owner,
// as much of it as the expert has tokens; there it cancels overload, or becomes the owner's deficit and flows on along
// the owner's clone. What finds no way is stuck; all that is stuck must fit the slack, ranks * target - tokens. The
// largest deficit goes first, and each has two tries: the two experts that leave least stuck and open least deficit at
// their owners. hybrid_ep/balance/one_clone.py tries all experts, which proves what no plan can do, and takes longer.
#include <algorithm>

#include "balance/microbatch.h"

namespace hep::balance {
namespace {

constexpr int32_t kNone = -1;
constexpr int kTries = 2;

}  // namespace

bool MicrobatchPlanner::searchable() const {
  const MicrobatchShape& s = shape_;
  return s.search_nodes && s.spare_slots == 1 && s.tile == 1 && s.min_chunk == 1 && !s.instance_cost && !s.fan_out &&
         !s.within_node;
}

// A rank's deficit moves along clones until it cancels overload, waits at a rank without a clone, or sticks. Around a
// cycle of clones nothing leaves, so one turn is enough.
void MicrobatchPlanner::flow(Search& s, const int32_t* owner, int rank) const {
  for (int hop = 0; hop < shape_.num_ranks && s.clone[rank] != kNone && s.deficit[rank] > 0; ++hop) {
    const int expert = s.clone[rank];
    const int64_t tokens = std::min(s.deficit[rank], s.left[expert]);
    s.flows.push_back({rank, tokens});
    s.left[expert] -= tokens;
    s.moved[rank] += tokens;
    s.deficit[rank] -= tokens;
    rank = owner[expert];
    s.deficit[rank] += tokens;
  }
}

void MicrobatchPlanner::take_back(Search& s, const int32_t* owner, size_t mark) const {
  for (; s.flows.size() > mark; s.flows.pop_back()) {
    const auto [rank, tokens] = s.flows.back();
    const int expert = s.clone[rank];
    s.deficit[owner[expert]] -= tokens;
    s.left[expert] += tokens;
    s.moved[rank] -= tokens;
    s.deficit[rank] += tokens;
  }
}

bool MicrobatchPlanner::descend(Search& s, const int32_t* owner) const {
  if (++s.nodes > shape_.search_nodes) return false;
  int64_t stuck = 0;
  int rank = -1;
  bool level = true;
  for (int r = 0; r < shape_.num_ranks; ++r) {
    if (s.deficit[r] < 0)
      level = false;
    else if (s.clone[r] != kNone)
      stuck += s.deficit[r];
    else if (s.deficit[r] > 0 && (rank < 0 || s.deficit[r] > s.deficit[rank]))
      rank = r;
  }
  if (level) return true;
  if (rank < 0 || stuck > s.slack) return false;

  struct Way {
    int64_t price = 0, left = 0;
    int expert = kNone;
  } ways[kTries];
  for (int e = 0; e < shape_.num_experts; ++e) {
    const int64_t flows = std::min(s.left[e], s.deficit[rank]), sticks = s.deficit[rank] - flows;
    if (!flows || owner[e] == rank || stuck + sticks > s.slack) continue;
    const int64_t there = s.deficit[owner[e]];
    const int64_t opens = std::max<int64_t>(0, there + flows) - std::max<int64_t>(0, there);
    Way way{2 * sticks + opens, s.left[e], e};
    for (Way& kept : ways)  // by price, the larger expert first
      if (kept.expert == kNone || way.price < kept.price || (way.price == kept.price && way.left > kept.left))
        std::swap(way, kept);
  }
  const size_t mark = s.flows.size();
  for (const Way& way : ways) {
    if (way.expert == kNone) break;
    s.clone[rank] = way.expert;
    flow(s, owner, rank);
    if (descend(s, owner)) return true;
    take_back(s, owner, mark);
  }
  s.clone[rank] = kNone;
  return false;
}

void MicrobatchPlanner::search(Draft& d, const int32_t* owner) {
  const int R = shape_.num_ranks;
  Search& s = search_;
  s.left = total_;
  s.nodes = 0;
  s.slack = target_ * R;
  s.clone.assign(R, kNone);
  s.moved.assign(R, 0);
  s.deficit.resize(R);
  s.flows.clear();
  for (int r = 0; r < R; ++r) {
    s.deficit[r] = target_ - load_[r];
    s.slack -= load_[r];
  }
  d.clones.clear();
  d.max_cost = *std::max_element(load_.begin(), load_.end());
  // Nothing to look for where the bound forbids it.
  if (!ClonesFit(R, shape_.spare_slots, total_.data(), shape_.num_experts, owner).allows(target_)) return;
  if (!descend(s, owner)) return;
  for (int r = 0; r < R; ++r)
    if (s.moved[r]) d.clones.push_back({s.clone[r], r, 0, s.moved[r]});
  if (int(d.clones.size()) > max_copies_)
    d.clones.clear();
  else
    d.max_cost = target_ - *std::min_element(s.deficit.begin(), s.deficit.end());
}

}  // namespace hep::balance
