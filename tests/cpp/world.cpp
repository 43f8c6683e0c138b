// Running a world case: data made from seeds, operations on every rank, results compared element by element.
#include "world.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "arch/host/errors.h"
#include "check.h"
#include "layout/headers.h"
#include "runtime/engine.h"
#include "thread_executor.h"
#include "world_data.h"
#include "world_memory.h"
#include "world_traffic.h"

namespace hep::test {
namespace {

using Token = Reference::Token;
using Slot = Reference::Slot;

class RankRun {
 public:
  RankRun(const WorldCase& world, const std::vector<Reference>& references, Engine& engine, int rank)
      : w_(world),
        references_(references),
        engine_(engine),
        rank_(rank),
        shape_{int32_t(world.num_nodes), int32_t(world.num_local_ranks), rank},
        naps_(hash({world.seed, uint64_t(rank)})),
        plans_(world.plans.size()),
        fresh_salt_(world.plans.size()) {}

  void run() {
    for (size_t i = 0; w_.exchange_first && i < w_.plans.size(); ++i) exchange(i);
    for (size_t i = 0; i < w_.ops.size(); ++i) {
      const OpCase& op = w_.ops[i];
      const bool latency = goes_by_lines(op);
      if (!plans_[op.plan].plan && !latency) exchange(op.plan);
      where_ = "rank " + std::to_string(rank_) + ", operation " + std::to_string(i);
      ref_ = &references_[op.plan];
      plan_ = plans_[op.plan].plan.get();
      nap();
      const TrafficCounters before = engine_.traffic();
      op.combine ? combine(op, latency) : dispatch(op, latency);
      const WorldTraffic traffic{w_, *ref_, *plan_, rank_};
      const bool fresh = op.salt == fresh_salt_[op.plan];
      check_traffic(latency ? traffic.by_lines(op, fresh) : traffic.of(op), before, engine_.traffic());
      if (op.combine && op.rounds) combine_what_rounds(op);
    }
    for (const auto& [at, bytes] : kept_)
      expect(std::equal(bytes.begin(), bytes.end(), at.get()), "a result changed later");
  }

 private:
  template <class... Parts>
  void expect(bool ok, Parts&&... parts) const {
    if (ok) return;
    std::ostringstream os;
    os << where_ << ": ";
    (os << ... << parts);
    throw check::Failure(os.str());
  }
  // Ranks drift apart, as they do in training.
  void nap() {
    if (!naps_.one_in(3)) return;
    std::this_thread::sleep_for(std::chrono::microseconds(naps_.one_in(4) ? 2000 : naps_.below(300)));
  }

  // ---------------------------------------------------------------- data, a function of the seed
  // The weight with which a dispatch sends a pair: as routed, or the operation's own.
  float sent_weight(Token t, int expert, uint64_t salt) const {
    if (salt % 2) return ref_->pairs_of(t).at(expert);
    return float(1 + hash({uint64_t(t.rank), t.index, uint64_t(expert), salt}) % 2);
  }
  uint32_t num_own_tokens() const { return uint32_t(ref_->pairs[size_t(rank_)].size()); }
  const std::vector<Token>& received() const { return ref_->received[size_t(rank_)]; }
  const std::vector<Slot>& permuted() const { return ref_->permuted[size_t(rank_)]; }
  uint32_t experts_per_node() const { return w_.num_experts / w_.num_nodes; }

