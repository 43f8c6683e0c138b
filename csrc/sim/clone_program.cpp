// Calls of the engine, and what must come of each.
#include "sim/clone_program.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>

namespace hep::sim {
namespace {

constexpr int64_t kUnwritten = -7;  // what no kernel writes

uint64_t weight_word(uint64_t salt, int expert, uint32_t matrix, uint64_t word) {
  return mix(salt, uint64_t(expert), matrix, word);
}
// Such that the order of additions shows.
float gradient_of(uint64_t salt, size_t slot, uint32_t matrix, uint64_t element) {
  const uint64_t x = mix(salt, slot, matrix, element);
  return std::ldexp(float(int(x & 0xffffff) - 0x800000), int(x >> 32 & 15) - 23);  // all bits of a float
}
constexpr float kSumBefore = 0.375f;

}  // namespace

CloneProgram::CloneProgram(const WorldSpec& spec, const std::vector<RoutingDecision>& logical,
                           const std::vector<CloneOracle>& oracles, Engine& engine, int rank)
    : s_(spec), logical_(logical), oracles_(oracles), engine_(engine), rank_(rank), plans_(spec.plans) {}

// Of a launch, at most so many; salt: ranks that are unlike differ.
int CloneProgram::blocks(uint64_t salt, uint32_t most) const {
  return s_.unlike ? 1 + int(mix(salt, uint64_t(rank_), 41) % most) : int(most);
}

void CloneProgram::clear(SlotRouting& routing, const RoutingInput& in) const {
  if (s_.dense) {
    routing.map.assign(uint64_t(in.num_tokens) * s_.num_experts() + 1, 7);
    routing.columns.assign(uint64_t(in.num_tokens) * s_.num_logical_experts() + 1, kUnwritten);
  } else {
    routing.topk_idx.assign(uint64_t(in.num_tokens) * in.topk + 1, kUnwritten);
  }
}

BalanceCall CloneProgram::call(Planned& p, uint64_t salt) const {
  BalanceCall c;
  c.columns = p.columns.data();
  for (const int64_t column : p.columns) c.owners_digest = uint32_t(mix(c.owners_digest, uint64_t(column)));
  c.out_idx = p.routing.topk_idx.data();
  c.out_map = p.routing.map.data();
  c.out_columns = p.routing.columns.data();
  c.slot_expert = p.slot_expert.data();
  c.slot_tokens = p.slot_tokens.data();
  c.take = p.take.data();
  c.first = p.first.data();
  c.numbers = p.numbers.data();
  c.counts = p.counts.data();
  c.num_blocks = blocks(salt, std::min(s_.num_blocks, kMostExchangeBlocks));
  return c;
}

const SlotRouting& CloneProgram::plan(uint32_t plan, const RoutingInput& in, const ProgramPoint& at) {
  const CloneOracle& o = oracles_[plan];
  const size_t slots = o.slot_expert.size();
  Planned& p = plans_[plan];
  p.columns = o.columns;
  p.slot_expert.assign(slots, int32_t(kUnwritten));
  p.slot_tokens.assign(slots, kUnwritten);
  p.take = p.first = p.slot_tokens;
  p.counts.assign(o.counts.size(), kUnwritten);
  p.numbers.assign(4, kUnwritten);
  clear(p.routing, in);
  engine_.balance(in, call(p, mix(plan, s_.data_seed)));
  at.expect(p.counts == o.counts, "other counts than the routing has");
  at.expect(p.slot_expert == o.slot_expert, "other experts in the spare slots than the core plans");
  at.expect(p.slot_tokens == o.slot_tokens, "other tokens of clones than the core plans");
  compare(plan, in, p.routing, at);
  return p.routing;
}

void CloneProgram::replay(uint32_t plan, const RoutingInput& in, const ProgramPoint& at) {
  Planned& p = plans_[plan];
  SlotRouting again;
  std::swap(p.routing, again);
  clear(p.routing, in);
  BalanceCall c = call(p, mix(plan, s_.data_seed, 42));
  c.replayed = true;
  engine_.balance(in, c);
  std::swap(p.routing, again);
  compare(plan, in, again, at);
}

void CloneProgram::compare(uint32_t plan, const RoutingInput& in, const SlotRouting& found,
                           const ProgramPoint& at) const {
  const std::vector<int64_t>&logical = logical_[plan].topk_idx[size_t(rank_)],
        &wanted = oracles_[plan].physical.topk_idx[size_t(rank_)];
  if (!s_.dense) {
    for (size_t i = 0; i < wanted.size(); ++i)
      at.expect(found.topk_idx[i] == wanted[i], "choice ", i % s_.topk, " of token ", i / s_.topk, " goes to slot ",
                found.topk_idx[i], ", not ", wanted[i]);
    at.expect(found.topk_idx.back() == kUnwritten, "written behind the choices");
    return;
  }
  const uint64_t width = s_.num_experts(), experts = s_.num_logical_experts();
  std::vector<unsigned char> map(uint64_t(in.num_tokens) * width, 0);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] < 0) continue;
    map[i / s_.topk * width + uint64_t(wanted[i])] = 1;
    const int64_t column = found.columns[i / s_.topk * experts + uint64_t(logical[i])];
    at.expect(column == wanted[i], "choice ", i % s_.topk, " of token ", i / s_.topk, " has column ", column, ", not ",
              wanted[i]);
  }
  at.expect(std::equal(map.begin(), map.end(), found.map.begin()), "another map over slots");
  at.expect(found.map.back() == 7 && found.columns.back() == kUnwritten, "written behind the map");
}

