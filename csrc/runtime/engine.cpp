// Parameters of launches, and the bookkeeping that must agree on all ranks: epochs, exchange numbers, chunks.
#include "runtime/engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "layout/headers.h"
#include "runtime/engine_call.h"
#include "runtime/host_pages.h"

namespace hep {

Engine::Engine(int rank, const BufferShape& shape, Segments segments, double timeout_s, const std::string& executor,
               uint64_t seed, Segments arenas)
    : Engine(
          rank, shape, std::move(segments), timeout_s,
          [&](unsigned char* const* rail_segments, uint64_t s) { return Executor::make(executor, rail_segments, s); },
          seed, std::move(arenas)) {}

Engine::Engine(int rank, const BufferShape& shape, Segments segments, double timeout_s, const ExecutorMaker& executor,
               uint64_t seed, Segments arenas)
    : world_{int32_t(shape.num_nodes), int32_t(shape.num_local_ranks), rank},
      shape_(shape),
      layout_(shape),
      segments_(std::move(segments)),
      arenas_(std::move(arenas)) {
  if (rank < 0 || rank >= world_.num_ranks()) throw std::invalid_argument("rank: outside the group");
  if (segments_.size() != size_t(world_.num_ranks()))
    throw std::invalid_argument("segments: need one per rank of the group");
  for (const auto& s : segments_)
    if (!s || s->bytes() < layout_.segment_bytes)
      throw std::invalid_argument("segments: one is smaller than the buffer's layout");
  if (arenas_.size() != (shape.arena_apart ? shape.num_local_ranks : 0))
    throw std::invalid_argument("arenas: need one per rank of the node where the shape's lies apart, else none");
  for (const auto& s : arenas_)
    if (!s || s->bytes() < layout_.arena_bytes) throw std::invalid_argument("arenas: one is smaller than the shape's");
  arena_ = shape.arena_apart ? std::make_shared<Arena>(arenas_[size_t(world_.local_rank())], 0, layout_.arena_bytes)
                             : std::make_shared<Arena>(segments_[size_t(rank)], layout_.arena, layout_.arena_bytes);
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s: must be positive");
  settings_.world = world_;
  settings_.timeout_s = timeout_s;
  settings_.seed = seed;
  for (int n = 0; n < world_.num_nodes; ++n) rail_segments_.push_back(segments_[world_.rail_peer(n)]->data());
  executor_ = executor(rail_segments_.data(), seed + uint64_t(rank));
  const uint64_t nodes = uint64_t(world_.num_nodes), rails = align_up(8 * nodes, 64);
  const uint64_t counters = align_up(sizeof(TrafficCounters), 64), line = 64;
  static_assert(sizeof(RankProgress) <= 64);
  const uint64_t columns = nodes + uint64_t(world_.num_ranks()) + shape.num_experts;
  const uint64_t latency_counts = shape.latency_tokens ? 2 * layout_.num_ranks * layout_.counts.vector_bytes() : 0;
  const uint64_t waits = align_up(8 * kNumWaitedIn * uint64_t(world_.num_ranks()), 64);
  state_ = executor_->allocate(counters + waits + 2 * line + 4 * rails + nodes * shape.rail_slots * 8 +
                               kMostExchangeBlocks * (8 + 4 * columns) + 8 * layout_.groups +
                               layout_.latency_rail.counter_bytes() + latency_counts + line);
  auto* at = static_cast<unsigned char*>(state_.get());
  traffic_ = reinterpret_cast<TrafficCounters*>(at);
  waited_ = reinterpret_cast<uint64_t*>(at += counters);
  progress_ = reinterpret_cast<RankProgress*>(at += waits);
  exit_counter_ = reinterpret_cast<uint64_t*>(at += line);
  rail_sent_ = reinterpret_cast<uint64_t*>(at += line);
  rail_received_ = reinterpret_cast<uint64_t*>(at += rails);
  taken_.to_rail = reinterpret_cast<uint64_t*>(at += rails);
  taken_.to_node = reinterpret_cast<uint64_t*>(at += rails);
  consumed_ = reinterpret_cast<uint64_t*>(at += rails);
  landed_before_ = reinterpret_cast<uint64_t*>(at += nodes * shape.rail_slots * 8);
  misfits_ = reinterpret_cast<uint64_t*>(at += 8 * layout_.groups);
  block_counts_ = reinterpret_cast<uint32_t*>(at += 8 * kMostExchangeBlocks);
  latency_stored_ = reinterpret_cast<uint64_t*>(at += 4 * kMostExchangeBlocks * columns);
  at += layout_.latency_rail.counter_bytes();
  latency_counts_ = at + (line - reinterpret_cast<uintptr_t>(at) % line) % line;
  notification_ = executor_->allocate_notification(CountNotification::make(layout_.counts).bytes());
  make_clone_state();
  make_spare_state();
  make_tables();
}

Engine::~Engine() {
  if (executor_) executor_->drain();  // before the memory goes that kernels may still use
}

TrafficCounters Engine::traffic() const {
  TrafficCounters t;
  executor_->read(&t, traffic_, sizeof t);
  return t;
}

void Engine::reset_traffic() {
  const TrafficCounters zero{};
  executor_->write(traffic_, &zero, sizeof zero);
  const std::vector<uint64_t> zeros(kNumWaitedIn * size_t(world_.num_ranks()));
  executor_->write(waited_, zeros.data(), 8 * zeros.size());
}

std::vector<uint64_t> Engine::waited_ns() const {
  std::vector<uint64_t> ns(kNumWaitedIn * size_t(world_.num_ranks()));
  executor_->read(ns.data(), waited_, 8 * ns.size());
  return ns;
}

void Engine::start_counters_at(uint64_t base) {
  const RankProgress progress{base, base, 0, 0, 0, base, base};
  executor_->write(progress_, &progress, sizeof progress);
  if (spare_state_) {
    const SpareProgress spares{base, base, base, 0, base};
    executor_->write(spare_state_.get(), &spares, sizeof spares);
    const std::vector<uint64_t> passed(layout_.channels.counters(), base);
    if (!passed.empty()) executor_->write(channel_chunks_, passed.data(), 8 * passed.size());
  }
  const uint64_t before = base % RailCall::kMostChunks;  // chunks, which full flags number
  const std::vector<uint64_t> chunks(size_t(world_.num_nodes), before);
  executor_->write(rail_sent_, chunks.data(), 8 * chunks.size());
  executor_->write(rail_received_, chunks.data(), 8 * chunks.size());
  const std::vector<uint64_t> landed(size_t(layout_.groups), base);
  executor_->write(landed_before_, landed.data(), 8 * landed.size());
  executor_->write(flag(world_.rank, layout_.landed), landed.data(), 8 * landed.size());
  for (uint64_t at = layout_.ready; at < layout_.counts_at; at += BufferLayout::kFlagStride)
    executor_->write(flag(world_.rank, at), &base, sizeof base);
  const uint64_t full = before << RailCall::kBits;
  for (uint64_t i = 0; i < layout_.rail_free - layout_.rail_full; i += BufferLayout::kFlagStride) {
    executor_->write(flag(world_.rank, layout_.rail_full + i), &full, sizeof full);
    executor_->write(flag(world_.rank, layout_.rail_free + i), &before, sizeof before);
  }
}

void Engine::poison() {
  const std::vector<unsigned char> bad(1 << 20, 0xFF);
  for (uint64_t at = layout_.rail_send; at < layout_.recv + layout_.recv_bytes; at += bad.size())
    executor_->write(own() + at, bad.data(), std::min<uint64_t>(bad.size(), layout_.recv + layout_.recv_bytes - at));
  unsigned char last = 0;  // a read waits for what was written: peers may store here as soon as this call is over
  executor_->read(&last, own() + layout_.rail_send, 1);
}

void Engine::make_tables() {
  const int me = world_.node();
  for (int l = 0; l < world_.num_local_ranks; ++l) {
    const int r = world_.rank_of(me, l);
    tables_.recv.push_back(segments_[r]->data() + layout_.recv);
    tables_.arena.push_back(arena_of(l));
    tables_.peer_ready.push_back(flag(r, layout_.ready_flag(world_.local_rank())));
    tables_.peer_done.push_back(flag(r, layout_.done_flag(world_.local_rank())));
    tables_.peer_counts.push_back(segments_[r]->data() + layout_.counts_at);
    tables_.peer_node_flags.push_back(flag(r, layout_.counts_node));
  }
  for (int n = 0; n < world_.num_nodes; ++n) {
    if (n == me) continue;
    RailPeer p{};
    p.node = n;
    p.rank = world_.rail_peer(n);
    p.send_slots = own() + layout_.rail_send_slot(me, n, 0);
    p.recv_slots = own() + layout_.rail_recv_slot(me, n, 0);
    p.full_flags = flag(world_.rank, layout_.rail_full_flag(me, n, 0));
    p.free_flags = flag(world_.rank, layout_.rail_free_flag(me, n, 0));
    p.consumed = consumed_ + uint64_t(n) * shape_.rail_slots;
    p.peer_recv_slots = layout_.rail_recv_slot(n, me, 0);
    p.peer_full_flags = layout_.rail_full_flag(n, me, 0);
    p.peer_free_flags = layout_.rail_free_flag(n, me, 0);
    p.sent = rail_sent_ + n;
    p.received = rail_received_ + n;
    tables_.peers.push_back(p);
  }
  view_ = executor_->adopt(tables_, settings_);
}

// What every dispatch and combine of this buffer has in common.
template <class Params>
void Engine::bind(Params& p, uint32_t chunk, uint32_t blocks, uint32_t rail_call, WaitedIn waited) const {
  p.world = world_;
  p.rail = {{shape_.rail_slots, chunk, layout_.slot_bytes, rail_call}, view_.peers, uint32_t(tables_.peers.size())};
  p.gate = {world_,
            &progress_->operations,
            flag(world_.rank, layout_.ready),
            flag(world_.rank, layout_.done),
            view_.peer_ready,
            view_.peer_done,
            waited_in(waited)};
  p.taken = taken_;
  p.taken.blocks = blocks;
  p.peers = {view_.recv, view_.arena, layout_.arena - layout_.recv, layout_.recv - layout_.landed};
  p.progress = progress_;
  p.exit_counter = exit_counter_;
  p.traffic = traffic_;
}

ExchangeParams Engine::exchange_params(ExchangeParams p, const CallHeader& header) const {
  p.progress = progress_;
  p.counts_offset = layout_.counts_at;
  p.counts = own() + p.counts_offset;
  p.peer_counts = view_.peer_counts;
  p.rail_flags = flag(world_.rank, layout_.counts_rail);
  p.node_flags = flag(world_.rank, layout_.counts_node);
  p.peer_node_flags = view_.peer_node_flags;
  p.rail_flag_offset = layout_.counts_rail_flag(0, world_.node());
  p.traffic = traffic_;
  p.waited = waited_in(WaitedIn::kExchange);
  p.misfits = misfits_;
  p.block_counts = block_counts_;
  std::ranges::copy(header.words(), p.header);
  return p;
}

void Engine::require_row(uint64_t row_bytes, uint64_t rows, const char* what) const {
  const bool fits = rows <= shape_.recv_rows && rows * row_bytes + 2 * BufferLayout::kLine <= layout_.recv_bytes;
  if (row_bytes <= layout_.token_stride && fits) return;
  throw std::logic_error(std::string(what) + ": " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) +
                         " bytes do not fit this buffer; it must grow first");
}