  // ---------------------------------------------------------------- exchange and plan
  // What the header of a call on the plan says, and memory for what comes of it. learned: room for that too.
  PlaceCall place_call(size_t index, bool learned) {
    const RoutingCase& c = w_.plans[index];
    const Reference& ref = references_[index];
    PlaceCall call;
    CallHeader& header = call.header;
    header.topk = uint16_t(ref.widest());
    header.hidden = uint32_t(index) + 100;
    header.pad_multiple = c.pad_multiple;
    header.pad_empty_experts = c.pad_empty;
    header.set_budget(c.budgets[size_t(rank_)]);
    call.num_blocks = 1 + int(hash({w_.seed, index, uint64_t(rank_)}) % 4);  // ranks need not agree
    Placed& made = plans_[index];
    made.memory =
        std::make_unique<PlanBlock>(engine_.plan_memory(c.num_tokens[size_t(rank_)], header.topk, learned).total);
    call.memory = made.memory->data();
    return call;
  }
  void exchange(size_t index) {
    where_ = "rank " + std::to_string(rank_) + ", exchange " + std::to_string(index);
    const RoutingCase& c = w_.plans[index];
    const Reference& ref = references_[index];
    const size_t r = size_t(rank_);
    const RoutingMemory routing(w_, c, ref, r);
    const RoutingInput& in = routing.in;
    nap();
    const PlaceCall call = place_call(index, false);
    Placed& made = plans_[index];
    const std::shared_ptr<Placement> placement = engine_.place_and_count(in, call);
    for (uint32_t s = 0; s < w_.num_ranks(); ++s) {
      expect(placement->counts.headers[s].num_tokens == c.num_tokens[s], "tokens of rank ", s);
      expect(placement->counts.headers[s].hidden == index + 100, "header of rank ", s);
    }
    expect(placement->counts.placed, "nothing was placed");
    made.learned = std::make_unique<PlanBlock>(placement->learned.total);
    made.plan = placement->plan(made.learned->data());
    check_plan(*made.plan, made.plan->counts(), ref);
  }
  // The plan's first dispatch, by lines, which makes it.
  void latency_first(const OpCase& op, const DispatchCall& c) {
    const RoutingMemory routing(w_, w_.plans[op.plan], *ref_, size_t(rank_));
    PlaceCall call = place_call(op.plan, true);
    call.header.set_budget(budget(op.plan));
    Placed& made = plans_[op.plan];
    made.plan = engine_.latency_dispatch(routing.in, call, c, op.weights);
    plan_ = made.plan.get();
    check_plan(*plan_, plan_->counts(), *ref_);
  }
  uint32_t budget(size_t plan) const {
    return w_.plans[plan].budgets[size_t(rank_)].value_or(uint32_t(references_[plan].permuted[size_t(rank_)].size()));
  }
  bool goes_by_lines(const OpCase& op) const {
    const Plan* plan = plans_[op.plan].plan.get();
    return op.latency && (op.combine || !plan || plan->complete());
  }

  void check_plan(const Plan& plan, const PlacedCounts& counts, const Reference& ref) const {
    const size_t r = size_t(rank_);
    const PlanNumbers& n = counts.numbers;
    expect(plan.topk() == ref.widest(), "topk ", plan.topk(), " instead of ", ref.widest());
    expect(n.recv_rows == ref.received[r].size(), "receive rows ", n.recv_rows);
    expect(n.permuted_rows == ref.permuted[r].size(), "permuted rows ", n.permuted_rows);
    expect(counts.tokens_per_expert == ref.tokens_per_expert[r], "tokens per expert");
    expect(counts.padded_tokens_per_expert == ref.padded_tokens_per_expert[r], "padded tokens per expert");
    expect(std::ranges::equal(counts.dropped, ref.dropped_pairs), "dropped pairs");
    expect(std::ranges::equal(counts.rank_rows, ref.wanted_rows), "receive rows of all ranks");
    expect(bool(n.has_holes) == (ref.wanted_rows[r] > w_.recv_capacity), "has_holes");
    expect(bool(n.overflow) == (n.has_holes || ref.dropped_pairs[r] > 0), "overflow");
    std::vector<uint32_t> per_source(w_.num_ranks(), 0);
    for (int s = 0; s < int(w_.num_ranks()); ++s)
      for (uint32_t t = 0; t < ref.pairs[size_t(s)].size(); ++t)
        per_source[size_t(s)] += std::ranges::any_of(
            ref.pairs[size_t(s)][t], [&](const auto& pair) { return ref.rank_of(pair.first) == rank_; });
    expect(counts.source_rows == per_source, "receive rows per source");
    for (uint32_t t = 0; t < ref.pairs[r].size(); ++t) {
      uint32_t k = 0;
      for (const auto& [expert, weight] : ref.pairs[r][t])
        expect(plan.weights()[size_t(t) * plan.weight_stride() + k++] == weight, "weight of token ", t);
      for (; k < plan.weight_stride(); ++k)
        expect(plan.weights()[size_t(t) * plan.weight_stride() + k] == 0, "weight slot behind the pairs of token ", t);
    }
  }

