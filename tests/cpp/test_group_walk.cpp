// The walk of local work over groups of receive rows: every group is dealt to one worker, and a worker takes the first
// groups of all its sources before the second of any, since all sources send and read side by side. Counted over more
// sources than workers, fewer, and as many.
#include "check.h"

#include <map>

#include "arch/host/launch.h"
#include "roles/group_walk.h"
#include "world_case.h"

HEP_TEST_MAIN

namespace hep {
namespace {

using A = host::PlainThreads<1>;  // also under ThreadSanitizer

// k: how many groups the source has before this one.
void walk(uint32_t sources, uint32_t workers, bool shared_first, uint64_t seed) {
  test::Random random(seed);
  std::vector<uint32_t> rows(sources);
  uint32_t all = 0;
  for (uint32_t& n : rows) all += n = random.one_in(4) ? 0 : random.between(0, 300);
  const uint32_t kept = random.one_in(3) ? all / 2 : all;  // a budget that cuts
  std::map<uint32_t, int> taken;
  const auto group_of = [](uint32_t row) { return row / BufferLayout::kGroupRows; };
  host::LaunchConfig config;
  config.smem_bytes = GroupWalk<A>::bytes(sources);
  config.timeout_s = 20;
  host::launch<A>(config, [&](A& a, std::byte* smem) {
    auto* begins = reinterpret_cast<uint32_t*>(smem);
    GroupWalk<A>::begin(a, begins, rows.data(), sources, kept);
    for (uint32_t worker = 0; worker < workers; ++worker) {
      uint32_t before = 0;
      GroupWalk<A> walk{a, begins, sources, worker, workers};
      const auto take = [&](uint32_t group, uint32_t source) {
        ++taken[group];
        const uint32_t begin = begins[source];
        const uint32_t first = shared_first ? group_of(begin) : uint32_t(div_up(begin, BufferLayout::kGroupRows));
        CHECK(group >= first);
        const uint32_t k = group - first;
        CHECK(k >= before);
        before = k;
      };
      shared_first ? walk.run<true>(take) : walk.run(take);
    }
  });
  CHECK_EQ(taken.size(), size_t(div_up(kept, BufferLayout::kGroupRows)));
  for (const auto& [group, times] : taken) {
    CHECK_EQ(times, 1);
    CHECK(group * BufferLayout::kGroupRows < kept);
  }
}

const bool registered = [] {
  for (const bool shared_first : {false, true})
    check::tests().push_back(
        {shared_first ? "a shared group is its last source's" : "a shared group is its first's", [=] {
           uint64_t seed = 0;
           for (const uint32_t sources : {1u, 2u, 7u, 8u, 31u, 32u, 36u, 72u})
             for (const uint32_t workers : {1u, 2u, 3u, 6u, 7u, 8u, 9u, 12u, 24u, 40u, 100u})
               for (int i = 0; i < 5; ++i) walk(sources, workers, shared_first, ++seed);
         }});
  return true;
}();

}  // namespace
}  // namespace hep
