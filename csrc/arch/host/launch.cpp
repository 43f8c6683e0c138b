// Validation of launch configurations.
#include "arch/host/launch.h"

#include <string>

namespace hep::host {

void check_config(const LaunchConfig& config) {
  const auto at_least_one = [](const char* field, int value) {
    if (value >= 1) return;
    throw std::invalid_argument(std::string("LaunchConfig::") + field + " is " + std::to_string(value) +
                                "; give at least 1");
  };
  at_least_one("num_blocks", config.num_blocks);
  at_least_one("num_warps", config.num_warps);
  at_least_one("num_local_ranks", config.num_local_ranks);
  if (!(config.timeout_s > 0)) {
    throw std::invalid_argument("LaunchConfig::timeout_s is " + std::to_string(config.timeout_s) +
                                "; every wait needs a deadline, give seconds > 0");
  }
}

}  // namespace hep::host