  // ---------------------------------------------------------------- dispatch
  void dispatch(const OpCase& op, bool latency) {
    const bool fresh = !plan_ || !plan_->complete();
    if (fresh) fresh_salt_[op.plan] = op.salt;
    const uint32_t num_tokens = num_own_tokens(), stride = MessageLayout::weight_section_bytes(ref_->widest()) / 4;
    Bytes x(size_t(num_tokens) * op.row_bytes + 16), scales(size_t(num_tokens) * op.scale_bytes + 16);
    std::vector<float> weights(size_t(num_tokens) * stride + 4, 0.f);
    for (uint32_t t = 0; t < num_tokens; ++t) {
      fill_row({rank_, t}, op.salt, &x[size_t(t) * op.row_bytes], op.row_bytes);
      fill_row({rank_, t}, ~op.salt, &scales[size_t(t) * op.scale_bytes], op.scale_bytes);
      size_t k = size_t(t) * stride;
      for (const auto& [expert, weight] : ref_->pairs_of({rank_, t}))
        weights[k++] = sent_weight({rank_, t}, expert, op.salt);
    }
    const size_t out_rows =
        op.permute
            ? std::max<size_t>(permuted().size(), latency && fresh ? budget(op.plan) : plan_->num_permuted_rows()) +
                  op.extra_rows
            : received().size();
    const size_t weight_columns = op.permute ? 1 : experts_per_node();
    const Landed landed = op.landed[size_t(rank_)];
    Arena* arena = landed == Landed::kAside ? nullptr : &engine_.arena();
    Output out_x(out_rows * op.row_bytes, arena), out_scales(out_rows * op.scale_bytes, arena),
        out_weights(out_rows * weight_columns * 4);
    DispatchCall c;
    c.x = x.data();
    c.scales = op.scale_bytes ? scales.data() : nullptr;
    c.weights = op.weights ? weights.data() : nullptr;
    c.out_x = out_x.data();
    c.out_scales = out_scales.data();
    c.out_weights = out_weights.floats();
    c.row_bytes = op.row_bytes;
    c.scale_bytes = op.scale_bytes;
    c.out_rows = out_rows;
    c.permute = op.permute;
    c.num_blocks = op.num_blocks[size_t(rank_)];
    c.local_blocks = op.local_blocks[size_t(rank_)];
    c.land_in = landed == Landed::kFirstPair ? LandIn::kFirstPair : LandIn::kEveryPair;
    if (latency && fresh)
      latency_first(op, c);
    else
      latency ? engine_.latency_dispatch(*plan_, c) : engine_.dispatch(*plan_, c);
    expect(out_x.edge_is_intact() && out_scales.edge_is_intact() && out_weights.edge_is_intact(),
           "wrote behind an output");
    if (arena) kept_.push_back(out_x.keep());
    for (size_t row = 0; row < out_rows; ++row) {
      const Slot slot = !op.permute               ? Slot{Slot::kPair, received()[row], -1}
                        : row < permuted().size() ? permuted()[row]
                                                  : Slot{Slot::kPad, {}, -1};
      if (slot.kind == Slot::kHole) continue;
      check_row(slot, op.salt, out_x.data() + row * op.row_bytes, op.row_bytes, "dispatched row ", row);
      check_row(slot, ~op.salt, out_scales.data() + row * op.scale_bytes, op.scale_bytes, "scales of row ", row);
      if (!op.weights) continue;
      if (op.permute) {
        const float want = slot.kind == Slot::kPad ? 0.f : sent_weight(slot.token, slot.expert, op.salt);
        expect(out_weights.floats()[row] == want, "weight of row ", row, ": ", out_weights.floats()[row], ", not ",
               want);
      } else {
        check_node_weights(slot.token, op.salt, out_weights.floats() + row * weight_columns, row);
      }
    }
  }
  void check_row(const Slot& slot, uint64_t salt, const unsigned char* got, size_t bytes, const char* what,
                 size_t row) const {
    Bytes want(bytes, 0);
    if (slot.kind == Slot::kPair) fill_row(slot.token, salt, want.data(), bytes);
    const size_t at = size_t(std::mismatch(want.begin(), want.end(), got).first - want.begin());
    expect(at == bytes, what, row, " differs from byte ", at, slot.kind == Slot::kPad ? " (must be zero)" : "");
  }
  void check_node_weights(Token t, uint64_t salt, const float* got, size_t row) const {
    const int first = shape_.node() * int(experts_per_node());
    for (int e = first; e < first + int(experts_per_node()); ++e) {
      const float want = ref_->pairs_of(t).contains(e) ? sent_weight(t, e, salt) : 0.f;
      expect(got[e - first] == want, "weight of row ", row, " for expert ", e, ": ", got[e - first], ", not ", want);
    }
  }

