// The table of executors: those of this build, and those that were loaded at run time.
#include "kernels/instances/executor.h"

#include <map>
#include <mutex>
#include <stdexcept>

#include "kernels/instances/makers.h"

namespace hep {
namespace {

std::mutex table_mutex;

std::map<std::string, Executor::Maker>& table() {
  static std::map<std::string, Executor::Maker> executors{
#if !defined(HEP_NO_FIBERS)  // a build for tests that run on threads alone
      {"host", make_host_plain},
      {"host_checked", make_host_checked},
      {"host_checked_lanes4", make_host_checked_lanes4},
      {"host_checked_mapped", make_host_checked_mapped},
      {"host_checked_lanes32", make_host_checked_lanes32},
#endif
  };
  return executors;
}

}  // namespace

std::unique_ptr<Executor> Executor::make(const std::string& name, unsigned char* const* rail_segments, uint64_t seed) {
  Maker maker;
  std::string known;
  {
    std::lock_guard lock(table_mutex);
    if (const auto found = table().find(name); found != table().end()) maker = found->second;
    for (const auto& entry : table()) known += (known.empty() ? "" : ", ") + entry.first;
  }
  if (!maker) throw std::invalid_argument("executor: '" + name + "' is not in this build; choose one of " + known);
  return maker(rail_segments, seed);
}

std::vector<std::string> Executor::names() {
  std::lock_guard lock(table_mutex);
  std::vector<std::string> names;
  for (const auto& entry : table()) names.push_back(entry.first);
  return names;
}

void Executor::add(const std::string& name, Maker maker) {
  std::lock_guard lock(table_mutex);
  table()[name] = std::move(maker);
}

}  // namespace hep