// What would leave the ranks out of step if a kernel found it.
void Engine::require_sizes(uint64_t row_bytes, uint64_t scale_bytes) {
  if (row_bytes == 0 || row_bytes % 16 || scale_bytes % 16)
    throw std::invalid_argument("x: a row has " + std::to_string(row_bytes) + " bytes and " +
                                std::to_string(scale_bytes) +
                                " of scales; both must be multiples of 16, the row not empty");
}

void Engine::require_blocks(const char* name, int64_t blocks) const {
  const std::string is = std::string(name) + ": is " + std::to_string(blocks);
  if (blocks < 1) throw std::invalid_argument(is + "; give at least 1");
  if (const int most = executor_->most_blocks(); blocks > most)
    throw std::invalid_argument(is + " but the device has " + std::to_string(most) +
                                " SMs, and blocks wait for one another; give at most that");
}

// Blocks that feed links, and those of local work, which wait for one another.
void Engine::require_split(int link, int local) const {
  require_blocks("num_blocks", link);
  if (!local) return;
  require_blocks("local_blocks", local);
  require_blocks("num_blocks + local_blocks", int64_t(link) + local);
}

void Engine::require_world(const Plan& plan) const {
  const World& w = plan.world();
  if (w.num_nodes != world_.num_nodes || w.num_local_ranks != world_.num_local_ranks || w.rank != world_.rank)
    throw std::invalid_argument("handle: was made by another rank or group");
}

