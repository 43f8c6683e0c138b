// The table of executors in this build.
#include "kernels/instances/executor.h"

#include <stdexcept>

#include "kernels/instances/makers.h"

namespace hep {
namespace {

struct Entry {
  const char* name;
  std::unique_ptr<Executor> (*make)(unsigned char* const*, uint64_t);
};
constexpr Entry kExecutors[] = {
    {"host", make_host_plain},
    {"host_checked", make_host_checked},
    {"host_checked_lanes4", make_host_checked_lanes4},
};

}  // namespace

std::unique_ptr<Executor> Executor::make(const std::string& name, unsigned char* const* rail_segments, uint64_t seed) {
  std::string known;
  for (const Entry& e : kExecutors) {
    if (name == e.name) return e.make(rail_segments, seed);
    known += std::string(known.empty() ? "" : ", ") + e.name;
  }
  throw std::invalid_argument("executor: '" + name + "' is not in this build; choose one of " + known);
}

std::vector<std::string> Executor::names() {
  std::vector<std::string> names;
  for (const Entry& e : kExecutors) names.push_back(e.name);
  return names;
}

}  // namespace hep