  // ---------------------------------------------------------------- combine
  void combine(const OpCase& op, bool latency) {
    const float kPoison = std::nanf("");  // what no sum may read
    const size_t rows = op.permute ? permuted().size() : received().size();
    const size_t elem = dtype_bytes(op.dtype), row_bytes = op.hidden * elem,
                 columns = op.permute ? 1 : experts_per_node();
    Output x(rows * row_bytes, is_aside(op) ? nullptr : &engine_.arena());
    std::vector<float> weights(rows * columns + 1, kPoison);
    for (size_t row = 0; row < rows; ++row) {
      const Slot slot = op.permute ? permuted()[row] : Slot{Slot::kPair, received()[row], -1};
      const int from = op.permute ? slot.expert : -1 - rank_;
      for (uint32_t i = 0; i < op.hidden; ++i)
        put(x.data() + row * row_bytes, i, slot.kind == Slot::kPair ? output(slot.token, from, i, op.salt) : kPoison,
            op.dtype);
      if (slot.kind != Slot::kPair) continue;
      if (op.permute)
        weights[row] = returned_weight(slot.token, slot.expert, from, op.salt);
      else
        for (const auto& [expert, weight] : ref_->pairs_of(slot.token))
          if (ref_->node_of(expert) == shape_.node())
            weights[row * columns + size_t(expert) % columns] = returned_weight(slot.token, expert, from, op.salt);
    }
    const uint32_t num_tokens = num_own_tokens(), stride = plan_->weight_stride();
    Output out_x(num_tokens * row_bytes), out_weights(size_t(num_tokens) * stride * 4);
    const CombineCall c{.x = x.data(),
                        .weights = op.weights ? weights.data() : nullptr,
                        .out_x = out_x.data(),
                        .out_weights = out_weights.floats(),
                        .dtype = op.dtype,
                        .hidden = op.hidden,
                        .permuted = op.permute,
                        .multiply = op.multiply,
                        .fp32_partials = op.fp32_partials,
                        .sum_from = sum_from(op),
                        .num_blocks = op.num_blocks[size_t(rank_)],
                        .local_blocks = op.local_blocks[size_t(rank_)]};
    latency ? engine_.latency_combine(*plan_, c) : engine_.combine(*plan_, c);
    expect(out_x.edge_is_intact() && out_weights.edge_is_intact(), "wrote behind an output");
    for (uint32_t t = 0; t < num_tokens; ++t) {
      check_sum(op, {rank_, t}, out_x.data() + t * row_bytes);
      if (op.weights) check_returned_weights(op, {rank_, t}, out_weights.floats() + size_t(t) * stride, stride);
    }
  }
  bool is_aside(const OpCase& op) const { return op.landed[size_t(rank_)] == Landed::kAside; }
  std::optional<SumFrom> sum_from(const OpCase& op) const {
    const bool single = op.permute && op.landed[size_t(rank_)] == Landed::kFirstPair;
    return single ? std::optional(SumFrom::kSinglePair) : std::nullopt;
  }
  // The same bits, whether rows are read in place or summed to partials first.
  void combine_what_rounds(const OpCase& op) {
    const size_t rows = op.permute ? permuted().size() : received().size(), elem = dtype_bytes(op.dtype);
    Output x(rows * op.hidden * elem, is_aside(op) ? nullptr : &engine_.arena());
    for (size_t i = 0; i < rows * op.hidden; ++i)
      put(x.data(), i, std::ldexp(float(int64_t(hash({op.salt, uint64_t(rank_), i}) >> 40) - (1 << 23)), -22),
          op.dtype);
    Bytes sums[2];
    for (Bytes& sum : sums) {
      sum.resize(num_own_tokens() * op.hidden * elem + 16);
      engine_.combine(*plan_, {.x = x.data(),
                               .out_x = sum.data(),
                               .dtype = op.dtype,
                               .hidden = op.hidden,
                               .permuted = op.permute,
                               .multiply = op.multiply,
                               .fp32_partials = op.fp32_partials,
                               .sum_from = &sum == sums ? sum_from(op) : SumFrom::kPartials,
                               .num_blocks = op.num_blocks[size_t(rank_)]});
    }
    expect(sums[0] == sums[1], "sums of rows read in place differ from those of partials");
  }
  void check_sum(const OpCase& op, Token t, const unsigned char* got) const {
    // A rank or node to which a token came, and for which nothing of it was left, adds a row of positive zeros.
    bool complete = true;
    for (const auto& [e, weight] : ref_->pairs_of(t))
      complete &= op.permute ? ref_->computes(t, e) : ref_->arrives(t, ref_->rank_of(e));
    for (uint32_t i = 0; i < op.hidden; ++i) {
      float sum = 0;
      bool any = false;
      const auto add = [&](float v) { sum = std::exchange(any, true) ? sum + v : v; };
      if (op.permute) {
        for (const auto& [e, weight] : ref_->pairs_of(t))
          if (ref_->computes(t, e))
            add(output(t, e, i, op.salt) * (op.multiply ? sent_weight(t, e, fresh_salt_[op.plan]) : 1.f));
      } else {
        for (int d = 0; d < int(w_.num_ranks()); ++d)
          if (ref_->arrives(t, d)) add(output(t, -1 - d, i, op.salt));
      }
      unsigned char want[4];
      const size_t elem = dtype_bytes(op.dtype);
      put(want, 0, sum, op.dtype);
      bool right = std::memcmp(got + i * elem, want, elem) == 0;
      if (sum == 0 && !complete) {
        put(want, 0, -sum, op.dtype);
        right |= std::memcmp(got + i * elem, want, elem) == 0;
      }
      expect(right, "sum of token ", t.index, " at element ", i, " is not ", sum);
    }
  }
  void check_returned_weights(const OpCase& op, Token t, const float* got, uint32_t stride) const {
    uint32_t k = 0;
    for (const auto& [e, weight] : ref_->pairs_of(t)) {
      float want = 0;
      if (op.permute) {
        if (ref_->computes(t, e)) want = returned_weight(t, e, e, op.salt);
      } else {  // every rank of the expert's node that got the token has a say
        for (int d = 0; d < int(w_.num_ranks()); ++d)
          if (d / int(w_.num_local_ranks) == ref_->node_of(e) && ref_->arrives(t, d))
            want += returned_weight(t, e, -1 - d, op.salt);
      }
      expect(got[k] == want, "weight ", k, " back at token ", t.index, " is ", got[k], ", not ", want);
      ++k;
    }
    for (; k < stride; ++k) expect(got[k] == 0, "weight slot ", k, " of token ", t.index, " is not zero");
  }