unsigned char* Engine::arena_of(int local_rank) const {
  if (shape_.arena_apart) return arenas_[size_t(local_rank)]->data();
  return segments_[size_t(world_.rank_of(world_.node(), local_rank))]->data() + layout_.arena;
}

// As peers are told it: from the start of the receive region.
std::optional<uint64_t> Engine::in_arena(const unsigned char* x, uint64_t bytes) const {
  // Below the arena it is a very large number.
  const uint64_t at = reinterpret_cast<uint64_t>(x) - reinterpret_cast<uint64_t>(arena_of(world_.local_rank()));
  if (at > layout_.arena_bytes || bytes > layout_.arena_bytes - at) return {};
  return layout_.arena - layout_.recv + at;
}

// Rows land in the caller's tensors where peers can reach them, else in the receive region, behind the metadata, and
// deliver copies them. Whether it has to.
bool Engine::land(DispatchParams& p, const DispatchCall& c, const Plan& plan) const {
  const uint64_t rows = c.permute ? c.out_rows : plan.num_recv_rows();
  const auto x = in_arena(c.out_x, rows * c.row_bytes),
             scales = c.scale_bytes ? in_arena(c.out_scales, rows * c.scale_bytes) : 0;
  p.landing.row_bytes = c.row_bytes;
  p.landing.scale_bytes = c.scale_bytes;
  p.landing.metadata_bytes = p.message.metadata_bytes();
  if (x && scales) {
    p.landing.x = *x;
    p.landing.scales = *scales;
    p.landing.rows = uint32_t(rows);
    p.landing.in = !c.permute
                       ? LandIn::kReceiveRow
                       : c.land_in.value_or(executor_->shares_memory() ? LandIn::kEveryPair : LandIn::kFirstPair);
    return p.landing.in == LandIn::kFirstPair;
  }
  p.landing.rows = plan.num_recv_rows();
  const auto line_behind = [](uint64_t at) { return align_up(at, BufferLayout::kLine); };
  p.landing.x = line_behind(uint64_t(plan.num_recv_rows()) * p.message.metadata_bytes());
  p.landing.scales = line_behind(p.landing.x + uint64_t(plan.num_recv_rows()) * c.row_bytes);
  return true;
}

