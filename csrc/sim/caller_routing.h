// A simulated rank's routing as its caller has it: choices of experts, or a map of them with probabilities.
#pragma once
#include <vector>

#include "sim/clone_program.h"

namespace hep::sim {

struct CallerRouting {
  RoutingInput in;

  // Over logical experts. The decision stays where it is.
  CallerRouting(const WorldSpec& spec, const RoutingDecision& decision, size_t rank);
  CallerRouting(CallerRouting&&) = default;

  // From here on over slots: what a kernel has written, with the probabilities of a map where it says. slots stays.
  void rewrite(const WorldSpec& spec, const SlotRouting& slots);

 private:
  std::vector<unsigned char> map_;
  std::vector<float> probs_;
};

}  // namespace hep::sim
