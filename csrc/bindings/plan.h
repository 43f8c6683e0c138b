// Plans for Python, and the two ways to one: counts that the host places, and rows that the exchange kernel places.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/tensor_view.h"
#include "layout/headers.h"
#include "runtime/engine.h"

namespace hep {

// A finished exchange: headers by name, counts, and the way to a plan.
struct Exchange {
  std::shared_ptr<Routing> routing;
  std::vector<std::string> names;

  std::vector<std::map<std::string, uint32_t>> headers() const {
    std::vector<std::map<std::string, uint32_t>> all;
    for (int r = 0; r < routing->world.num_ranks(); ++r) {
      std::map<std::string, uint32_t> h{{"num_tokens", routing->view().header(r, kHeaderNumTokens)},
                                        {"topk", routing->view().header(r, kHeaderTopk)}};
      for (size_t i = 0; i < names.size(); ++i) h[names[i]] = routing->view().header(r, kHeaderFirstFree + int(i));
      all.push_back(std::move(h));
    }
    return all;
  }
  std::vector<uint64_t> recv_rows() const {
    std::vector<uint64_t> rows;
    for (int d = 0; d < routing->world.num_ranks(); ++d) {
      rows.push_back(0);
      for (int s = 0; s < routing->world.num_ranks(); ++s) rows.back() += routing->view().rows(s, d);
    }
    return rows;
  }
  uint32_t topk() const {
    uint32_t k = 1;
    for (int r = 0; r < routing->world.num_ranks(); ++r) k = std::max(k, routing->view().header(r, kHeaderTopk));
    return k;
  }
};

// A routed dispatch that the exchange kernel places. The host waits for the counts, or, without `count`, for nothing.
struct Placed {
  std::shared_ptr<Plan> complete;  // without `count`
  std::shared_ptr<Placement> placement;
  std::vector<std::string> names;
  Device device = Device::kCpu;  // where the plan's memory lies

  bool placed() const { return placement->counts.placed; }
  const PlacedCounts& counts() const {
    if (!placed()) throw std::logic_error("the ranks' calls do not fit: there are headers, and nothing else");
    return placement->counts;
  }
  std::vector<std::map<std::string, uint32_t>> headers() const {
    const PlacedCounts& c = placement->counts;
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
