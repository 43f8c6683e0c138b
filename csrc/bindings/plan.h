// Plans for Python, and what the exchange kernel tells the host of one.
#pragma once
#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/tensor_view.h"
#include "layout/headers.h"
#include "runtime/engine.h"

namespace hep {

// A call that the exchange kernel was asked to place. The host waited for the counts, or, without `count`, for nothing.
struct Placed {
  std::shared_ptr<Plan> complete;  // without `count`
  std::shared_ptr<Placement> placement;
  std::vector<std::string> names;
  Device device = Device::kCpu;  // where the plan's memory lies

  const Placement& waited() const {
    if (!placement) throw std::logic_error("nobody waited for the counts of this call; see complete");
    return *placement;
  }
  bool placed() const { return waited().counts.placed; }
  const PlacedCounts& counts() const {
    if (!placed()) throw std::logic_error("the ranks' calls do not fit: there are headers, and nothing else");
    return placement->counts;
  }
  std::vector<std::map<std::string, uint32_t>> headers() const {
    const PlacedCounts& c = waited().counts;
    std::vector<std::map<std::string, uint32_t>> all;
    for (int r = 0; r < int(c.headers.size()) / kCountHeaderWords; ++r) {
      const uint32_t topk = c.header(r, kHeaderTopk);
      all.push_back(
          {{"num_tokens", c.header(r, kHeaderNumTokens)}, {"topk", topk & kMostTopk}, {"excess", topk >> 16}});
      for (size_t i = 0; i < names.size(); ++i) all.back()[names[i]] = c.header(r, kHeaderFirstFree + int(i));
    }
    return all;
  }
};

void bind_plan(pybind11::module_& m);

}  // namespace hep
