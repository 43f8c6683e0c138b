// Weights of clones pushed to spare slots, and their gradients added to the owners' sums: see spare_world.h.
#include "spare_world.h"

#include "arch/host/host_arch.h"
#include "kernels/instances/host_executor.h"
#include "transport/loopback/loopback_transport.h"

HEP_TEST_MAIN

namespace hep::test {

#if !defined(HEP_MUTANTS)
#if defined(__SANITIZE_THREAD__)
TEST(random_worlds_of_threads) {
  random_worlds("threads", 6, 4);
  random_worlds("threads_lanes4", 3, 3);
  random_worlds("threads", 4, 4, 2);
  random_worlds("threads_lanes4", 2, 3, 3);
}
#else
TEST(worlds_have_plans_of_all_kinds) {
  int empty = 0, twice = 0, kept = 0, own = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Case c = random_case(seed, "host", 6);
    for (const Step& step : c.steps) {
      empty += std::ranges::all_of(step.slot_expert, [](int32_t e) { return e < 0; });
      for (size_t j = 0; j < step.slot_expert.size(); ++j) {
        const int32_t e = step.slot_expert[j];
        if (e < 0) continue;
        twice += std::ranges::count(step.slot_expert, e) > 1;
        own += int(step.columns[size_t(e)]) / c.width() == int(j) / c.spare();
        ++kept;
      }
    }
  }
  CHECK(empty > 5 && twice > 50 && kept > 200 && own > 20);
}
TEST(plain_fibers) {
  random_worlds("host", 100);
}
TEST(checked_one_lane) {
  random_worlds("host_checked", 80);
}
TEST(checked_four_lanes) {
  random_worlds("host_checked_lanes4", 50);
}
TEST(checked_32_lanes) {
  random_worlds("host_checked_lanes32", 10, 4);
}
TEST(simulated_worlds) {
  random_worlds("sim", 60);
}
TEST(nodes_of_plain_fibers) {
  random_worlds("host", 100, 8, 4);
}
TEST(nodes_of_checked_lanes) {
  random_worlds("host_checked", 25, 8, 4);
  random_worlds("host_checked_lanes4", 10, 6, 3);
  random_worlds("host_checked_lanes32", 2, 4, 2);
  random_worlds("host_checked_mapped", 10, 6, 3);
}
TEST(simulated_nodes) {
  random_worlds("sim", 60, 8, 4);
}
TEST(a_rank_that_does_not_push_is_named) {
  Case c = random_case(5, "host", 4);
  c.num_ranks = 3;
  c.shape.num_owners = 1;
  c.timeout_s = 0.3;
  c.dead = 1;
  Step step;
  for (int e = 0; e < 3; ++e) step.columns.push_back(e * c.width());
  step.slot_expert.assign(size_t(3 * c.spare()), -1);
  step.slot_expert[0] = 1;  // rank 0 holds a clone of the dead rank's expert
  step.num_blocks = {1, 1, 1};
  c.steps = {step, step};
  const std::string failed = run(c);
  CHECK(failed.find("clone_weights") != std::string::npos && failed.find("rank 1") != std::string::npos);
  step.slot_expert[0] = -1;
  step.slot_expert[size_t(c.spare())] = 0;  // the dead rank's slot is to get a clone
  c.steps = {step, step};
  CHECK(run(c).find("spare_slots_free") != std::string::npos);
}
// Whoever it is: the owner, the rank that passes its chunks on along the rail, or one of those behind that. All waits
// have the same deadline: the first to speak may name a rank that itself waits.
TEST(a_rank_that_is_not_there_ends_all_that_wait_for_its_chunks) {
  for (int i = 0; i < 8; ++i) {
    const int dead = i % 4;
    Case c = random_case(5, "host", 4);
    c.num_nodes = 2, c.num_ranks = 4;
    c.shape.num_owners = 1, c.shape.spare_slots = 1, c.shape.rail_chunk_bytes = 48;
    c.timeout_s = 0.3;
    c.dead = dead;
    c.pushes = i >= 4;
    Step step;
    for (int e = 0; e < 4; ++e) step.columns.push_back(e * c.width());
    step.slot_expert = {-1, -1, 0, -1};  // rank 2, of the other node, holds a clone of rank 0's expert
    step.num_blocks = {1, 1, 1, 1};
    c.steps = {step, step};
    const std::string failed = run(c), role = c.pushes ? "collect_gradients" : "push_weights";
    CHECK(failed.find("waited 0.3 s in role " + role) != std::string::npos);
  }
}
// Also where its chunks are more than a ring has slots, so that who sends waits, too.
TEST(of_two_ranks_on_two_nodes_each_names_the_other) {
  for (const int dead : {0, 1}) {
    Case c = random_case(5, "host", 2);
    c.num_nodes = c.num_ranks = 2;
    c.shape = {.spare_slots = 1, .num_owners = 1, .element_bytes = 2, .num_matrices = 1, .elements = {640}};
    c.shape.rail_chunk_bytes = 48, c.shape.rail_slots = 4;
    c.timeout_s = 0.3;
    c.dead = dead;
    Step step;
    for (int e = 0; e < 2; ++e) step.columns.push_back(e * c.width());
    step.slot_expert = {-1, 0};  // rank 1 holds a clone of rank 0's expert
    step.num_blocks = {1, 1};
    c.steps = {step, step};
    const std::string failed = run(c), other = "rank " + std::to_string(1 - dead),
                      gone = "rank " + std::to_string(dead);
    CHECK(failed.starts_with(other) && failed.find(" from " + gone) != std::string::npos);
  }
}
// A block of the kernels between nodes fits into a GPU's 227 KiB, by the blocks of a default push.
TEST(large_groups_leave_shared_memory_for_stages) {
  const struct {
    int nodes, local;
    uint32_t spare, stage;
  } kGroups[] = {{2, 8, 2, 8192},  {8, 8, 2, 8192},   {32, 8, 2, 8192}, {128, 8, 2, 4096},
                 {96, 8, 8, 2048}, {128, 8, 3, 4096}, {14, 72, 4, 2048}};
  for (const auto& g : kGroups) {
    SpareShape shape;
    shape.spare_slots = g.spare;
    SpareRailParams p{};
    p.world = {g.nodes, g.local, 0};
    p.node.spare_slots = g.spare;
    p.channels = SpareChannels::make(shape, uint32_t(g.nodes), uint32_t(g.local));
    p.node.world = {1, g.local, 0};
    p.blocks = {4, 8};
    const uint64_t bytes = plan_push_nodes<host::CheckedFibers<32>, LoopbackTransport>(p, (227 - 1) * 1024);
    std::printf("%d x %d ranks, %u slots: stages of %u bytes, within the node of %u, %llu a block\n", g.nodes, g.local,
                g.spare, p.stage_bytes, p.node.chunk_bytes, static_cast<unsigned long long>(bytes));
    CHECK(bytes <= (227 - 1) * 1024 && p.stage_bytes == g.stage && p.node.chunk_bytes >= 4096);
    CHECK(p.channels.ring_bytes() <= (g.nodes * g.local <= 256 ? 128ull << 20 : 512ull << 20));
  }
}
TEST(shapes_that_no_kernel_could_fill_are_refused) {
  BufferShape shape;
  shape.num_local_ranks = 2, shape.num_experts = 2;
  shape.spares = {.spare_slots = 1, .num_owners = 1, .element_bytes = 2, .num_matrices = 1, .elements = {8}};
  shape.validate();
  const auto refused = [](BufferShape s) {
    try {
      s.validate();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  BufferShape s = shape;
  s.spares.elements[0] = 12;
  CHECK(refused(s));
  s = shape, s.spares.num_matrices = 17;
  CHECK(refused(s));
  s = shape, s.spares.element_bytes = 3;
  CHECK(refused(s));
  s = shape, s.num_nodes = 2, s.num_local_ranks = 1;
  CHECK(!refused(s));
  s.spares.rail_chunk_bytes = 24;
  CHECK(refused(s));
  s.spares.rail_chunk_bytes = 32, s.spares.rail_slots = 12;
  CHECK(refused(s));
}
#endif
#else
void notice(std::initializer_list<Bug> bugs, int most_ranks, int most_nodes) {
  for (const Bug bug : bugs) {
    std::string failed;
    uint64_t seed = 0;
    for (; failed.empty(); ++seed) {
      CHECK(seed < 500);
      const char* const executor = seed % 3 == 2 ? "sim" : seed % 2 ? "host_checked" : "host_checked_lanes4";
      Case c = random_case(seed, executor, most_ranks, most_nodes);
      c.timeout_s = most_nodes > 1 ? 5 : 1;
      injected_bug = bug;
      failed = run(c);
      injected_bug = Bug::kNone;
    }
    std::printf("%s: world %llu: %.100s\n", name_of(bug), static_cast<unsigned long long>(seed - 1), failed.c_str());
  }
}
TEST(mutants_of_channels_are_noticed) {
  notice({Bug::kChunkToldBeforeStores, Bug::kChunkFedUnasked, Bug::kOneCopyOfANode, Bug::kChunkCreditedUnread,
          Bug::kSlotNotAwaitedFree, Bug::kWeightsUnawaited, Bug::kCloneGradientsUnawaited, Bug::kCloneGradientsNotTaken,
          Bug::kSumUnawaited, Bug::kFinishedNotReset, Bug::kSlotFullByEveryWarp, Bug::kExpertAwaitedByOneWarp,
          Bug::kOwnNodeFirst},
         6, 3);
}
TEST(mutants_are_noticed) {
  notice({Bug::kSlotNotAwaitedFree, Bug::kSlotFullBeforeStores, Bug::kSlotFullByEveryWarp, Bug::kWeightsInAnotherSlot,
          Bug::kWeightsUnawaited, Bug::kCloneGradientTwice, Bug::kCloneGradientsUnawaited, Bug::kCloneGradientsNotTaken,
          Bug::kPartRelayedUnawaited, Bug::kSumUnawaited, Bug::kSumToldByEveryWarp, Bug::kFinishedNotReset,
          Bug::kReadBeforeLoaded},
         6, 1);
}
#endif

}  // namespace hep::test
