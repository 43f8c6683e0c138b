#include "runtime/unlaunched.h"

#include <algorithm>
#include <span>
#include <vector>

#include "layout/count_notification.h"
#include "layout/headers.h"

namespace hep {
namespace {

class UnlaunchedExecutor final : public Executor {
 public:
  void exchange(const ExchangeParams& p, const LaunchSettings&) override {
    ++launches_;
    if (p.notification) notify(p);
  }
  void dispatch(DispatchParams&, const LaunchSettings&) override { ++launches_; }
  void combine(CombineParams&, const LaunchSettings&) override { ++launches_; }
  void balance(const BalanceParams&, const LaunchSettings&) override { ++launches_; }

 private:
  // Pairs by expert, and tokens by rank and by node, of this rank's routing: once a pair, a rank and a node.
  void count(const ExchangeParams& p) {
    const CountsLayout& c = p.layout;
    pairs_.assign(c.num_experts, 0), ranks_.assign(c.num_ranks, 0), nodes_.assign(c.num_nodes, 0);
    const uint32_t per_rank = c.num_experts / c.num_ranks, per_node = c.num_experts / c.num_nodes;
    for (uint32_t t = 0; t < p.num_tokens; ++t) {
      chosen_.clear();
      if (p.topk_idx)
        for (uint32_t k = 0; k < p.topk_in; ++k) {
          const int64_t expert = p.topk_idx[uint64_t(t) * p.topk_in + k];
          if (expert >= 0 && expert < int64_t(c.num_experts)) chosen_.push_back(uint32_t(expert));
        }
      else
        for (uint32_t e = 0; e < c.num_experts; ++e)
          if (p.routing_map[uint64_t(t) * c.num_experts + e]) chosen_.push_back(e);
      std::ranges::sort(chosen_);
      chosen_.erase(std::ranges::unique(chosen_).begin(), chosen_.end());
      for (size_t i = 0; i < chosen_.size(); ++i) {
        const uint32_t expert = chosen_[i];
        ++pairs_[expert];
        if (!i || chosen_[i - 1] / per_rank != expert / per_rank) ++ranks_[expert / per_rank];
        if (!i || chosen_[i - 1] / per_node != expert / per_node) ++nodes_[expert / per_node];
      }
    }
  }

  void notify(const ExchangeParams& p) {
    count(p);
    const CountNotification at = CountNotification::make(p.layout);
    const uint32_t ranks = at.num_ranks, own = uint32_t(p.world.rank);
    uint32_t* const words = CountNotification::word(p.notification);
    uint32_t permuted = 0;
    for (uint32_t e = 0; e < at.num_local_experts; ++e) {
      const uint32_t rows = ranks * pairs_[own * at.num_local_experts + e], pad = p.place.pad_multiple;
      const uint32_t padded = std::max(uint32_t(align_up(rows, pad)), p.place.pad_empty ? pad : 0);
      words[at.tokens_per_expert_at() + e] = rows;
      words[at.padded_at() + e] = padded;
      permuted += padded;
    }
    words[CountNotification::kPlaced] = 1;
    words[CountNotification::kRecvRows] = ranks * ranks_[own];
    words[CountNotification::kMaxRecvRows] = ranks * std::ranges::max(ranks_);
    words[CountNotification::kPermutedRows] = permuted;
    words[CountNotification::kOverflow] = words[CountNotification::kHasHoles] = 0;
    for (uint32_t r = 0; r < ranks; ++r) {
      std::ranges::copy(p.header, words + at.headers_at() + r * kCountHeaderWords);
      words[at.rank_rows_at() + r] = ranks * ranks_[r];
      words[at.source_rows_at() + r] = ranks_[own];
      words[at.dropped_at() + r] = 0;
    }
    for (uint32_t n = 0; n < at.num_nodes; ++n) words[at.from_nodes_at() + n] = nodes_[uint32_t(p.world.node())];
    *CountNotification::started(p.notification) = *CountNotification::ticket(p.notification) = p.notification_ticket;
  }

  std::vector<uint32_t> pairs_, ranks_, nodes_, chosen_;  // kept, so that no call pays for memory
};

}  // namespace

Executor::Maker make_unlaunched() {
  return [](unsigned char* const*, uint64_t) { return std::make_unique<UnlaunchedExecutor>(); };
}

}  // namespace hep
