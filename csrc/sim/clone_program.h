// A simulated rank's part in exact balancing: clones planned with all ranks and its routing rewritten over slots, its
// experts' weights pushed to their clones, gradients of clones brought home; every result compared.
#pragma once
#include <vector>

#include "runtime/engine.h"
#include "sim/clone_oracle.h"
#include "sim/expect.h"

namespace hep::sim {

// A rank's routing over physical slots, as the kernel leaves it.
struct SlotRouting {
  std::vector<int64_t> topk_idx;   // [T, topk]
  std::vector<unsigned char> map;  // [T, columns], where the routing was given as a map
  std::vector<int64_t> columns;    // [T, E] likewise: of a token's expert
};

class CloneProgram {
 public:
  // logical, oracles: by plan.
  CloneProgram(const WorldSpec& spec, const std::vector<RoutingDecision>& logical,
               const std::vector<CloneOracle>& oracles, Engine& engine, int rank);

  // in: over logical experts. Collective.
  const SlotRouting& plan(uint32_t plan, const RoutingInput& in, const ProgramPoint& at);
  // The same routing again by the plan that is there, as recomputation asks for it; no other rank takes part.
  void replay(uint32_t plan, const RoutingInput& in, const ProgramPoint& at);

  // Collective, in the same order on all ranks: weights of a round, which differ from those of all others,
  // to the clones of the plan; a look at them; gradients home.
  bool pushes() const { return engine_.spares().spare_slots > 0; }
  void push(uint32_t plan, uint32_t round);
  void look_at_weights(uint32_t plan, uint32_t round, const ProgramPoint& at) const;
  void collect(uint32_t plan, uint32_t round, const ProgramPoint& at);

 private:
  struct Planned {
    SlotRouting routing;
    std::vector<int32_t> slot_expert;
    std::vector<int64_t> slot_tokens, take, first, counts, numbers, columns;
  };
  BalanceCall call(Planned& p, uint64_t salt) const;
  void clear(SlotRouting& routing, const RoutingInput& in) const;
  void compare(uint32_t plan, const RoutingInput& in, const SlotRouting& found, const ProgramPoint& at) const;
  std::vector<int> owned(uint32_t plan) const;
  float clones_of(uint32_t plan, uint64_t salt, int expert, uint32_t behind, uint32_t m, uint64_t e) const;
  SpareCall spare_call(uint32_t plan, const std::vector<uint64_t>& experts, uint64_t salt) const;
  int blocks(uint64_t salt, uint32_t most) const;

  const WorldSpec& s_;
  const std::vector<RoutingDecision>& logical_;
  const std::vector<CloneOracle>& oracles_;
  Engine& engine_;
  const int rank_;
  std::vector<Planned> plans_;
};

}  // namespace hep::sim