// The experts of this rank's owner slots.
std::vector<int> CloneProgram::owned(uint32_t plan) const {
  std::vector<int> experts(s_.owners_per_rank());
  const std::vector<int64_t>& columns = oracles_[plan].columns;
  for (size_t e = 0; e < columns.size(); ++e)
    if (columns[e] / s_.experts_per_rank == rank_) experts[size_t(columns[e] % s_.experts_per_rank)] = int(e);
  return experts;
}

SpareCall CloneProgram::spare_call(uint32_t plan, const std::vector<uint64_t>& experts, uint64_t salt) const {
  SpareCall c;
  c.slot_expert = plans_[plan].slot_expert.data();
  c.columns = plans_[plan].columns.data();
  c.experts = experts.data();
  static constexpr uint32_t kMost[] = {1, 2, 4, 9};  // warps that share a channel of clones
  c.num_blocks = blocks(salt, kMost[mix(s_.data_seed, 44) % 4]);
  c.chunk_bytes = uint32_t(16 * (mix(s_.data_seed, 43) % 4));  // 0: what the machine has stages for
  return c;
}

void CloneProgram::push(uint32_t plan, uint32_t round) {
  const SpareShape& shape = engine_.spares();
  const uint64_t salt = mix(plan, round, s_.data_seed, 3);
  std::vector<std::vector<Vec16>> weights;
  std::vector<uint64_t> experts;
  for (const int expert : owned(plan))
    for (uint32_t m = 0; m < shape.num_matrices; ++m) {
      const uint64_t bytes = shape.elements[m] * shape.element_bytes;
      auto* const words = reinterpret_cast<unsigned char*>(weights.emplace_back(bytes / 16).data());
      for (uint64_t at = 0; at < bytes; at += 8) {
        const uint64_t word = weight_word(salt, expert, m, at / 8);
        std::memcpy(words + at, &word, 8);
      }
      experts.push_back(reinterpret_cast<uint64_t>(words));
    }
  const SpareCall c = spare_call(plan, experts, salt);
  engine_.push_weights(c);
  engine_.await_weights(c);
}