// A partial that is one row of the same type is that row, and whoever can reach the row may as well read it there.
Reading Engine::reading(const CombineParams& p, const CombineCall& c, const Plan& plan) const {
  const uint32_t row_bytes = c.hidden * dtype_bytes(c.dtype);
  Reading r;
  r.row_bytes = row_bytes;
  r.partial_bytes = p.partial.row_bytes();
  r.types = Reading::types_of(c.dtype, p.partial_dtype);
  r.rows = c.permuted ? plan.num_permuted_rows() : plan.num_recv_rows();
  const bool as_they_are = !c.multiply && p.partial_dtype == c.dtype && reinterpret_cast<uint64_t>(c.x) % 16 == 0;
  const auto x = in_arena(c.x, uint64_t(r.rows) * row_bytes);
  if (!as_they_are || c.sum_from == SumFrom::kPartials || !x) return r;
  r.x = *x;
  r.from = !c.permuted ? SumFrom::kReceiveRow
                       : c.sum_from.value_or(executor_->adds_parts() ? SumFrom::kEveryPair : SumFrom::kSinglePair);
  return r;
}

uint32_t Engine::chunk_of(uint32_t asked) const {
  if (asked > shape_.chunk_tokens)
    throw std::invalid_argument("chunk_tokens: is " + std::to_string(asked) + "; a ring slot holds " +
                                std::to_string(shape_.chunk_tokens) + ", give at most that");
  return asked ? asked : shape_.chunk_tokens;
}