  void check_traffic(const TrafficCounters& want, const TrafficCounters& before, const TrafficCounters& after) const {
    const auto counted = [&](const char* what, uint64_t TrafficCounters::* field) {
      expect(after.*field - before.*field == want.*field, what, ": ", after.*field - before.*field, ", not ",
             want.*field);
    };
    counted("rail rows", &TrafficCounters::rail_rows);
    counted("rail bytes", &TrafficCounters::rail_bytes);
    counted("node rows", &TrafficCounters::node_rows);
    counted("node bytes", &TrafficCounters::node_bytes);
    counted("self rows", &TrafficCounters::self_rows);
    counted("self bytes", &TrafficCounters::self_bytes);
    counted("copied rows", &TrafficCounters::copied_rows);
    counted("copied bytes", &TrafficCounters::copied_bytes);
    counted("partial rows", &TrafficCounters::partial_rows);
  }

  const WorldCase& w_;
  const std::vector<Reference>& references_;
  Engine& engine_;
  const int rank_;
  const World shape_;
  Random naps_;
  std::vector<std::pair<std::shared_ptr<unsigned char>, Bytes>> kept_;  // what lies in the arena
  struct Placed {
    std::unique_ptr<PlanBlock> memory, learned;
    std::shared_ptr<Plan> plan;
  };
  std::vector<Placed> plans_;
  std::vector<uint64_t> fresh_salt_;  // by plan: of its first dispatch
  const Reference* ref_ = nullptr;
  Plan* plan_ = nullptr;
  std::string where_;
};

}  // namespace

Outcome run_world(const WorldCase& w) {
  std::vector<Reference> references;
  for (const RoutingCase& c : w.plans) references.emplace_back(w, c);
  const BufferShape shape = shape_of(w, references);
  std::vector<std::shared_ptr<Segment>> segments;
  for (uint32_t r = 0; r < w.num_ranks(); ++r) segments.push_back(Segment::private_memory(BufferLayout(shape).total));
  std::atomic<bool> stop = false;
  std::vector<std::unique_ptr<Engine>> engines;
  for (uint32_t r = 0; r < w.num_ranks(); ++r) {
    engines.push_back(make_engine(w.executor, int(r), shape, segments, w.timeout_s, w.seed));
    engines.back()->set_interrupt_check([&stop] { return stop.load(); });
  }
  Outcome first;
  std::mutex mutex;
  auto report = [&](Outcome::Kind kind, const char* what) {
    std::lock_guard lock(mutex);
    if (first.kind == Outcome::kRight) first = {kind, what};
    stop = true;
  };
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < w.num_ranks(); ++r)
    threads.emplace_back([&, r] {
      try {
        RankRun(w, references, *engines[r], int(r)).run();
      } catch (const host::Interrupted&) {
      } catch (const check::Failure& e) {
        report(Outcome::kWrong, e.what());
      } catch (const host::DeadlineError& e) {
        report(Outcome::kDeadline, e.what());
      } catch (const host::ProtocolError& e) {
        report(Outcome::kProtocol, e.what());
      } catch (const std::exception& e) {
        report(Outcome::kError, e.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return first;
}

}  // namespace hep::test
