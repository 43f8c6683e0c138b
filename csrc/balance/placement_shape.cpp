// What a placement may be asked for.
#include <stdexcept>
#include <string>

#include "balance/placement.h"

namespace hep::balance {
namespace {

void require(bool ok, const char* name, int64_t value, const char* remedy) {
  if (!ok) throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + " " + remedy);
}

}  // namespace

void PlacementShape::validate() const {
  require(num_experts >= 1, "num_experts", num_experts, "must be at least 1");
  require(num_ranks >= 1, "num_ranks", num_ranks, "must be at least 1");
  require(num_nodes >= 1 && num_ranks % num_nodes == 0, "num_nodes", num_nodes, "must divide num_ranks");
  require(num_slots >= num_experts && num_slots % num_ranks == 0, "num_slots", num_slots,
          "must be a multiple of num_ranks and at least num_experts");
  require(int64_t(num_slots) <= int64_t(num_experts) * num_ranks, "num_slots", num_slots,
          "is more than one of each expert a rank: give fewer slots");
  if (!num_groups) return;
  require(num_groups > 0 && num_experts % num_groups == 0, "num_groups", num_groups, "must divide num_experts");
  require(num_groups % num_nodes == 0, "num_groups", num_groups, "must be a multiple of num_nodes");
  require(int64_t(num_slots) <= int64_t(num_experts) * (num_ranks / num_nodes), "num_slots", num_slots,
          "is more than one of each of a node's experts a rank: give fewer slots, or num_groups 0");
}

}  // namespace hep::balance
