// The kernels of one executor behind a plain interface: where a concrete Arch meets a concrete Transport.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "roles/params.h"

namespace hep {

struct LaunchSettings {
  World world;
  int num_blocks = 1;
  double timeout_s = 100;
  uint64_t seed = 0;
  std::function<bool()> interrupted;  // true = stop (Ctrl-C)
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual void exchange(const ExchangeParams& p, const LaunchSettings& s) = 0;
  virtual void dispatch(DispatchParams& p, const LaunchSettings& s) = 0;
  virtual void unpermute(CombineParams& p, const LaunchSettings& s) = 0;
  virtual void combine(CombineParams& p, const LaunchSettings& s) = 0;

  // rail_segments[node]: this rank's rail peers' segments as mapped here; outlives the executor.
  static std::unique_ptr<Executor> make(const std::string& name, unsigned char* const* rail_segments, uint64_t seed);
  static std::vector<std::string> names();
};

}  // namespace hep