void CloneProgram::look_at_weights(uint32_t plan, uint32_t round, const ProgramPoint& at) const {
  const SpareShape& shape = engine_.spares();
  const uint64_t salt = mix(plan, round, s_.data_seed, 3);
  const std::shared_ptr<unsigned char> memory = engine_.spare_memory(false);
  for (uint32_t slot = 0; slot < s_.spare_slots; ++slot) {
    const int expert = oracles_[plan].slot_expert[uint32_t(rank_) * s_.spare_slots + slot];
    for (uint32_t m = 0; m < shape.num_matrices && expert >= 0; ++m) {
      const uint64_t bytes = shape.elements[m] * shape.element_bytes;
      const unsigned char* const found = memory.get() + shape.weights_at(m) + slot * bytes;
      for (uint64_t b = 0; b < bytes; b += 8) {
        const uint64_t word = weight_word(salt, expert, m, b / 8);
        at.expect(std::memcmp(found + b, &word, 8) == 0, "byte ", b, " of matrix ", m, " in spare slot ", slot,
                  " is not that of expert ", expert);
      }
    }
  }
}

void CloneProgram::collect(uint32_t plan, uint32_t round, const ProgramPoint& at) {
  const SpareShape& shape = engine_.spares();
  const uint64_t salt = mix(plan, round, s_.data_seed, 4);
  const std::shared_ptr<unsigned char> memory = engine_.spare_memory(true);
  for (uint32_t slot = 0; slot < s_.spare_slots; ++slot)
    for (uint32_t m = 0; m < shape.num_matrices; ++m) {
      auto* const to = reinterpret_cast<float*>(memory.get() + shape.gradients_at(m)) + slot * shape.elements[m];
      for (uint64_t e = 0; e < shape.elements[m]; ++e)
        to[e] = gradient_of(salt, uint32_t(rank_) * s_.spare_slots + slot, m, e);
    }
  const std::vector<int> experts = owned(plan);
  std::vector<std::vector<float>> sums;
  std::vector<uint64_t> addresses;
  for (size_t i = 0; i < experts.size() * shape.num_matrices; ++i) {
    const uint64_t elements = shape.elements[i % shape.num_matrices];
    addresses.push_back(reinterpret_cast<uint64_t>(sums.emplace_back(elements, kSumBefore).data()));
  }
  engine_.collect_gradients(spare_call(plan, addresses, salt));
  // Written again at once, as a next layer's backward does: nobody may read them any more.
  std::memset(memory.get(), 0x7f, engine_.spare_bytes(true));
  for (size_t i = 0; i < sums.size(); ++i)
    for (uint64_t e = 0; e < sums[i].size(); ++e) {
      float wanted = kSumBefore;
      for (uint32_t behind = 1; behind <= s_.num_nodes; ++behind)
        wanted += clones_of(plan, salt, experts[i / shape.num_matrices], behind, uint32_t(i % shape.num_matrices), e);
      at.expect(std::bit_cast<uint32_t>(sums[i][e]) == std::bit_cast<uint32_t>(wanted), "element ", e,
                " of the gradient of expert ", experts[i / shape.num_matrices], " is ", sums[i][e], ", not ", wanted);
    }
}

// The sum of an element of an expert's clones on the node so far behind this rank's; 0: there is none.
float CloneProgram::clones_of(uint32_t plan, uint64_t salt, int expert, uint32_t behind, uint32_t m, uint64_t e) const {
  const uint32_t slots = s_.num_local_ranks * s_.spare_slots,
                 node = (uint32_t(rank_) / s_.num_local_ranks + behind) % s_.num_nodes;
  std::optional<float> clones;
  for (uint32_t slot = node * slots; slot < (node + 1) * slots; ++slot) {
    if (oracles_[plan].slot_expert[slot] != expert) continue;
    const float one = gradient_of(salt, slot, m, e);
    clones = clones ? *clones + one : one;
  }
  return clones.value_or(0);
}

}  // namespace hep::sim
