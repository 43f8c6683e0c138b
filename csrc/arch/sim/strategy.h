// Who goes next. Everything that can move is an actor: a lane, the bulk loads of a rank, a rail from one rank to
// another. A strategy looks at the ready actors and picks one; it is a pure function of its seed and of what it
// was shown, so a seed is an interleaving.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "arch/host/rng.h"

namespace hep::sim {

class Machine;

enum class StrategyKind : uint8_t {
  kRandom,       // uniform
  kPct,          // random priorities, lowered at `depth` random steps
  kStarveRole,   // actors of one role go only when nothing else can
  kStarveRank,   // one rank is slow
  kStarveRail,   // one directed rail is slow
  kStarveChunk,  // messages of one ring slot are slow
  kLate,         // nothing asynchronous completes before every lane waits
  kPause,        // one rank after another stands still for a while
};
StrategyKind parse_strategy(const std::string& name);
const char* strategy_name(StrategyKind kind);
inline constexpr int kNumStrategies = 8;

class Strategy {
 public:
  Strategy(StrategyKind kind, uint64_t seed, const Machine& machine);
  uint32_t pick(const std::vector<uint32_t>& ready);
  // After each visible operation of a lane: may another actor go first?
  bool preempts();
  bool starves_chunk(uint32_t slot) const { return kind_ == StrategyKind::kStarveChunk && slot == target_; }
  host::Rng& rng() { return rng_; }

 private:
  bool starves(uint32_t actor) const;
  uint64_t& priority(uint32_t actor);

  StrategyKind kind_;
  host::Rng rng_;
  const Machine& machine_;
  uint32_t target_ = 0, preempt_one_in_ = 8;
  uint64_t step_ = 0, next_change_ = 0, span_ = 0, low_ = 1u << 20;
  std::vector<uint64_t> priorities_;
};

}  // namespace hep::sim