void Engine::dispatch(Plan& plan, const DispatchCall& c) {
  require_world(plan);
  require_sizes(c.row_bytes, c.scale_bytes);
  require_split(c.num_blocks, c.local_blocks);
  const uint32_t chunk = chunk_of(c.chunk_tokens);
  const uint32_t experts_per_node = plan.num_local_experts() * world_.num_local_ranks;
  DispatchParams p{};
  p.world = world_;
  p.message = MessageLayout::make(world_, plan.topk(), c.weights != nullptr, c.scale_bytes, c.row_bytes);
  require_row(p.message.token_bytes(), plan.max_recv_rows(), "dispatch");
  if (c.permute && c.out_rows < plan.num_permuted_rows())
    throw std::logic_error("dispatch: out_rows is smaller than the plan's rows");
  if (c.permute && c.land_in == LandIn::kReceiveRow)
    throw std::logic_error("dispatch: permuted rows do not land in receive order");
  Call call(*this);
  bind(p, chunk, uint32_t(c.num_blocks), RailCall::word(RailCall::kDispatch, p.message.token_bytes()),
       WaitedIn::kDispatch);
  p.plan = plan.view();
  p.x = c.x;
  p.scales = c.scale_bytes ? c.scales : nullptr;
  p.weights = c.weights;
  p.out_x = c.out_x;
  p.out_scales = c.out_scales;
  p.out_weights = c.weights ? c.out_weights : nullptr;
  p.out_rows = uint32_t(c.out_rows);
  p.copies = land(p, c, plan);
  p.landing.followed = p.copies || p.reads_metadata();
  p.permute = c.permute;
  p.blocks = {uint32_t(c.num_blocks), uint32_t(c.local_blocks)};
  p.landed = {flag(world_.rank, layout_.landed), landed_before_};
  p.first_node_expert = uint32_t(world_.node()) * experts_per_node;
  p.num_node_experts = experts_per_node;
  executor_->require_shared_memory(p);
  if (executor_->shares_memory())
    prefer_huge_pages(c.out_x, (c.permute ? c.out_rows : plan.num_recv_rows()) * c.row_bytes);
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks + c.local_blocks;
  call.run([&] { executor_->dispatch(p, settings); });
  plan.freeze();
}

// What a combine sums, by either path.
void Engine::describe_sum(SumParams& p, const CombineCall& c, const Plan& plan) const {
  p.world = world_;
  p.dtype = c.dtype;
  p.partial_dtype = c.fp32_partials ? DType::kFp32 : c.dtype;
  p.partial = {c.hidden * dtype_bytes(p.partial_dtype), c.weights ? plan.weight_stride() * 4 : 0};
  p.plan = plan.view();
  p.record_bytes = plan.record_bytes();
  p.pairs_at = plan.pairs_at();
  p.hidden = c.hidden;
  p.x = c.x;
  p.x_weights = c.weights;
  p.permuted = c.permuted;
  p.multiply = c.multiply;
  p.num_node_experts = plan.num_local_experts() * uint32_t(world_.num_local_ranks);
  p.first_node_expert = uint32_t(world_.node()) * p.num_node_experts;
  p.out_x = c.out_x;
  p.out_weights = c.weights ? c.out_weights : nullptr;
  p.progress = progress_;
  p.traffic = traffic_;
}

void Engine::combine(Plan& plan, const CombineCall& c) {
  require_world(plan);
  if (!plan.complete()) throw std::invalid_argument("handle: its dispatch has not run");
  require_sizes(uint64_t(c.hidden) * dtype_bytes(c.dtype), 0);
  require_split(c.num_blocks, c.local_blocks);
  const uint32_t chunk = chunk_of(c.chunk_tokens);
  CombineParams p{};
  describe_sum(p, c, plan);
  require_row(p.partial.row_bytes(), plan.max_recv_rows(), "combine");
  if (c.permuted == (c.sum_from == SumFrom::kReceiveRow) && c.sum_from != SumFrom::kPartials && c.sum_from)
    throw std::logic_error("combine: sum_from is not of rows in this order");
  if (c.sum_from == SumFrom::kEveryPair && !executor_->adds_parts())
    throw std::logic_error("combine: this executor adds no parts");
  Call call(*this);
  bind(p, chunk, uint32_t(c.num_blocks), RailCall::word(RailCall::kCombine, p.partial.row_bytes(), p.partial_dtype),
       WaitedIn::kCombine);
  p.blocks = {uint32_t(c.num_blocks), uint32_t(c.local_blocks)};
  p.partials = {world_, flag(world_.rank, layout_.partials), view_.recv, layout_.recv - layout_.partials,
                uint32_t(layout_.groups)};
  p.recv = own() + layout_.recv;
  p.reading = reading(p, c, plan);
  executor_->require_shared_memory(p);
  if (executor_->shares_memory())
    prefer_huge_pages(c.out_x, uint64_t(plan.num_tokens()) * c.hidden * dtype_bytes(c.dtype));
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks + c.local_blocks;
  call.run([&] { executor_->combine(p, settings); });
}

}  // namespace hep
