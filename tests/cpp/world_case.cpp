// Random test worlds and the reference that judges them.
#include "world_case.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "check.h"
#include "world.h"

namespace hep::test {

std::string WorldCase::describe() const {
  std::ostringstream os;
  os << executor << ", seed " << seed << ": " << num_nodes << "x" << num_local_ranks << " ranks, " << num_experts
     << " experts, chunks of " << chunk_tokens << ", " << rail_slots << " slots, " << plans.size() << " plans, "
     << ops.size() << " operations" << (latency ? ", some by lines" : "");
  return os.str();
}

// ---------------------------------------------------------------- reference

Reference::Reference(const WorldCase& w, const RoutingCase& c)
    : num_ranks(w.num_ranks()), num_local_ranks(w.num_local_ranks), num_experts(w.num_experts) {
  for (uint32_t r = 0; r < num_ranks; ++r) {
    pairs.emplace_back(c.num_tokens[r]);
    for (uint32_t t = 0; t < c.num_tokens[r]; ++t)
      for (uint32_t k = 0; k < c.topk[r]; ++k)
        if (const int64_t e = c.topk_idx[r][t * c.topk[r] + k]; e >= 0)
          pairs[r][t][int(e)] += c.weights[r][t * c.topk[r] + k];
    uint32_t width = c.dense ? 0 : c.topk[r];
    if (c.dense)
      for (const auto& of_token : pairs[r]) width = std::max(width, uint32_t(of_token.size()));
    widths_.push_back(std::max(1u, std::min(width, num_experts)));
  }
  const int experts_per_rank = int(num_experts / num_ranks);
  received.resize(num_ranks);
  permuted.resize(num_ranks);
  tokens_per_expert.resize(num_ranks);
  padded_tokens_per_expert.resize(num_ranks);
  wanted_rows.assign(num_ranks, 0);
  dropped_pairs.assign(num_ranks, 0);
  for (int d = 0; d < int(num_ranks); ++d) {
    for (int s = 0; s < int(num_ranks); ++s)
      for (uint32_t t = 0; t < pairs[s].size(); ++t) {
        bool wanted = false;
        for (const auto& [expert, weight] : pairs[s][t]) wanted |= rank_of(expert) == d;
        if (!wanted || wanted_rows[d]++ >= w.recv_capacity) continue;
        row_[{d, s, t}] = uint32_t(received[d].size());
        received[d].push_back({s, t});
      }
    const size_t budget = c.budgets[d] ? *c.budgets[d] : ~size_t{0};
    std::vector<Slot>& rows = permuted[d];
    size_t position = 0;  // as if there were no budget
    for (int e = d * experts_per_rank; e < (d + 1) * experts_per_rank; ++e) {
      int64_t real = 0, padded = 0;
      const size_t first = position;
      auto add = [&](const Slot& slot) {
        if (position++ >= budget) {
          dropped_pairs[d] += slot.kind != Slot::kPad;
          return;
        }
        if (slot.kind == Slot::kPair) computed_[{e, slot.token.rank, slot.token.index}] = uint32_t(rows.size());
        real += slot.kind != Slot::kPad;
        ++padded;
        rows.push_back(slot);
      };
      for (int s = 0; s < int(num_ranks); ++s)
        for (uint32_t t = 0; t < pairs[s].size(); ++t)
          if (pairs[s][t].contains(e)) add({arrives({s, t}, d) ? Slot::kPair : Slot::kHole, {s, t}, e});
      if (c.pad_empty && position == first) add({Slot::kPad, {-1, 0}, e});
      while (position % c.pad_multiple != 0) add({Slot::kPad, {-1, 0}, e});
      tokens_per_expert[d].push_back(real);
      padded_tokens_per_expert[d].push_back(padded);
    }
  }
}

bool Reference::needs_rank(Token t, int rank) const {
  return std::ranges::any_of(pairs_of(t), [&](const auto& pair) { return rank_of(pair.first) == rank; });
}

bool Reference::needs(Token t, int node) const {
  return std::ranges::any_of(pairs_of(t), [&](const auto& pair) { return node_of(pair.first) == node; });
}

uint32_t Reference::widest() const {
  return *std::ranges::max_element(widths_);
}

// ---------------------------------------------------------------- random cases

namespace {

// How the tokens of a rank choose experts.
struct Habit {
  enum Kind { kUniform, kOneExpert, kFewExperts, kOwnNode, kSkewedNodes } kind;
  int favourite;
  std::vector<uint32_t> node_period;  // kSkewedNodes: node n is wanted by every node_period[n]-th token
};

int choose_expert(Random& r, const WorldCase& w, const Habit& h, uint32_t token, int node) {
  const int per_node = int(w.num_experts / w.num_nodes);
  switch (h.kind) {
    case Habit::kOneExpert: return h.favourite;
    case Habit::kFewExperts: return (h.favourite + int(r.below(2))) % int(w.num_experts);
    case Habit::kOwnNode: return node * per_node + int(r.below(uint32_t(per_node)));
    case Habit::kSkewedNodes:
      if (const uint32_t n = r.below(w.num_nodes); token % h.node_period[n] == 0)
        return int(n) * per_node + int(r.below(uint32_t(per_node)));
      return -1;
    case Habit::kUniform: break;
  }
  return int(r.below(w.num_experts));
}

RoutingCase random_routing(Random& r, WorldCase& w, uint32_t max_tokens) {
  RoutingCase c;
  c.dense = r.one_in(4);
  const uint32_t max_topk = r.of({1u, 2u, 3u, 4u, 8u, 40u}), most = r.between(1, max_tokens);
  const bool with_drops = r.one_in(3), zero_somewhere = r.one_in(2);
  for (uint32_t s = 0; s < w.num_ranks(); ++s) {
    const uint32_t topk = r.one_in(3) ? r.between(1, max_topk) : max_topk;
    const uint32_t tokens = zero_somewhere && r.one_in(3) ? 0 : r.between(r.one_in(2) ? most : 0, most);
    Habit h{r.of({Habit::kUniform, Habit::kUniform, Habit::kOneExpert, Habit::kFewExperts, Habit::kOwnNode,
                  Habit::kSkewedNodes}),
            int(r.below(w.num_experts)),
            {}};
    for (uint32_t n = 0; n < w.num_nodes; ++n) h.node_period.push_back(r.of({1u, 1u, 2u, 7u}));
    c.num_tokens.push_back(tokens);
    c.topk.push_back(topk);
    c.topk_idx.emplace_back(tokens * topk);
    c.weights.emplace_back(tokens * topk);
    for (uint32_t i = 0; i < tokens * topk; ++i) {
      const bool drop = with_drops && r.one_in(3);
      c.topk_idx[s][i] = drop ? -1 : choose_expert(r, w, h, i / topk, int(s / w.num_local_ranks));
      c.weights[s][i] = float(r.between(1, 2));
    }
  }
  c.pad_multiple = r.of({1u, 1u, 2u, 8u, 16u});
  c.pad_empty = c.num_tokens[0] % 2 != 0;  // drawn from what is drawn already: cases keep their seeds
  c.budgets.resize(w.num_ranks());
  if (r.one_in(4))
    for (auto& budget : c.budgets)
      if (!r.one_in(3)) budget = r.below(2 * max_tokens);
  if (r.one_in(5)) w.recv_capacity = std::max(1u, r.between(0, 2 * max_tokens));
  return c;
}

}  // namespace

OpCase dispatch_op(const WorldCase& w, size_t plan, int num_blocks) {
  OpCase op;
  op.plan = plan;
  op.salt = w.ops.size() + 1;
  op.num_blocks.assign(w.num_ranks(), num_blocks);
  op.local_blocks.assign(w.num_ranks(), 0);
  Random r(w.seed * 1000 + op.salt);  // ranks need not agree
  for (uint32_t i = 0; i < w.num_ranks(); ++i)
    op.landed.push_back(r.of({Landed::kAside, Landed::kEveryPair, Landed::kFirstPair}));
  return op;
}

OpCase combine_op(const WorldCase& w, size_t plan, int num_blocks) {
  OpCase op = dispatch_op(w, plan, num_blocks);
  op.combine = true;
  return op;
}

// Rank 1 needs node 0 for two late tokens only, rank 3 needs nodes 0 and 2 for all; one slot, one token a chunk.
WorldCase skewed_world(const std::string& executor) {
  WorldCase w;
  w.num_nodes = 4;
  w.num_experts = 4;
  w.chunk_tokens = 1;
  w.rail_slots = 1;
  w.executor = executor;
  w.plans.push_back(route_by(w, {0, 10, 0, 10}, 2, [](int rank, uint32_t t) {
    return rank == 3 || t == 5 || t == 6 ? std::vector<int>{0, 2} : std::vector<int>{2};
  }));
  w.ops.push_back(dispatch_op(w, 0, 1));
  w.ops.push_back(combine_op(w, 0, 1));
  return w;
}

// Every token has two experts on each of two ranks, whose outputs are read in place.
WorldCase paired_world(const std::string& executor) {
  WorldCase w;
  w.num_local_ranks = 2;
  w.num_experts = 6;
  w.executor = executor;
  w.plans.push_back(route_by(w, {9, 4}, 4, [](int, uint32_t) { return std::vector<int>{0, 2, 3, 4}; }));
  w.ops.push_back(dispatch_op(w, 0, 1));
  w.ops.push_back(combine_op(w, 0, 1));
  w.ops.back().landed = {Landed::kEveryPair, Landed::kEveryPair};
  w.ops.back().rounds = true;
  return w;
}

WorldCase random_case(uint64_t seed, const CaseLimits& limits) {
  Random r(seed);
  WorldCase w;
  w.seed = seed;
  w.executor = limits.executor;
  do {
    w.num_nodes = r.between(1, limits.max_nodes);
    w.num_local_ranks = r.between(1, limits.max_local_ranks);
  } while (w.num_ranks() > limits.max_ranks);
  w.num_experts = w.num_ranks() * r.of({1u, 1u, 2u, 3u, 5u});
  w.chunk_tokens = r.of({1u, 1u, 2u, 3u, 8u, 32u});
  w.rail_slots = r.of({1u, 1u, 2u, 3u, 8u});
  // A few cases have rows of several tiles, hence few tokens; most have small rows.
  const bool big = limits.big_rows_one_in && r.one_in(limits.big_rows_one_in);
  const uint32_t max_tokens = big ? 4 : r.one_in(3) ? 3 * limits.max_tokens : limits.max_tokens;
  for (uint32_t i = 0, n = r.between(1, 3); i < n; ++i) w.plans.push_back(random_routing(r, w, max_tokens));
  w.exchange_first = r.one_in(3);
  w.latency = limits.latency;
  std::map<size_t, bool> came_with_weights;  // by plan: its first dispatch
  for (uint32_t i = 0, n = r.between(2, limits.max_ops); i < n; ++i) {
    OpCase op = dispatch_op(w, r.below(uint32_t(w.plans.size())), 1);
    for (int& blocks : op.num_blocks) blocks = int(r.between(1, limits.max_blocks));
    for (int& blocks : op.local_blocks) blocks = int(r.one_in(2) ? 0 : r.between(1, limits.max_blocks));
    op.combine = came_with_weights.contains(op.plan) && !r.one_in(4);
    op.permute = !r.one_in(3);
    op.weights = r.one_in(2);
    op.latency = limits.latency && !r.one_in(3);
    if (!op.combine) {
      op.row_bytes = 16 * (big ? r.between(600, 2500) : r.between(1, 40));
      op.scale_bytes = r.one_in(3) ? 16 * r.between(1, 20) : 0;
      op.extra_rows = r.one_in(3) ? r.between(1, 20) : 0;
      if (!came_with_weights.contains(op.plan)) {
        op.weights = !r.one_in(4);
        came_with_weights[op.plan] = op.weights;
        if (op.latency) op.salt = 2 * op.salt + 1001;  // odd: weights are the routing's
      }
    } else {
      op.dtype = r.of({DType::kBf16, DType::kFp16, DType::kFp32});
      op.hidden = 8 * (big ? r.between(250, 1300) : r.between(1, 30)) - (op.dtype == DType::kFp32 ? 4 : 0);
      op.multiply = op.permute && came_with_weights[op.plan] && r.one_in(2);
      op.fp32_partials = r.one_in(3);
      op.rounds = r.one_in(3);
    }
    w.ops.push_back(op);
  }
  return w;
}

void check_world(const WorldCase& w) {
  const Outcome outcome = run_world(w);
  if (outcome.kind != Outcome::kRight) throw check::Failure(w.describe() + ": " + outcome.what);
}

}  // namespace hep::test
