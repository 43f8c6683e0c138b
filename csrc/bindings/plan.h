// Plans for Python, and what the exchange kernel tells the host of one.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>

#include "bindings/tensor_view.h"
#include "runtime/engine.h"

namespace hep {

// A call that the exchange kernel was asked to place. The host waited for the counts, or, without `count`, for nothing.
struct Placed {
  std::shared_ptr<Plan> complete;  // without `count`
  std::shared_ptr<Placement> placement;
  Device device = Device::kCpu;  // where the plan's memory lies
  pybind11::object memory;       // the tensor, which lives as long as this

  const Placement& waited() const {
    if (!placement) throw std::logic_error("nobody waited for the counts of this call; see complete");
    return *placement;
  }
  bool placed() const { return waited().counts.placed; }
  const PlacedCounts& counts() const {
    if (!placed()) throw std::logic_error("the ranks' calls do not fit: there are headers, and nothing else");
    return placement->counts;
  }
};

void bind_plan(pybind11::module_& m);

}  // namespace hep
