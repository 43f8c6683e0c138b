// Parameters of launches, and the bookkeeping that must agree on all ranks: epochs, exchange numbers, chunks.
#include "runtime/engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "arch/host/errors.h"
#include "layout/headers.h"
#include "runtime/host_pages.h"
#include "runtime/routing.h"

namespace hep {

class Engine::Call {
 public:
  explicit Call(Engine& e) : e_(e) {
    if (!e.failure_.empty())
      throw std::runtime_error("this buffer failed earlier and cannot be used any more: " + e.failure_);
    if (e.busy_.exchange(true))
      throw std::runtime_error(
          "this buffer is in use by another thread; give every concurrent operation a buffer of its own");
    try {
      require_alive();
    } catch (...) {
      e.busy_ = false;
      throw;
    }
  }
  ~Call() { e_.busy_ = false; }
  // From here on a failure leaves the ranks out of step: the buffer is lost.
  template <class F>
  void run(F&& kernel) {
    try {
      kernel();
    } catch (const std::exception& ex) {
      e_.failure_ = ex.what();
      throw;
    }
    require_alive();
  }

 private:
  // A kernel that ran beside the host may have ended with an obituary, in this call or in an earlier one.
  void require_alive() {
    if (const auto died = e_.executor_->obituary()) {
      const host::DeadlineError error(*died);
      e_.failure_ = error.what();
      throw error;
    }
  }
  Engine& e_;
};

Engine::Engine(int rank, const BufferShape& shape, std::vector<std::shared_ptr<Segment>> segments, double timeout_s,
               const std::string& executor, uint64_t seed)
    : Engine(
          rank, shape, std::move(segments), timeout_s,
          [&](unsigned char* const* rail_segments, uint64_t s) { return Executor::make(executor, rail_segments, s); },
          seed) {}

Engine::Engine(int rank, const BufferShape& shape, std::vector<std::shared_ptr<Segment>> segments, double timeout_s,
               const ExecutorMaker& executor, uint64_t seed)
    : world_{int32_t(shape.num_nodes), int32_t(shape.num_local_ranks), rank},
      shape_(shape),
      layout_(shape),
      segments_(std::move(segments)) {
  if (rank < 0 || rank >= world_.num_ranks()) throw std::invalid_argument("rank: outside the group");
  if (segments_.size() != size_t(world_.num_ranks()))
    throw std::invalid_argument("segments: need one per rank of the group");
  for (const auto& s : segments_)
    if (!s || s->bytes() < layout_.total)
      throw std::invalid_argument("segments: one is smaller than the buffer's layout");
  if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s: must be positive");
  settings_.world = world_;
  settings_.timeout_s = timeout_s;
  settings_.seed = seed;
  for (int n = 0; n < world_.num_nodes; ++n) rail_segments_.push_back(segments_[world_.rail_peer(n)]->data());
  for (int l = 0; l < world_.num_local_ranks; ++l) {
    const int r = world_.rank_of(world_.node(), l);
    node_recv_.push_back(segments_[r]->data() + layout_.recv);
    peer_ready_.push_back(flag(r, layout_.ready_flag(world_.local_rank())));
    peer_done_.push_back(flag(r, layout_.done_flag(world_.local_rank())));
  }
  rail_sent_.assign(world_.num_nodes, 0);
  rail_received_.assign(world_.num_nodes, 0);
  executor_ = executor(rail_segments_.data(), seed + uint64_t(rank));
  const uint64_t counters = align_up(sizeof(TrafficCounters), 64), exit = 64;
  state_ = executor_->allocate(counters + exit + uint64_t(world_.num_nodes) * shape.rail_slots * 8);
  auto* at = static_cast<unsigned char*>(state_.get());
  traffic_ = reinterpret_cast<TrafficCounters*>(at);
  exit_counter_ = reinterpret_cast<uint64_t*>(at + counters);
  consumed_ = reinterpret_cast<uint64_t*>(at + counters + exit);
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
}

void Engine::start_counters_at(uint64_t base) {
  epoch_ = exchanges_ = base;
  std::fill(rail_sent_.begin(), rail_sent_.end(), base);
  std::fill(rail_received_.begin(), rail_received_.end(), base);
  for (uint64_t at = layout_.ready; at < layout_.counts_at; at += BufferLayout::kFlagStride)
    executor_->write(flag(world_.rank, at), &base, sizeof base);
}

std::vector<RailPeer> Engine::rail_peers() const {
  std::vector<RailPeer> peers;
  const int me = world_.node();
  for (int n = 0; n < world_.num_nodes; ++n) {
    if (n == me) continue;
    RailPeer p{};
    p.node = n, p.rank = world_.rail_peer(n);
    p.send_slots = own() + layout_.rail_send_slot(me, n, 0);
    p.recv_slots = own() + layout_.rail_recv_slot(me, n, 0);
    p.full_flags = flag(world_.rank, layout_.rail_full_flag(me, n, 0));
    p.free_flags = flag(world_.rank, layout_.rail_free_flag(me, n, 0));
    p.consumed = consumed_ + uint64_t(n) * shape_.rail_slots;
    p.peer_recv_slots = layout_.rail_recv_slot(n, me, 0);
    p.peer_full_flags = layout_.rail_full_flag(n, me, 0);
    p.peer_free_flags = layout_.rail_free_flag(n, me, 0);
    p.send_base = rail_sent_[n], p.recv_base = rail_received_[n];
    peers.push_back(p);
  }
  return peers;
}

NodeGate Engine::open_gate() {
  NodeGate g;
  g.world = world_;
  g.epoch = kMutant == 31 ? 1 : ++epoch_;
  g.ready_in = flag(world_.rank, layout_.ready);
  g.done_in = flag(world_.rank, layout_.done);
  g.peer_ready = peer_ready_.data();
  g.peer_done = peer_done_.data();
  return g;
}

// The checks read the routing on the host, wherever it lies.
ExchangeParams Engine::prepare(const RoutingInput& in, Routing& r) {
  if (executor_->shares_memory()) return prepare_routing(in, world_, layout_.counts, r);
  std::vector<int64_t> idx(in.topk_idx ? uint64_t(in.num_tokens) * in.topk : 0);
  std::vector<unsigned char> map(in.topk_idx ? 0 : uint64_t(in.num_tokens) * layout_.counts.num_experts);
  if (!idx.empty()) executor_->read(idx.data(), in.topk_idx, idx.size() * sizeof idx[0]);
  if (!map.empty()) executor_->read(map.data(), in.routing_map, map.size());
  RoutingInput here = in;
  if (in.topk_idx) here.topk_idx = idx.data();
  here.routing_map = in.topk_idx ? nullptr : map.data();
  ExchangeParams p = prepare_routing(here, world_, layout_.counts, r);
  p.topk_idx = in.topk_idx, p.routing_map = in.routing_map;
  return p;
}

std::shared_ptr<Routing> Engine::exchange(const RoutingInput& in) {
  Call call(*this);
  auto r = std::make_shared<Routing>();
  ExchangeParams p = prepare(in, *r);  // refuses bad indices before anything is sent
  std::vector<uint32_t> columns(uint64_t(kExchangeWorkspaceWarps) *
                                (world_.num_ranks() + world_.num_nodes + shape_.num_experts));
  std::vector<uint32_t*> node_tokens;
  for (auto& tokens : r->node_tokens) node_tokens.push_back(tokens.data());
  const uint64_t sequence = exchanges_ + 1, parity = kMutant == 24 ? 0 : sequence & 1;
  std::vector<unsigned char*> peer_counts;
  std::vector<uint64_t*> peer_node_flags;
  for (int l = 0; l < world_.num_local_ranks; ++l) {
    const int peer = world_.rank_of(world_.node(), l);
    peer_counts.push_back(segments_[peer]->data() + layout_.counts_vector(int(parity), 0));
    peer_node_flags.push_back(flag(peer, layout_.counts_node));
  }
  p.sequence = sequence;
  p.node_tokens = node_tokens.data();
  p.columns = columns.data();
  p.counts_offset = layout_.counts_vector(int(parity), 0);
  p.counts = own() + p.counts_offset;
  p.peer_counts = peer_counts.data();
  p.rail_flags = flag(world_.rank, layout_.counts_rail);
  p.node_flags = flag(world_.rank, layout_.counts_node);
  p.peer_node_flags = peer_node_flags.data();
  p.rail_flag_offset = layout_.counts_rail_flag(world_.node());
  p.traffic = traffic_;
  uint32_t header[kCountHeaderWords] = {};
  header[kHeaderNumTokens] = in.num_tokens;
  header[kHeaderTopk] = r->topk;
  std::copy(in.header.begin(), in.header.end(), header + kHeaderFirstFree);
  executor_->write(p.counts + world_.rank * layout_.counts.vector_bytes(), header, sizeof header);
  call.run([&] { executor_->exchange(p, settings_); });
  exchanges_ = sequence;
  r->counts.resize(world_.num_ranks() * layout_.counts.vector_bytes());
  executor_->read(r->counts.data(), p.counts, r->counts.size());
  const CountsView counts = r->view();
  for (int n = 0; n < world_.num_nodes; ++n) r->node_tokens[n].resize(counts.node_tokens(world_.rank, n));
  return r;
}

void Engine::require_row(uint64_t row_bytes, uint64_t rows, const char* what) const {
  if (row_bytes <= layout_.token_stride && rows * row_bytes <= layout_.recv_bytes) return;
  throw std::logic_error(std::string(what) + ": " + std::to_string(rows) + " rows of " + std::to_string(row_bytes) +
                         " bytes do not fit this buffer; it must grow first");
}

// What would leave the ranks out of step if a kernel found it.
void Engine::require_sizes(uint64_t row_bytes, uint64_t scale_bytes, int num_blocks) {
  if (row_bytes == 0 || row_bytes % 16 || scale_bytes % 16)
    throw std::invalid_argument("x: a row has " + std::to_string(row_bytes) + " bytes and " +
                                std::to_string(scale_bytes) +
                                " of scales; both must be multiples of 16, the row not empty");
  if (num_blocks < 1) throw std::invalid_argument("num_blocks: is " + std::to_string(num_blocks) + "; give at least 1");
}

void Engine::require_world(const Plan& plan) const {
  const World& w = plan.world();
  if (w.num_nodes != world_.num_nodes || w.num_local_ranks != world_.num_local_ranks || w.rank != world_.rank)
    throw std::invalid_argument("handle: was made by another rank or group");
}

uint32_t Engine::chunk_of(uint32_t asked) const {
  if (asked > shape_.chunk_tokens)
    throw std::invalid_argument("chunk_tokens: is " + std::to_string(asked) + "; a ring slot holds " +
                                std::to_string(shape_.chunk_tokens) + ", give at most that");
  return asked ? asked : shape_.chunk_tokens;
}

void Engine::advance_rails(const Plan& plan, bool dispatch, uint32_t chunk) {
  const PlanView v = const_cast<Plan&>(plan).view();
  for (int n = 0; n < world_.num_nodes; ++n) {
    if (n == world_.node()) continue;
    const uint64_t out = div_up(v.node_count[n], chunk), in = div_up(v.rail_count[n], chunk);
    rail_sent_[n] += dispatch ? out : in;
    rail_received_[n] += dispatch ? in : out;
  }
}

void Engine::dispatch(Plan& plan, const DispatchCall& c) {
  require_world(plan);
  require_sizes(c.row_bytes, c.scale_bytes, c.num_blocks);
  const uint32_t chunk = chunk_of(c.chunk_tokens);
  const uint32_t experts_per_node = plan.num_local_experts() * world_.num_local_ranks;
  DispatchParams p{};
  p.world = world_;
  p.message = MessageLayout::make(world_, plan.topk(), c.weights != nullptr, c.scale_bytes, c.row_bytes);
  require_row(p.message.token_bytes(), plan.max_recv_rows(), "dispatch");
  if (c.permute && c.out_rows < plan.num_permuted_rows())
    throw std::logic_error("dispatch: out_rows is smaller than the plan's rows");
  const std::vector<uint32_t> zero_ranges = plan.zero_ranges(c.out_rows);
  Call call(*this);
  const std::vector<RailPeer> peers = rail_peers();
  p.plan = plan.view();
  p.plan.zero_ranges = zero_ranges.data();
  p.plan.num_zero_ranges = uint32_t(zero_ranges.size() / 2);
  p.rail = {{shape_.rail_slots, chunk, layout_.slot_bytes}, peers.data(), uint32_t(peers.size())};
  p.gate = open_gate();
  p.peers = {node_recv_.data()};
  p.x = c.x, p.scales = c.scale_bytes ? c.scales : nullptr, p.weights = c.weights;
  p.out_x = c.out_x, p.out_scales = c.out_scales, p.out_weights = c.weights ? c.out_weights : nullptr;
  p.out_rows = uint32_t(c.out_rows);
  p.permute = c.permute;
  p.first_node_expert = uint32_t(world_.node()) * experts_per_node, p.num_node_experts = experts_per_node;
  p.exit_counter = exit_counter_;
  p.traffic = traffic_;
  if (executor_->shares_memory())
    prefer_huge_pages(c.out_x, (c.permute ? c.out_rows : plan.num_recv_rows()) * c.row_bytes);
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks;
  settings.plan_copy = &plan.copy();
  call.run([&] { executor_->dispatch(p, settings); });
  advance_rails(plan, true, chunk);
  plan.freeze();
}

void Engine::combine(Plan& plan, const CombineCall& c) {
  require_world(plan);
  if (!plan.complete()) throw std::invalid_argument("handle: its dispatch has not run");
  require_sizes(uint64_t(c.hidden) * dtype_bytes(c.dtype), 0, c.num_blocks);
  const uint32_t chunk = chunk_of(c.chunk_tokens);
  const uint32_t experts_per_node = plan.num_local_experts() * world_.num_local_ranks;
  CombineParams p{};
  p.world = world_;
  p.dtype = c.dtype, p.partial_dtype = c.fp32_partials ? DType::kFp32 : c.dtype;
  p.partial = {c.hidden * dtype_bytes(p.partial_dtype), c.weights ? plan.weight_stride() * 4 : 0};
  require_row(p.partial.row_bytes(), plan.max_recv_rows(), "combine");
  Call call(*this);
  const std::vector<RailPeer> peers = rail_peers();
  p.plan = plan.view();
  p.record_bytes = plan.record_bytes(), p.pairs_at = plan.pairs_at();
  p.rail = {{shape_.rail_slots, chunk, layout_.slot_bytes}, peers.data(), uint32_t(peers.size())};
  p.gate = open_gate();
  p.peers = {node_recv_.data()};
  p.hidden = c.hidden;
  p.x = c.x, p.x_weights = c.weights;
  p.permuted = c.permuted, p.multiply = c.multiply;
  p.first_node_expert = uint32_t(world_.node()) * experts_per_node, p.num_node_experts = experts_per_node;
  p.recv = own() + layout_.recv;
  p.out_x = c.out_x, p.out_weights = c.weights ? c.out_weights : nullptr;
  p.exit_counter = exit_counter_;
  p.traffic = traffic_;
  if (executor_->shares_memory())
    prefer_huge_pages(c.out_x, uint64_t(plan.num_tokens()) * c.hidden * dtype_bytes(c.dtype));
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks;
  settings.plan_copy = &plan.copy();
  call.run([&] {
    executor_->unpermute(p, settings);
    executor_->combine(p, settings);
  });
  advance_rails(plan, false, chunk);
}

}  // namespace hep
