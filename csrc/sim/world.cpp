// Building a world from its spec, running it, collecting what it leaves behind; and the soak's random worlds.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "arch/host/errors.h"
#include "sim/rank_program.h"
#include "sim/world_spec.h"

namespace hep::sim {
namespace {

BufferShape shape_of(const WorldSpec& s, uint32_t most_tokens, uint64_t recv_rows) {
  BufferShape shape;
  shape.num_nodes = s.num_nodes;
  shape.num_local_ranks = s.num_local_ranks;
  shape.num_experts = s.num_experts();
  shape.chunk_tokens = s.chunk_tokens;
  shape.rail_slots = s.rail_slots;
  shape.max_tokens = std::max(most_tokens, 1u);
  shape.max_topk = std::max(1u, std::min(s.topk, s.num_experts()));
  const uint32_t elem = dtype_bytes(DType(s.dtype));
  shape.row_bytes = s.row_bytes ? s.row_bytes : s.hidden * elem;
  shape.scale_bytes = s.scale_bytes;
  shape.partial_row_bytes = s.combine ? s.hidden * (s.fp32_partials ? 4 : elem) : 16;
  shape.recv_rows = std::max<uint64_t>(recv_rows, 1);
  shape.latency_tokens = s.latency ? shape.max_tokens : 0;
  // A result with all pairs of all receive rows, every expert's padded.
  const uint64_t rows = shape.recv_rows * shape.max_topk + uint64_t(s.experts_per_rank) * s.pad_multiple;
  const uint64_t landed = s.landing ? shape.row_bytes + shape.scale_bytes : 0,
                 read = s.combine && s.reading ? uint64_t(s.hidden) * elem : 0;
  if (s.spare_slots) {
    shape.clones = clone_shape_of(s);
    shape.spares = spare_shape_of(s);
  }
  if (landed || read) shape.arena_bytes = rows * std::max(landed, read) + RankProgram::kArenaSlack;
  return shape;
}

// Most receive rows of any rank.
uint64_t most_rows(const WorldSpec& s, const RoutingDecision& d) {
  std::vector<uint64_t> rows(s.num_ranks());
  std::vector<uint64_t> last(s.num_ranks());
  uint64_t token = 0;
  for (uint32_t r = 0; r < s.num_ranks(); ++r)
    for (uint64_t i = 0; i < d.topk_idx[r].size(); ++i) {
      token += i % s.topk == 0;
      if (const int64_t e = d.topk_idx[r][i]; e >= 0) {
        const size_t dst = size_t(e) / s.experts_per_rank;
        if (std::exchange(last[dst], token) != token) ++rows[dst];
      }
    }
  return *std::max_element(rows.begin(), rows.end());
}

RankOutcome outcome_of(const host::DeadlineError& e) {
  const TimeoutReport& o = e.timeout_report();
  return {e.what(), site_name(o.site), o.peer, o.block, o.role, o.waited_s};
}

void collect_links(Machine& m, WorldResult& result) {
  const auto add = [&](const char* link, int rank, int block, const Server& s) {
    if (s.served) result.links.push_back({link, rank, block, s.busy, s.bytes, s.served});
  };
  for (int r = 0; r < m.num_ranks(); ++r) {
    const Rank& rank = m.rank(r);
    add("hbm", r, -1, rank.hbm);
    add("nvlink_egress", r, -1, rank.egress), add("nvlink_ingress", r, -1, rank.ingress);
    add("nic_egress", r, -1, rank.nic_out), add("nic_ingress", r, -1, rank.nic_in);
    for (const auto& block : rank.blocks)
      add("tma_read", r, block->idx, block->tma_read), add("tma_write", r, block->idx, block->tma_write),
          add("line_store", r, block->idx, block->line_store);
    for (const RoleTime& t : rank.times) result.roles.emplace_back(r, t);
  }
}

}  // namespace

void WorldSpec::validate() const {
  const auto need = [](bool ok, const char* field, uint64_t value, const char* fix) {
    if (!ok) throw std::invalid_argument(std::string(field) + ": is " + std::to_string(value) + "; " + fix);
  };
  need(num_nodes >= 1 && num_nodes <= 256, "num_nodes", num_nodes, "give 1 to 256");
  need(num_local_ranks >= 1 && num_local_ranks <= 256, "num_local_ranks", num_local_ranks, "give 1 to 256");
  need(experts_per_rank >= 1, "experts_per_rank", experts_per_rank, "give at least 1");
  need(spare_slots < experts_per_rank, "spare_slots", spare_slots, "give less than experts_per_rank");
  need(clones_within_node <= 1, "clones_within_node", clones_within_node, "give 0 or 1");
  need(topk >= 1 && topk <= 1024, "topk", topk, "give 1 to 1024");
  need(tokens <= 1u << 20, "tokens", tokens, "give at most 1048576");
  need(uneven <= 2, "uneven", uneven, "give 0 to 2");
  need(routing <= 4, "routing", routing, "give 0 to 4");
  need(pad_multiple >= 1, "pad_multiple", pad_multiple, "give at least 1");
  need(dtype <= 2, "dtype", dtype, "give 0 (bf16), 1 (fp16) or 2 (fp32)");
  need(hidden >= 1 && hidden * dtype_bytes(DType(dtype)) % 16 == 0, "hidden", hidden,
       "a row must be a positive multiple of 16 bytes");
  need(row_bytes % 16 == 0, "row_bytes", row_bytes, "give a multiple of 16");
  need(scale_bytes % 16 == 0, "scale_bytes", scale_bytes, "give a multiple of 16");
  need(chunk_tokens >= 1, "chunk_tokens", chunk_tokens, "give at least 1");
  need(rail_slots >= 1, "rail_slots", rail_slots, "give at least 1");
  need(num_blocks >= 1 && num_blocks <= 256, "num_blocks", num_blocks, "give 1 to 256");
  need(landing <= 3, "landing", landing, "give 0 (aside), 1 (every pair), 2 (first pair) or 3 (ranks differ)");
  need(reading <= 2, "reading", reading, "give 0 (no row in place), 1 (in place) or 2 (ranks differ)");
  need(latency <= 2, "latency", latency, "give 0 (never), 1 (some operations) or 2 (all)");
  need(latency_warps >= 1 && latency_warps <= 16, "latency_warps", latency_warps, "give 1 to 16");
  need(looks <= 1, "looks", looks, "give 0 (one lane) or 1 (all of a warp)");
  need(permute_blocks <= 256, "permute_blocks", permute_blocks, "give 0 (none of their own) to 256");
  need(unpermute_blocks <= 256, "unpermute_blocks", unpermute_blocks, "give 0 (none of their own) to 256");
  need(plans >= 1, "plans", plans, "give at least 1");
  need(rounds >= 1, "rounds", rounds, "give at least 1");
  need(counter_base < uint64_t(1) << 62, "counter_base", counter_base, "give less than 2^62");
  need(strategy < uint32_t(kNumStrategies), "strategy", strategy, "give 0 to 7");
  need(fault <= 3, "fault", fault, "give 0 (none), 1 (rank dies), 2 (rail stops) or 3 (put lost)");
  need(fault_rank < num_ranks(), "fault_rank", fault_rank, "give a rank of the group");
  need(fault_node < num_nodes, "fault_node", fault_node, "give a node of the group");
  need(!multiply || (permute && weights), "multiply", multiply, "needs permute and weights");
}

static void check_routing(const WorldSpec& s, const std::vector<std::vector<int64_t>>& topk_idx) {
  if (topk_idx.empty()) return;
  if (topk_idx.size() != s.num_ranks())
    throw std::invalid_argument("topk_idx: has " + std::to_string(topk_idx.size()) + " entries; give one per rank, " +
                                std::to_string(s.num_ranks()));
  for (const auto& row : topk_idx) {
    if (row.size() % s.topk)
      throw std::invalid_argument("topk_idx: a rank has " + std::to_string(row.size()) +
                                  " choices, no multiple of topk = " + std::to_string(s.topk));
    for (size_t i = 0; i < row.size(); ++i)
      if (row[i] < -1 || row[i] >= int64_t(s.num_logical_experts()))
        throw std::invalid_argument("topk_idx: token " + std::to_string(i / s.topk) + " names expert " +
                                    std::to_string(row[i]) + "; experts are 0.." +
                                    std::to_string(s.num_logical_experts() - 1) + ", -1 means dropped");
  }
}

WorldResult run_world(const WorldSpec& s, const RunOptions& options) {
  s.validate();
  check_routing(s, options.topk_idx);
  if (options.timed && s.spare_slots)
    throw std::invalid_argument("spare_slots: is " + std::to_string(s.spare_slots) +
                                "; give 0: no costs are known of what plans clones, and no clock runs for it");
  WorldRouting routing;
  uint64_t rows = 0;
  uint32_t tokens = 0;
  for (uint32_t p = 0; p < s.plans; ++p) {
    routing.logical.push_back(decide(s, p, p == 0 ? options.topk_idx : std::vector<std::vector<int64_t>>{}));
    if (s.spare_slots) routing.clones.emplace_back(s, p, routing.logical.back());
    routing.physical.push_back(s.spare_slots ? routing.clones.back().physical : routing.logical.back());
    rows = std::max(rows, most_rows(s, routing.physical.back()));
    tokens = std::max(tokens, *std::ranges::max_element(routing.physical.back().num_tokens));
    if (!options.timed) routing.oracles.emplace_back(s, routing.physical.back());
  }
  MachineConfig config;
  config.num_nodes = int(s.num_nodes);
  config.num_local_ranks = int(s.num_local_ranks);
  config.seed = s.seed;
  config.strategy = StrategyKind(s.strategy);
  config.timed = options.timed;
  config.looks_together = s.looks;
  config.costs = options.costs;
  config.log = options.log;
  config.trace = options.trace;
  config.fault = {Fault::Kind(s.fault), int(s.fault_rank), int(s.fault_node), s.fault_at};
  config.timeout_ps = Ps(options.timeout_s * 1e12);
  Machine machine(config);

  const BufferShape shape = shape_of(s, tokens, rows);
  const BufferLayout layout(shape);
  std::vector<std::shared_ptr<Segment>> segments;
  for (uint32_t r = 0; r < s.num_ranks(); ++r) {
    segments.push_back(Segment::private_memory(layout.total));
    machine.add_segment(int(r), segments.back()->data(), layout);
  }
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::unique_ptr<RankProgram>> programs;
  for (uint32_t r = 0; r < s.num_ranks(); ++r) {
    SimExecutor* executor = nullptr;
    engines.push_back(std::make_unique<Engine>(
        int(r), shape, segments, 100.0,
        [&](unsigned char* const*, uint64_t) {
          auto made = std::make_unique<SimExecutor>(machine, int(r), s.smem_bytes);
          executor = made.get();
          return made;
        },
        s.seed));
    executor->latency_warps = int(s.latency_warps);
    if (s.counter_base) engines.back()->start_counters_at(s.counter_base);
    programs.push_back(std::make_unique<RankProgram>(s, routing, *engines.back(), *executor, int(r), options.timed));
  }
  WorldResult result;
  result.ranks.resize(s.num_ranks());
  machine.run([&](int rank) {
    try {
      programs[size_t(rank)]->run();
    } catch (const host::DeadlineError& e) {
      result.ranks[size_t(rank)] = outcome_of(e);
    }
  });
  result.failure = machine.failure();
  result.steps = machine.steps();
  result.log = std::move(machine.log());
  result.kernels = machine.timeline().kernels;
  result.spans = std::move(machine.timeline().spans);
  collect_links(machine, result);
  return result;
}

WorldSpec random_world(uint64_t seed, int strategy) {
  host::Rng r(mix(seed, 99));
  const auto of = [&](std::initializer_list<uint32_t> choices) {
    return choices.begin()[r.below(uint32_t(choices.size()))];
  };
  WorldSpec s;
  do {
    s.num_nodes = of({1, 2, 2, 3, 4, 4, 8});
    s.num_local_ranks = of({1, 1, 2, 2, 3, 4, 8});
  } while (s.num_ranks() > 16 && !(r.one_in(200) && s.num_ranks() <= 64));
  const bool big_world = s.num_ranks() > 8;
  s.experts_per_rank = of({1, 1, 2, 3, 5});
  s.tokens = big_world ? 1 + uint32_t(r.below(6)) : 1 + uint32_t(r.below(r.one_in(4) ? 40 : 12));
  s.uneven = of({0, 1, 2});
  s.topk = of({1, 2, 2, 3, 4, 8});
  s.drop_one_in = of({0, 0, 3});
  s.routing = of({0, 0, 0, 1, 2, 3, 4, 4});
  s.dense = r.one_in(4);
  s.pad_multiple = of({1, 1, 2, 8, 16});
  s.dtype = of({0, 1, 2});
  s.hidden = 8 * (1 + uint32_t(r.below(6)));
  s.scale_bytes = r.one_in(3) ? 16 * (1 + uint32_t(r.below(4))) : 0;
  if (r.one_in(12)) {  // rows of several tiles
    s.tokens = std::min(s.tokens, 4u);
    s.hidden = 8 * (300 + uint32_t(r.below(900)));
    if (s.dtype != 2) s.row_bytes = r.one_in(2) ? 16 * (1025 + uint32_t(r.below(1200))) : 0;
  }
  s.permute = !r.one_in(3);
  s.weights = !r.one_in(3);
  s.multiply = s.permute && s.weights && r.one_in(2);
  s.fp32_partials = r.one_in(3);
  s.chunk_tokens = of({1, 1, 2, 3, 8, 32});
  s.rail_slots = of({1, 1, 2, 3, 8});
  s.num_blocks = of({1, 1, 2, 3, 4});
  s.smem_bytes = of({0, 8 * 1024, 24 * 1024, 96 * 1024});
  s.plans = of({1, 2, 3});
  s.rounds = of({1, 1, 2, 3});
  if (big_world) {
    s.plans = 1;
    s.rounds = of({1, 1, 2});
    s.num_blocks = of({1, 1, 2});
  }
  s.exchange_first = r.one_in(2);
  s.unlike = r.one_in(2);
  s.counter_base = of({0, 0, 0, 1}) ? (uint64_t(1) << 32) - 1 - r.below(6) : 0;
  s.permute_blocks = uint32_t(std::max(0, int(host::Rng(mix(seed, 100)).below(6)) - 2));  // 1 to 3 in half the worlds
  s.unpermute_blocks = s.permute_blocks;
  s.landing = uint32_t(host::Rng(mix(seed, 101)).below(4));
  s.reading = uint32_t(host::Rng(mix(seed, 102)).below(3));
  host::Rng by_lines(mix(seed, 103));
  s.latency = std::initializer_list<uint32_t>{0, 1, 1, 2}.begin()[by_lines.below(4)];
  s.latency_warps = 1 + uint32_t(by_lines.below(3));
  if (s.num_nodes > 1 && s.latency && by_lines.below(2)) s.latency = 0;  // rings are the harder of the two
  s.looks = !host::Rng(mix(seed, 105)).one_in(3);
  host::Rng clones(mix(seed, 104));
  if (clones.one_in(3)) {
    s.spare_slots = 1 + uint32_t(clones.below(2));
    s.experts_per_rank += s.spare_slots;
    s.clones_within_node = clones.one_in(3);
    if (clones.one_in(2)) {  // within a node more ranks pass on
      s.num_local_ranks *= s.num_nodes;
      s.num_nodes = 1;
    }
  }
  s.seed = seed;
  s.data_seed = seed;
  s.strategy = strategy >= 0 ? uint32_t(strategy) : of({0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7});
  return s;
}

}  // namespace hep::sim
