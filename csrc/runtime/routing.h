// Checks of the routing input and the memory that the exchange kernel writes.
#pragma once
#include "runtime/engine.h"

namespace hep {

// Throws std::invalid_argument naming token and expert when an index lies outside [-1, E).
ExchangeParams prepare_routing(const RoutingInput& in, const World& world, const CountsLayout& layout, Routing& out);

}  // namespace hep
