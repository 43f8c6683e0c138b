// Routing a call: the exchange kernel places every row, and the host is notified of the counts, or never learns them.
#include <algorithm>
#include <atomic>
#include <string>

#include "arch/host/idle.h"
#include "layout/headers.h"
#include "runtime/engine_call.h"

namespace hep {
namespace {

// A lane that waits for a rank knows which; the host knows only that no notification comes. It waits longer than the
// lanes do, so that theirs is the report that comes.
constexpr double kHostPatience = 1.25;
// What is queued before the exchange on the stream is not ours to judge, or has deadlines of its own.
constexpr double kStreamPatience = 10;

}  // namespace

void require_placeable(const RoutingInput& in, const PlaceCall& c, uint32_t num_experts) {
  if (c.num_blocks > int(kMostExchangeBlocks))
    throw std::invalid_argument("num_blocks: is " + std::to_string(c.num_blocks) + "; an exchange has at most " +
                                std::to_string(kMostExchangeBlocks));
  if (!c.memory || reinterpret_cast<uint64_t>(c.memory) % 128)
    throw std::invalid_argument("memory: give plan_memory() bytes, aligned to 128");
  if (c.header.pad_multiple < 1 || c.header.topk < 1 || c.header.excess)
    throw std::invalid_argument("header: pad_multiple and topk must be at least 1, excess is the kernel's");
  // A map's pairs are counted by the kernel, which reports what does not fit; those of topk_idx it takes on trust.
  if (const uint32_t most = std::min(in.topk, num_experts); in.topk_idx && in.num_tokens && c.header.topk < most)
    throw std::invalid_argument("header: its topk is " + std::to_string(c.header.topk) + ", but topk_idx may choose " +
                                std::to_string(most) + " experts for a token; give at least that");
}

namespace {

// The part of a plan that its first dispatch fills in.
void attach_learned(PlanView& v, const PlanMemory& m, unsigned char* memory) {
  if (!memory || reinterpret_cast<uint64_t>(memory) % 128)
    throw std::invalid_argument("memory: give learned.total bytes, aligned to 128");
  v.rail_records = memory + m.rail_records;
  v.rail_record_stride = m.rail_record_stride;
  v.row_records = memory + m.row_records;
  v.row_weights = reinterpret_cast<float*>(memory + m.row_weights);
}

}  // namespace

PlanMemory Engine::plan_memory(uint32_t num_tokens, uint32_t topk, bool worst_case) const {
  PlanMemory m = PlanMemory::make(world_, layout_.counts, num_tokens, topk);
  if (worst_case) m.add_learned(layout_.counts.num_nodes, shape_.max_tokens, shape_.recv_rows);
  return m;
}

// Everything a kernel that places rows is told, and the plan that it makes. count: the host waits for the counts.
PlacedPlan Engine::describe_place(ExchangeParams& p, const RoutingInput& in, const PlaceCall& c, bool count) const {
  CallHeader header = c.header;
  header.num_tokens = in.num_tokens;
  const PlanMemory m = plan_memory(in.num_tokens, header.topk, !count);
  const auto at = [&]<class T>(T*& pointer, uint64_t offset) { pointer = reinterpret_cast<T*>(c.memory + offset); };
  p.world = world_;
  p.layout = layout_.counts;
  p.topk_idx = in.topk_idx;
  p.routing_map = in.routing_map;
  p.weights = in.weights;
  p.num_tokens = in.num_tokens;
  p.topk_in = in.topk;
  p.topk = header.topk;
  p.weight_stride = m.weight_stride;
  at(p.pair_expert, m.pair_expert), at(p.pair_weight, m.pair_weight), at(p.pair_pos, m.pair_pos);
  at(p.row_pos, m.row_pos), at(p.node_pos, m.node_pos), at(p.node_tokens, m.node_tokens);
  p.max_tokens = uint32_t(shape_.max_tokens);
  PlaceParams& q = p.place;
  q.record_bytes = m.message.record_bytes;
  q.pairs_at = m.message.pairs_at();
  q.max_dsts = m.message.max_dsts;
  q.pad_multiple = header.pad_multiple;
  q.pad_empty = header.pad_empty_experts;
  q.recv_capacity = shape_.recv_rows;
  at(q.numbers, m.numbers), at(q.node_count, m.node_count), at(q.rail_count, m.rail_count);
  at(q.tokens_per_expert, m.tokens_per_expert), at(q.padded_tokens_per_expert, m.padded_tokens_per_expert);
  at(q.zero_ranges, m.zero_ranges), at(q.dropped_per_rank, m.dropped);
  at(q.rank_rows, m.rank_rows), at(q.source_rows, m.source_rows);
  at(q.records, m.record_table), at(q.node_token_table, m.token_table), at(q.record_base, m.records);
  p = exchange_params(p, header);
  PlacedPlan d{world_,
               shape_.num_experts,
               m.message.record_bytes,
               m.message.pairs_at(),
               q.recv_capacity,
               header.budget().value_or(0),
               p.pair_weight,
               {c.memory, m.total},
               {}};
  PlanView& v = d.view;
  v.num_tokens = in.num_tokens;
  v.topk = header.topk;
  v.weight_stride = m.weight_stride;
  v.numbers = q.numbers;
  v.node_tokens = q.node_token_table;
  v.node_pos = p.node_pos;
  v.records = const_cast<const unsigned char* const*>(q.records);
  v.node_count = q.node_count;
  v.rail_count = q.rail_count;
  v.num_local_experts = shape_.num_experts / uint32_t(world_.num_ranks());
  v.first_expert = uint32_t(world_.rank) * v.num_local_experts;
  v.zero_ranges = q.zero_ranges;
  v.source_rows = q.source_rows;
  if (!count) attach_learned(v, m, c.memory);
  return d;
}

PlacedPlan Engine::launch_place(Call& call, const RoutingInput& in, const PlaceCall& c, bool count) {
  ExchangeParams p{};
  PlacedPlan plan = describe_place(p, in, c, count);
  executor_->require_shared_memory(p);
  if (count) {
    p.notification = static_cast<unsigned char*>(notification_.get());
    p.notification_ticket = ++notification_ticket_;
  }
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks;
  call.run([&] { executor_->exchange(p, settings); });
  return plan;
}

std::shared_ptr<Plan> Engine::place(const RoutingInput& in, const PlaceCall& c) {
  require_placeable(in, c, layout_.counts.num_experts);
  require_blocks("num_blocks", c.num_blocks);
  if (in.num_tokens > shape_.max_tokens || c.header.topk > shape_.max_topk)
    throw std::logic_error("place: more tokens or experts per token than this buffer was laid out for");
  Call call(*this);
  return std::make_shared<Plan>(launch_place(call, in, c, false));
}

std::shared_ptr<Placement> Engine::place_and_count(const RoutingInput& in, const PlaceCall& c) {
  require_placeable(in, c, layout_.counts.num_experts);
  require_blocks("num_blocks", c.num_blocks);
  Call call(*this);
  auto placement = std::make_shared<Placement>();
  placement->rows = launch_place(call, in, c, true);
  call.run([&] { await_notification(); });
  placement->counts = read_notification();
  const PlacedCounts& counts = placement->counts;
  if (!counts.placed) return placement;
  PlanMemory& learned = placement->learned;
  learned.message = MessageLayout::make(world_, c.header.topk, true, 0, 0);
  learned.weight_stride = placement->rows.view.weight_stride;
  uint32_t rail_tokens = 0;
  for (int n = 0; n < world_.num_nodes; ++n)
    if (n != world_.node()) rail_tokens = std::max(rail_tokens, counts.from_nodes[size_t(n)]);
  learned.add_learned(layout_.counts.num_nodes, rail_tokens, counts.numbers.recv_rows);
  return placement;
}

std::shared_ptr<Plan> Placement::plan(unsigned char* memory) {
  if (!counts.placed) throw std::logic_error("plan: no rows were placed");
  attach_learned(rows.view, learned, memory);
  return std::make_shared<Plan>(rows, counts);
}

// As every wait: with a deadline, and noticing that the kernel died or the user lost patience. It spins: until the host
// has the counts, the GPU is idle.
void Engine::await_notification() {
  const std::atomic_ref<uint64_t> ticket(*CountNotification::ticket(static_cast<unsigned char*>(notification_.get())));
  const std::atomic_ref<uint64_t> start(*CountNotification::started(static_cast<unsigned char*>(notification_.get())));
  int64_t since = host::now_ns();
  bool started = false;
  host::EagerIdle idle;
  uint32_t looks = 0;
  while (ticket.load(std::memory_order_acquire) < notification_ticket_) {
    if (!idle.round()) continue;
    if (const auto died = executor_->timeout_report()) throw host::DeadlineError(*died);
    executor_->check();
    if (!started && start.load(std::memory_order_acquire) == notification_ticket_) {
      started = true;
      since = host::now_ns();
    }
    // Asking takes Python's lock, which others may hold for milliseconds while the counts come.
    const bool stop = ++looks % 16 == 0 && settings_.interrupted && settings_.interrupted();
    const double waited_s = double(host::now_ns() - since) * 1e-9;
    if (!stop && waited_s < settings_.timeout_s * (started ? kHostPatience : kStreamPatience)) continue;
    executor_->abort();
    if (stop) throw host::Interrupted();
    TimeoutReport o;
    o.site = started ? Site::kNotification : Site::kKernelStart;
    o.rank = world_.rank;
    o.node = world_.node();
    o.role = "host";
    o.expected = notification_ticket_;
    o.seen = ticket.load(std::memory_order_acquire);
    o.waited_s = waited_s;
    throw host::DeadlineError(o);
  }
}

PlacedCounts Engine::read_notification() const {
  const CountNotification m = CountNotification::make(layout_.counts);
  const uint32_t* words = CountNotification::word(static_cast<unsigned char*>(notification_.get()));
  const auto take = [&]<class T>(std::vector<T>& to, uint32_t at, uint32_t count) {
    to.assign(words + at, words + at + count);
  };
  PlacedCounts c;
  c.placed = words[CountNotification::kPlaced] != 0;
  for (uint32_t r = 0; r < m.num_ranks; ++r) {
    CallHeader::Words header;
    std::copy_n(words + m.headers_at() + r * kCountHeaderWords, header.size(), header.begin());
    c.headers.push_back(CallHeader::of(header));
  }
  if (!c.placed) return c;
  c.numbers.recv_rows = words[CountNotification::kRecvRows];
  c.numbers.max_recv_rows = words[CountNotification::kMaxRecvRows];
  c.numbers.permuted_rows = words[CountNotification::kPermutedRows];
  c.numbers.overflow = int32_t(words[CountNotification::kOverflow]);
  c.numbers.has_holes = words[CountNotification::kHasHoles];
  take(c.rank_rows, m.rank_rows_at(), m.num_ranks), take(c.source_rows, m.source_rows_at(), m.num_ranks);
  take(c.dropped, m.dropped_at(), m.num_ranks), take(c.from_nodes, m.from_nodes_at(), m.num_nodes);
  take(c.tokens_per_expert, m.tokens_per_expert_at(), m.num_local_experts);
  take(c.padded_tokens_per_expert, m.padded_at(), m.num_local_experts);
  return c;
}

}  // namespace hep
