// What must come of the clones of a world's plans: which experts are cloned is the core's plan; which token goes to
// which instance is found token by token, from the rule in docs/balancer.md, and shares no code with the role.
#pragma once
#include <cstdint>
#include <vector>

#include "layout/clone_shape.h"
#include "layout/spare_shape.h"
#include "sim/oracle.h"

namespace hep::sim {

// Of R ranks with S spare slots each and E logical experts; a map over physical slots has num_experts() columns, of a
// rank first its owners, then its spare slots.
struct CloneOracle {
  std::vector<int64_t> columns;      // [E] of each expert's owner
  std::vector<int32_t> slot_expert;  // [R, S] expert cloned there, -1: none
  std::vector<int64_t> slot_tokens;  // [R, S] tokens that this clone takes
  std::vector<int64_t> counts;       // [R, E] tokens of each source for each expert
  RoutingDecision physical;          // the routing over slots

  CloneOracle(const WorldSpec& spec, uint32_t plan, const RoutingDecision& logical);

 private:
  void place_owners(const WorldSpec& spec, uint32_t plan);
  void plan_clones(const WorldSpec& spec, const RoutingDecision& logical);
  std::vector<std::vector<int64_t>> columns_of_tokens(const WorldSpec& spec, size_t expert) const;
};

CloneShape clone_shape_of(const WorldSpec& spec);
SpareShape spare_shape_of(const WorldSpec& spec);

}  // namespace hep::sim
