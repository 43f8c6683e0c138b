// A simulated world as a flat list of numbers: small enough to type, complete enough to replay.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "arch/sim/machine.h"

namespace hep::sim {

struct WorldSpec {
  // The group and its routing.
  uint32_t num_nodes = 2, num_local_ranks = 2, experts_per_rank = 2;
  // Of a rank's experts so many are slots for clones, which the ranks plan together for every plan; tokens choose among
  // the others. In worlds of one node weights are pushed to them, and gradients collected.
  uint32_t spare_slots = 0, clones_within_node = 0;
  uint32_t tokens = 8;  // of a rank, at most
  uint32_t uneven = 0;  // 1: ranks have different numbers of tokens; 2: some have none
  uint32_t topk = 2;
  uint32_t drop_one_in = 0;  // every so many choices is -1; 0 = none
  uint32_t routing = 0;      // 0 uniform, 1 one expert a rank, 2 own node, 3 few experts, 4 skewed nodes
  uint32_t dense = 0;        // routing_map instead of topk_idx
  uint32_t pad_multiple = 1;
  // Rows.
  uint32_t hidden = 16;    // elements; a row is a multiple of 16 bytes
  uint32_t dtype = 0;      // bf16, fp16, fp32: of the payload and of combine
  uint32_t row_bytes = 0;  // of dispatch; 0 = hidden elements
  uint32_t scale_bytes = 0;
  uint32_t permute = 1, weights = 1, multiply = 0, fp32_partials = 0;
  // The machine.
  uint32_t chunk_tokens = 4, rail_slots = 2, num_blocks = 1;
  uint32_t permute_blocks = 0, unpermute_blocks = 0;  // for local work of dispatch, of combine; 0 = link blocks do it
  uint32_t landing = 0;  // of dispatched rows: 0 aside, in the result 1 for every pair, 2 for the first; 3 ranks differ
  uint32_t reading =
      0;  // of combine's rows: 0 they lie outside the arena, 1 there and are read in place; 2 ranks differ
  // 0: nothing goes by the latency path, 1: some operations, as the seed of the data has it, 2: all; and warps of its
  // blocks.
  uint32_t latency = 0, latency_warps = 2;
  uint32_t looks = 1;  // lanes of a warp look at flags together where a kernel of sm_100 does; 0: as on sm_90a
  uint32_t smem_bytes = 24 * 1024;
  uint32_t plans = 1, rounds = 1;  // rounds: dispatch and combine of every plan
  uint32_t exchange_first = 0;     // all plans up front, one exchange right after the other
  uint32_t combine = 1;            // 0: dispatch alone
  uint32_t unlike = 0;             // 1: calls differ in their chunks (chunk_tokens at most), and ranks in their blocks
  uint64_t counter_base = 0;       // every counter starts here, as if so many operations had gone before
  // Choices.
  uint64_t seed = 0, data_seed = 0;  // of the interleaving; of routing and data
  uint32_t strategy = 0;
  uint32_t fault = 0, fault_rank = 0, fault_node = 0, fault_at = 0;

  uint32_t num_ranks() const { return num_nodes * num_local_ranks; }
  uint32_t num_experts() const { return num_ranks() * experts_per_rank; }
  uint32_t owners_per_rank() const { return experts_per_rank - spare_slots; }
  uint32_t num_logical_experts() const { return num_ranks() * owners_per_rank(); }

  void validate() const;  // std::invalid_argument naming field, value and fix
  // Calls f(name, field) for every field, in order.
  template <class Self, class F>
  static void each_field(Self& s, F&& f) {
    f("num_nodes", s.num_nodes), f("num_local_ranks", s.num_local_ranks), f("experts_per_rank", s.experts_per_rank);
    f("spare_slots", s.spare_slots), f("clones_within_node", s.clones_within_node);
    f("tokens", s.tokens), f("uneven", s.uneven), f("topk", s.topk), f("drop_one_in", s.drop_one_in);
    f("routing", s.routing), f("dense", s.dense), f("pad_multiple", s.pad_multiple);
    f("hidden", s.hidden), f("dtype", s.dtype), f("row_bytes", s.row_bytes), f("scale_bytes", s.scale_bytes);
    f("permute", s.permute), f("weights", s.weights), f("multiply", s.multiply), f("fp32_partials", s.fp32_partials);
    f("chunk_tokens", s.chunk_tokens), f("rail_slots", s.rail_slots), f("num_blocks", s.num_blocks);
    f("permute_blocks", s.permute_blocks), f("unpermute_blocks", s.unpermute_blocks), f("landing", s.landing);
    f("reading", s.reading), f("latency", s.latency), f("latency_warps", s.latency_warps);
    f("looks", s.looks);
    f("smem_bytes", s.smem_bytes), f("plans", s.plans), f("rounds", s.rounds);
    f("exchange_first", s.exchange_first), f("combine", s.combine), f("unlike", s.unlike);
    f("counter_base", s.counter_base), f("seed", s.seed), f("data_seed", s.data_seed), f("strategy", s.strategy);
    f("fault", s.fault), f("fault_rank", s.fault_rank), f("fault_node", s.fault_node), f("fault_at", s.fault_at);
  }
};

// The world that a seed of the soak stands for. strategy: one of StrategyKind, or -1 = by seed.
WorldSpec random_world(uint64_t seed, int strategy);

struct RankOutcome {
  std::string error;  // "" = finished
  std::string site;
  int peer = -1, role_block = -1;
  std::string role;
  double waited_s = 0;
};

struct LinkUse {
  const char* link;
  int rank, block;  // block -1: the GPU's
  Ps busy;
  uint64_t bytes, copies;
};

struct WorldResult {
  Failure failure;
  std::vector<RankOutcome> ranks;
  uint64_t steps = 0;
  std::vector<std::string> log;
  // Timed worlds.
  std::vector<KernelTime> kernels;
  std::vector<LinkUse> links;
  std::vector<std::pair<int, RoleTime>> roles;
  std::vector<Span> spans;
};

struct RunOptions {
  bool timed = false, log = false, trace = false;
  CostModel costs;
  double timeout_s = 100;  // virtual deadline of every wait in a world with a fault; 0 = none, it deadlocks
  // Explicit routing of plan 0: by rank, [tokens * topk], -1 = dropped. Empty = made from data_seed.
  std::vector<std::vector<int64_t>> topk_idx;
};

WorldResult run_world(const WorldSpec& spec, const RunOptions& options);

}  // namespace hep::sim
