// The program of a rank, its data and its checks.
#include "sim/rank_program.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "layout/headers.h"

namespace hep::sim {
namespace {

uint64_t key_of(Token t) {
  return uint64_t(t.rank) << 32 | t.index;
}

void fill_row(Token t, uint64_t salt, unsigned char* row, size_t bytes) {
  uint64_t word = mix(key_of(t), salt);
  for (size_t i = 0; i < bytes; i += 8, word += 0x9e3779b97f4a7c15u) std::memcpy(row + i, &word, 8);
}
bool is_row(Token t, uint64_t salt, const unsigned char* row, size_t bytes) {
  uint64_t word = mix(key_of(t), salt), wrong = 0;
  for (size_t i = 0; i < bytes; i += 8, word += 0x9e3779b97f4a7c15u) {
    uint64_t got;
    std::memcpy(&got, row + i, 8);
    wrong |= got ^ word;
  }
  return wrong == 0;
}

void put(unsigned char* row, uint32_t column, float value, DType dtype) {
  switch (dtype) {
    case DType::kBf16: reinterpret_cast<Bf16*>(row)[column] = from_float<Bf16>(value); break;
    case DType::kFp16: reinterpret_cast<Fp16*>(row)[column] = from_float<Fp16>(value); break;
    case DType::kFp32: reinterpret_cast<float*>(row)[column] = value; break;
  }
}
float get(const unsigned char* row, uint32_t column, DType dtype) {
  switch (dtype) {
    case DType::kBf16: return to_float(reinterpret_cast<const Bf16*>(row)[column]);
    case DType::kFp16: return to_float(reinterpret_cast<const Fp16*>(row)[column]);
    case DType::kFp32: return reinterpret_cast<const float*>(row)[column];
  }
  return 0;
}

// Small integers, so that sums are exact in every dtype and order. from: an expert, or -1 - rank.
struct Output {
  uint32_t base;
  Output(Token t, int from, uint64_t salt) : base(uint32_t(mix(key_of(t), uint64_t(int64_t(from)), salt) % 5)) {}
  float at(uint32_t column) const { return float(int((base + column * 3) % 5) - 2); }
};
float returned_weight(Token t, int expert, int from, uint64_t salt) {
  return float(mix(key_of(t), uint64_t(expert), uint64_t(int64_t(from)), salt) % 7);
}

// 16-byte aligned scratch that is never null.
struct Buffer {
  std::vector<std::max_align_t> words;
  explicit Buffer(uint64_t bytes) : words(bytes / sizeof(std::max_align_t) + 2) {}
  unsigned char* data() { return reinterpret_cast<unsigned char*>(words.data()); }
  float* floats() { return reinterpret_cast<float*>(words.data()); }
};

}  // namespace

PlanBlock::PlanBlock(uint64_t bytes, bool poison) : memory_(new unsigned char[bytes + 128]) {
  if (poison) std::memset(memory_.get(), 0xff, bytes + 128);
}

PhantomMemory::PhantomMemory(uint64_t bytes) : bytes_(bytes + (1 << 16)) {
  void* p = ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<unsigned char*>(p);
}
PhantomMemory::~PhantomMemory() {
  ::munmap(base_, bytes_);
}
unsigned char* PhantomMemory::take(uint64_t bytes) {
  unsigned char* p = base_ + used_;
  used_ += align_up(bytes + 16, 256);
  if (used_ > bytes_) throw std::bad_alloc();
  return p;
}

RankProgram::RankProgram(const WorldSpec& spec, const WorldRouting& routing, Engine& engine, SimExecutor& executor,
                         int rank, bool timed)
    : s_(spec),
      decisions_(routing.physical),
      logical_(routing.logical),
      oracles_(routing.oracles),
      engine_(engine),
      executor_(executor),
      rank_(rank),
      timed_(timed),
      shape_{int32_t(spec.num_nodes), int32_t(spec.num_local_ranks), rank},
      dtype_(DType(spec.dtype)),
      row_bytes_(spec.row_bytes ? spec.row_bytes : spec.hidden * dtype_bytes(DType(spec.dtype))),
      at_{rank},
      clones_(spec, routing.logical, routing.clones, engine, rank),
      plans_(spec.plans) {}

// Whether an operation goes by lines: the same on all ranks.
bool RankProgram::by_lines(uint32_t plan, uint32_t round, uint32_t operation) const {
  return s_.latency == 2 || (s_.latency == 1 && mix(plan, round, s_.data_seed, 11 + operation) % 2);
}

void RankProgram::run() {
  for (uint32_t plan = 0; s_.exchange_first && s_.latency != 2 && plan < s_.plans; ++plan) exchange(plan);
  for (uint32_t round = 0; round < s_.rounds; ++round)
    for (uint32_t plan = 0; plan < s_.plans; ++plan) {
      if (!plans_[plan].plan && !by_lines(plan, round, 0)) exchange(plan);
      // Weights travel before a dispatch whose clones are planned, or behind it.
      const bool early = plans_[plan].plan && mix(plan, round, s_.data_seed, 21) % 2;
      if (early) push(plan, round);
      ++at_.operation;
      dispatch(plan, round);
      if (!early) push(plan, round);
      if (s_.combine) {
        ++at_.operation;
        combine(plan, round);
      }
      collect(plan, round);
    }
}

void RankProgram::push(uint32_t plan, uint32_t round) {
  if (!clones_.pushes()) return;
  at_.what = "weights of clones";
  clones_.push(plan, round);
  clones_.look_at_weights(plan, round, at_);
}

// Behind the experts, which have read the weights till now. Evaluation, which one world in two is, brings no gradients
// home: ranks go on as far as their tokens let them.
void RankProgram::collect(uint32_t plan, uint32_t round) {
  if (!clones_.pushes()) return;
  at_.what = "gradients of clones";
  clones_.look_at_weights(plan, round, at_);
  if (mix(s_.data_seed, 22) % 2) clones_.collect(plan, round, at_);
}

// A plan's routing over slots, of which there are spare ones where its clones are planned first.
CallerRouting RankProgram::routing_of(uint32_t plan) {
  CallerRouting routing(s_, logical_[plan], size_t(rank_));
  if (!s_.spare_slots) return routing;
  const char* const before = std::exchange(at_.what, "clones");
  const RoutingInput over_experts = routing.in;
  const SlotRouting& slots = clones_.plan(plan, over_experts, at_);
  if (mix(plan, uint64_t(rank_), s_.data_seed, 23) % 2) clones_.replay(plan, over_experts, at_);
  routing.rewrite(s_, slots);
  at_.what = before;
  return routing;
}

PlaceCall RankProgram::place_call(uint32_t plan) const {
  PlaceCall c;
  c.header.topk = uint16_t(std::max(1u, std::min(s_.topk, s_.num_experts())));
  c.header.pad_multiple = s_.pad_multiple;
  c.header.hidden = plan + 100;
  c.num_blocks = int(std::min(s_.num_blocks, kMostExchangeBlocks));
  if (s_.unlike) c.num_blocks = 1 + int(mix(plan, uint64_t(rank_)) % uint64_t(c.num_blocks));
  return c;
}

// Rows of a dispatch's result where no host has learned them: exactly so many.
uint64_t RankProgram::rows_of(uint32_t plan) const {
  std::vector<uint64_t> of_expert(s_.experts_per_rank);
  uint64_t received = 0;
  const int64_t first = int64_t(rank_) * s_.experts_per_rank;
  for (const auto& choices : decisions_[plan].topk_idx)
    for (size_t token = 0; token * s_.topk < choices.size(); ++token) {
      std::vector<int64_t> here;
      for (uint32_t k = 0; k < s_.topk; ++k)
        if (const int64_t e = choices[token * s_.topk + k] - first;
            e >= 0 && e < int64_t(s_.experts_per_rank) && std::find(here.begin(), here.end(), e) == here.end())
          here.push_back(e);
      for (const int64_t e : here) ++of_expert[size_t(e)];
      received += !here.empty();
    }
  if (!s_.permute) return received;
  uint64_t rows = 0;
  for (const uint64_t n : of_expert) rows += align_up(n, s_.pad_multiple);
  return rows;
}

// Warps touch payload themselves where it goes by lines: none is there.
void RankProgram::say_phantom(const PhantomMemory* phantom) {
  executor_.phantom_begin = phantom ? phantom->begin() : nullptr;
  executor_.phantom_end = phantom ? phantom->end() : nullptr;
}

void RankProgram::route_by_lines(uint32_t plan, const DispatchCall& c) {
  const CallerRouting routing = routing_of(plan);
  PlaceCall place = place_call(plan);
  Placed& made = plans_[plan];
  made.memory = PlanBlock(engine_.plan_memory(routing.in.num_tokens, place.header.topk, true).total, !timed_);
  place.memory = made.memory.data();
  if (s_.permute) place.header.set_budget(uint32_t(c.out_rows));
  made.plan = engine_.latency_dispatch(routing.in, place, c, s_.weights);
  if (timed_) return;
  const Oracle& o = oracles_[plan];
  expect(made.plan->num_recv_rows() == o.received[size_t(rank_)].size(), made.plan->num_recv_rows(), " receive rows");
  expect(made.plan->num_permuted_rows() == o.permuted[size_t(rank_)].size(), made.plan->num_permuted_rows(),
         " permuted rows");
}

void RankProgram::exchange(uint32_t plan) {
  at_.what = "exchange";
  const RoutingDecision& d = decisions_[plan];
  const size_t r = size_t(rank_);
  const CallerRouting routing = routing_of(plan);
  const RoutingInput& in = routing.in;
  PlaceCall c = place_call(plan);
  Placed& made = plans_[plan];
  made.memory = PlanBlock(engine_.plan_memory(in.num_tokens, c.header.topk, false).total, !timed_);
  c.memory = made.memory.data();
  const std::shared_ptr<Placement> placement = engine_.place_and_count(in, c);
  const PlacedCounts& counts = placement->counts;
  for (uint32_t source = 0; source < s_.num_ranks(); ++source) {
    expect(counts.headers[source].num_tokens == d.num_tokens[source], "tokens of rank ", source);
    expect(counts.headers[source].hidden == plan + 100, "header of rank ", source);
  }
  expect(counts.placed, "nothing was placed");
  made.learned = PlanBlock(placement->learned.total, !timed_);
  made.plan = placement->plan(made.learned.data());
  if (timed_) return;
  const Oracle& o = oracles_[plan];
  expect(made.plan->num_recv_rows() == o.received[r].size(), made.plan->num_recv_rows(), " receive rows");
  expect(made.plan->num_permuted_rows() == o.permuted[r].size(), made.plan->num_permuted_rows(), " permuted rows");
}

// Blocks, and the chunk that all ranks must agree upon; salt: the same on all of them.
template <class Call>
void RankProgram::set_launch(Call& c, uint64_t salt) const {
  c.num_blocks = int(s_.num_blocks);
  if (!s_.unlike) return;
  c.num_blocks = 1 + int(mix(salt, uint64_t(rank_)) % (2 * s_.num_blocks));
  c.chunk_tokens = 1 + uint32_t(salt % s_.chunk_tokens);
}

void RankProgram::dispatch(uint32_t plan, uint32_t round) {
  at_.what = "dispatch";
  const std::shared_ptr<Plan> known = plans_[plan].plan;
  const bool lines = by_lines(plan, round, 0) && (!known || known->complete());
  const uint32_t tokens = decisions_[plan].num_tokens[size_t(rank_)],
                 stride = MessageLayout::make(shape_, place_call(plan).header.topk, true, 0, 0).weight_bytes / 4;
  const uint64_t salt = mix(plan, round, s_.data_seed, 1);
  const uint64_t rows = !known ? rows_of(plan) : s_.permute ? known->num_permuted_rows() : known->num_recv_rows();
  const auto run = [&](const DispatchCall& c) {
    if (!known)
      route_by_lines(plan, c);
    else
      lines ? engine_.latency_dispatch(*known, c) : engine_.dispatch(*known, c);
  };
  const uint64_t columns = s_.permute ? 1 : s_.experts_per_rank * s_.num_local_ranks;
  DispatchCall c;
  c.row_bytes = row_bytes_;
  c.scale_bytes = s_.scale_bytes;
  c.out_rows = rows;
  c.permute = s_.permute;
  c.local_blocks = int(s_.permute_blocks);
  set_launch(c, salt);
  const uint32_t landing = lines ? 0 : s_.landing == 3 ? uint32_t(mix(salt, uint64_t(rank_)) % 3) : s_.landing;
  std::shared_ptr<unsigned char> lent_x, lent_scales;
  if (landing) {
    c.land_in = landing == 2 ? LandIn::kFirstPair : LandIn::kEveryPair;
    lent_x = engine_.arena().take(rows * row_bytes_);
    lent_scales = engine_.arena().take(rows * s_.scale_bytes);
  }
  if (timed_) {
    PhantomMemory phantom((tokens + rows) * (uint64_t(row_bytes_) + s_.scale_bytes) + rows * columns * 4 + 4096);
    c.x = phantom.take(uint64_t(tokens) * row_bytes_);
    c.out_x = phantom.take(rows * row_bytes_);
    c.scales = phantom.take(uint64_t(tokens) * s_.scale_bytes);
    c.out_scales = phantom.take(rows * s_.scale_bytes);
    if (landing) {
      c.out_x = lent_x.get();
      c.out_scales = lent_scales.get();
    }
    if (s_.weights && known) c.weights = known->weights();
    c.out_weights = reinterpret_cast<float*>(phantom.take(rows * columns * 4));
    say_phantom(lines ? &phantom : nullptr);
    return run(c);
  }
  const Oracle& o = oracles_[plan];
  Buffer x(uint64_t(tokens) * row_bytes_), scales(uint64_t(tokens) * s_.scale_bytes), weights(tokens * stride * 4ull);
  for (uint32_t t = 0; t < tokens; ++t) {
    fill_row({rank_, t}, salt, x.data() + uint64_t(t) * row_bytes_, row_bytes_);
    fill_row({rank_, t}, ~salt, scales.data() + uint64_t(t) * s_.scale_bytes, s_.scale_bytes);
    float* w = weights.floats() + uint64_t(t) * stride;
    for (const Pair& pair : o.pairs[size_t(rank_)][t]) *w++ = pair.weight;
  }
  Buffer out_x(rows * row_bytes_), out_scales(rows * s_.scale_bytes), out_weights(rows * columns * 4);
  c.x = x.data();
  c.scales = scales.data();
  c.weights = s_.weights ? weights.floats() : nullptr;
  c.out_x = out_x.data();
  c.out_scales = out_scales.data();
  c.out_weights = out_weights.floats();
  if (landing) {
    c.out_x = lent_x.get();
    c.out_scales = lent_scales.get();
    std::memset(c.out_x, 0xff, rows * row_bytes_);
    std::memset(c.out_scales, 0xff, rows * s_.scale_bytes);
  }
  executor_.first_row = o.first_row[size_t(rank_)];
  run(c);
  check_dispatch(o, salt, c.out_x, c.out_scales, c.out_weights, rows);
}

void RankProgram::check_dispatch(const Oracle& o, uint64_t salt, const unsigned char* x, const unsigned char* scales,
                                 const float* weights, uint64_t rows) const {
  const std::vector<unsigned char> zeros(std::max(row_bytes_, s_.scale_bytes), 0);
  const int first_expert = shape_.node() * int(s_.experts_per_rank * s_.num_local_ranks);
  const int node_experts = int(s_.experts_per_rank * s_.num_local_ranks);
  for (uint64_t row = 0; row < rows; ++row) {
    const PermutedRow want =
        s_.permute ? o.permuted[size_t(rank_)][row] : PermutedRow{o.received[size_t(rank_)][row], 0};
    const unsigned char *got = x + row * row_bytes_, *got_scales = scales + row * s_.scale_bytes;
    if (want.expert < 0) {
      expect(std::memcmp(got, zeros.data(), row_bytes_) == 0, "padding row ", row, " is not zero");
      expect(std::memcmp(got_scales, zeros.data(), s_.scale_bytes) == 0, "scales of padding row ", row);
      expect(!s_.weights || weights[row] == 0, "weight of padding row ", row);
      continue;
    }
    expect(is_row(want.token, salt, got, row_bytes_), "row ", row, " is not token ", want.token.index, " of rank ",
           want.token.rank);
    expect(is_row(want.token, ~salt, got_scales, s_.scale_bytes), "scales of row ", row);
    if (!s_.weights) continue;
    const auto& pairs = o.pairs[size_t(want.token.rank)][want.token.index];
    for (int e = s_.permute ? want.expert : first_expert;
         e < (s_.permute ? want.expert + 1 : first_expert + node_experts); ++e) {
      const auto it = std::find_if(pairs.begin(), pairs.end(), [&](const Pair& q) { return q.expert == e; });
      const float expected = it == pairs.end() ? 0 : it->weight;
      const uint64_t at = s_.permute ? row : row * uint64_t(node_experts) + uint64_t(e - first_expert);
      expect(weights[at] == expected, "weight of row ", row, " for expert ", e, " is ", weights[at], ", not ",
             expected);
    }
  }
}

void RankProgram::combine(uint32_t plan, uint32_t round) {
  at_.what = "combine";
  Plan& p = *plans_[plan].plan;
  const uint64_t salt = mix(plan, round, s_.data_seed, 2);
  const uint64_t rows = s_.permute ? p.num_permuted_rows() : p.num_recv_rows(), tokens = p.num_tokens();
  const uint64_t columns = s_.permute ? 1 : s_.experts_per_rank * s_.num_local_ranks;
  const uint64_t row_bytes = uint64_t(s_.hidden) * dtype_bytes(dtype_);
  CombineCall c;
  c.dtype = dtype_;
  c.hidden = s_.hidden;
  c.permuted = s_.permute;
  c.multiply = s_.multiply;
  c.fp32_partials = s_.fp32_partials;
  c.local_blocks = int(s_.unpermute_blocks);
  set_launch(c, salt);
  executor_.combine_rows = rows;
  const bool lines = by_lines(plan, round, 1);
  const auto run = [&] { lines ? engine_.latency_combine(p, c) : engine_.combine(p, c); };
  const bool in_place = lines ? false : s_.reading == 2 ? mix(salt, uint64_t(rank_), 3) % 2 : s_.reading;
  const std::shared_ptr<unsigned char> lent = in_place ? engine_.arena().take(rows * row_bytes) : nullptr;
  if (timed_) {  // combine of a forward pass: no weights travel back
    PhantomMemory phantom((tokens + rows) * row_bytes + 4096);
    c.x = phantom.take(rows * row_bytes);
    if (lent) c.x = lent.get();
    c.out_x = phantom.take(tokens * row_bytes);
    say_phantom(lines ? &phantom : nullptr);
    return run();
  }
  const Oracle& o = oracles_[plan];
  Buffer x(lent ? 0 : rows * row_bytes), weights(rows * columns * 4);
  unsigned char* const outputs = lent ? lent.get() : x.data();
  fill_inputs(o, salt, outputs, weights.floats(), rows);
  Buffer out_x(tokens * row_bytes), out_weights(tokens * p.weight_stride() * 4);
  c.x = outputs;
  c.weights = s_.weights ? weights.floats() : nullptr;
  c.out_x = out_x.data();
  c.out_weights = out_weights.floats();
  run();
  check_combine(o, salt, out_x.data(), out_weights.floats(), p.weight_stride());
}

void RankProgram::fill_inputs(const Oracle& o, uint64_t salt, unsigned char* x, float* weights, uint64_t rows) const {
  const uint64_t row_bytes = uint64_t(s_.hidden) * dtype_bytes(dtype_);
  const int node_experts = int(s_.experts_per_rank * s_.num_local_ranks), first_expert = shape_.node() * node_experts;
  for (uint64_t row = 0; row < rows; ++row) {
    const PermutedRow r = s_.permute ? o.permuted[size_t(rank_)][row] : PermutedRow{o.received[size_t(rank_)][row], 0};
    const Output output(r.token, s_.permute ? r.expert : -1 - rank_, salt);
    for (uint32_t i = 0; i < s_.hidden; ++i)  // what no sum may read is no number
      put(x + row * row_bytes, i, r.expert < 0 ? std::nanf("") : output.at(i), dtype_);
    if (s_.permute) {
      weights[row] = r.expert < 0 ? std::nanf("") : returned_weight(r.token, r.expert, 0, salt);
      continue;
    }
    for (int e = 0; e < node_experts; ++e)
      weights[row * uint64_t(node_experts) + uint64_t(e)] =
          returned_weight(r.token, first_expert + e, -1 - rank_, salt);
  }
}

float RankProgram::expected_weight(const Oracle& o, Token t, int expert, uint64_t salt) const {
  if (s_.permute) return returned_weight(t, expert, 0, salt);
  float sum = 0;  // every rank of the expert's node that has the token answers for all of the node's experts
  for (uint32_t l = 0; l < s_.num_local_ranks; ++l) {
    const int d = shape_.rank_of(o.node_of(expert), int(l));
    if (o.arrives(t, d)) sum += returned_weight(t, expert, -1 - d, salt);
  }
  return sum;
}

void RankProgram::check_combine(const Oracle& o, uint64_t salt, const unsigned char* x, const float* weights,
                                uint32_t stride) const {
  const uint64_t row_bytes = uint64_t(s_.hidden) * dtype_bytes(dtype_);
  std::vector<float> sum(s_.hidden);
  const auto& mine = o.pairs[size_t(rank_)];
  for (uint32_t t = 0; t < mine.size(); ++t) {
    std::fill(sum.begin(), sum.end(), 0.f);
    const auto add = [&](int from, float scale) {
      const Output output({rank_, t}, from, salt);
      for (uint32_t i = 0; i < s_.hidden; ++i) sum[i] += output.at(i) * scale;
    };
    if (s_.permute) {
      for (const Pair& p : mine[t]) add(p.expert, s_.multiply ? p.weight : 1.f);
    } else {
      for (int d = 0; d < int(s_.num_ranks()); ++d)
        if (o.arrives({rank_, t}, d)) add(-1 - d, 1.f);
    }
    for (uint32_t i = 0; i < s_.hidden; ++i)
      expect(get(x + t * row_bytes, i, dtype_) == sum[i], "sum of token ", t, " at element ", i, " is ",
             get(x + t * row_bytes, i, dtype_), ", not ", sum[i]);
    if (!s_.weights) continue;
    for (uint32_t k = 0; k < stride; ++k) {
      const float want = k < mine[t].size() ? expected_weight(o, {rank_, t}, mine[t][k].expert, salt) : 0;
      expect(weights[uint64_t(t) * stride + k] == want, "weight ", k, " of token ", t, " is ",
             weights[uint64_t(t) * stride + k], ", not ", want);
    }
  }
}

}  // namespace hep::sim
