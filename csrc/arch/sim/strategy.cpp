// The strategies.
#include "arch/sim/strategy.h"

#include <stdexcept>

#include "arch/sim/machine.h"

namespace hep::sim {
namespace {

constexpr const char* kNames[kNumStrategies] = {"random",      "pct",          "starve_role", "starve_rank",
                                                "starve_rail", "starve_chunk", "late",        "pause"};
constexpr uint64_t kExpectedSteps = 4000;  // PCT: change points fall into the first so many steps
constexpr uint64_t kPauseSteps = 200;

}  // namespace

const char* strategy_name(StrategyKind kind) {
  return kNames[int(kind)];
}

StrategyKind parse_strategy(const std::string& name) {
  std::string known;
  for (int i = 0; i < kNumStrategies; ++i) {
    if (name == kNames[i]) return StrategyKind(i);
    known += std::string(i ? ", " : "") + kNames[i];
  }
  throw std::invalid_argument("strategy: '" + name + "' is none; choose one of " + known);
}

Strategy::Strategy(StrategyKind kind, uint64_t seed, const Machine& machine)
    : kind_(kind), rng_(seed ^ 0x5eed5eed5eedu), machine_(machine) {
  static constexpr uint32_t kOneIn[] = {2, 4, 8, 8, 16, 64};
  preempt_one_in_ = kOneIn[rng_.below(6)];
  target_ = uint32_t(rng_.below(1u << 20));
  if (kind == StrategyKind::kStarveChunk) target_ %= 4;
  if (kind == StrategyKind::kPct) {
    span_ = kExpectedSteps / (1 + rng_.below(16));  // change points, on average so far apart
    next_change_ = rng_.below(span_ + 1);
  }
}

bool Strategy::preempts() {
  return kind_ == StrategyKind::kPct || rng_.one_in(preempt_one_in_);
}

bool Strategy::starves(uint32_t actor) const {
  const Machine& m = machine_;
  switch (kind_) {
    case StrategyKind::kStarveRole:
      if (m.num_roles_seen() == 0) return false;
      return m.is_lane(actor) && m.lane_at(actor).role == m.role_seen(target_ % m.num_roles_seen());
    case StrategyKind::kStarveRank: return m.actor_rank(actor) == int(target_) % m.num_ranks();
    case StrategyKind::kStarveRail: return m.is_rail(actor) && actor % 3 == target_ % 3;
    case StrategyKind::kStarveChunk: return m.only_chunk(actor, target_);
    case StrategyKind::kLate: return !m.is_lane(actor);
    case StrategyKind::kPause: return m.actor_rank(actor) == int(target_ + step_ / kPauseSteps) % m.num_ranks();
    default: return false;
  }
}

uint64_t& Strategy::priority(uint32_t actor) {
  while (priorities_.size() <= actor) priorities_.push_back((1u << 21) + rng_.below(1u << 30));
  return priorities_[actor];
}

uint32_t Strategy::pick(const std::vector<uint32_t>& ready) {
  ++step_;
  const uint32_t n = uint32_t(ready.size());
  if (n == 1) return 0;
  if (kind_ == StrategyKind::kRandom) return uint32_t(rng_.below(n));
  if (kind_ == StrategyKind::kPct) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; ++i)
      if (priority(ready[i]) > priority(ready[best])) best = i;
    if (step_ < next_change_) return best;
    next_change_ = step_ + 1 + rng_.below(2 * span_ + 1);
    priority(ready[best]) = --low_;  // behind everybody, those lowered before included
    return best;
  }
  for (int tries = 0; tries < 6; ++tries)
    if (const uint32_t i = uint32_t(rng_.below(n)); !starves(ready[i])) return i;
  const uint32_t start = uint32_t(rng_.below(n));
  for (uint32_t i = 0; i < n; ++i)
    if (const uint32_t at = (start + i) % n; !starves(ready[at])) return at;
  return start;
}

}  // namespace hep::sim
