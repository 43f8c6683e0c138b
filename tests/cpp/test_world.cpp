// Whole worlds against the reference: shapes and extremes by hand, then many random ones.
#include "check.h"
#include "world.h"

HEP_TEST_MAIN

namespace hep::test {
namespace {

struct Range {
  CaseLimits limits;
  uint64_t first_seed, count;
};
void check_seeds(const Range& range) {
  for (uint64_t i = 0; i < range.count; ++i) check_world(random_case(range.first_seed + i, range.limits));
}

}  // namespace

// Rank 2 needs node 0 for two late tokens only, rank 3 needs nodes 0 and 1 for all. With one slot a sender that
// waits for one peer's credit starves the others: 0 waits for 2, 2 for 1, 1 for 3, 3 for 0.
TEST(skewed_nodes_do_not_deadlock_combine) {
  WorldCase w;
  w.num_nodes = 4, w.num_experts = 4, w.chunk_tokens = 1, w.rail_slots = 1;
  w.timeout_s = 5;
  w.plans.push_back(route_by(w, {0, 0, 10, 10}, 2, [](int rank, uint32_t t) {
    if (rank == 2) return t == 5 || t == 6 ? std::vector<int>{0, 1} : std::vector<int>{1};
    return std::vector<int>{0, 1};
  }));
  w.ops = {dispatch_op(w, 0, 1), combine_op(w, 0, 1)};
  check_world(w);
}

TEST(random_checked) { check_seeds({{}, 1000, 10}); }

}  // namespace hep::test
