// Launches on the simulated machine, with a map of the memory that each kernel may touch.
#include "kernels/instances/sim_executor.h"

#include <string_view>
#include <utility>

#include "kernels/balance.h"
#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/exchange.h"
#include "kernels/latency_combine.h"
#include "kernels/spare_rails.h"
#include "layout/count_notification.h"
#include "transport/sim/sim_transport.h"

namespace hep {

using sim::SimArch;
using Use = sim::Region::Use;
constexpr uint64_t kNoBudget = std::numeric_limits<uint64_t>::max();

template <class Body>
void SimExecutor::launch(const char* kernel, int blocks, int warps, uint64_t smem, const MessageLayout& message,
                         Body body) {
  ++launches_;
  sim::Launch l;
  l.kernel = kernel;
  l.num_blocks = blocks;
  l.num_warps = warps;
  l.smem_bytes = smem;
  l.row_bytes = message.token_bytes();
  l.entry_bytes = message.metadata_bytes();
  l.moved_bytes = message.record_bytes;
  l.fact_lines = Line::lines_of(message.metadata_bytes());
  const sim::CostModel& costs = m_.config().costs;
  const bool sums = std::string_view(kernel) == "latency_combine",
             by_lines = sums || std::string_view(kernel) == "latency_dispatch";
  l.line_store_ps = sums ? 0 : costs.line_store_ps;
  l.word_load_ps = sums ? costs.partial_line_ps / Line::kFlag : costs.word_load_ps;
  l.line_load_ps = sums ? costs.sum_line_ps : costs.line_load_ps;
  l.signal_ps = by_lines ? (sums ? costs.combine_signal_ps : costs.dispatch_signal_ps) : costs.poll_ps;
  l.count_ps = by_lines ? (sums ? costs.combine_count_ps : costs.dispatch_count_ps) : costs.fence_ps + costs.poll_ps;
  l.rail_store_ps = l.line_store_ps / Line::kFlag;
  l.rail_load_ps = sums ? costs.sum_line_ps / Line::kFlag : costs.word_load_ps;
  l.charged_role = m_.config().num_nodes > 1 ? "latency_forward" : "latency_receive";
  l.charge = std::exchange(placing_, 0);
  m_.rank(rank_).phantom_begin = phantom_begin;
  m_.rank(rank_).phantom_end = phantom_end;
  l.body = [&](sim::Lane& lane) {
    SimArch a(lane);
    SimTransport net;
    body(a, net, lane.block->smem);
  };
  m_.launch(rank_, std::move(l));
}

void SimExecutor::add(const char* name, const void* p, uint64_t bytes, Use use, bool payload) {
  if (!p || !bytes) return;
  m_.memory().add({name, static_cast<unsigned char*>(const_cast<void*>(p)), bytes, rank_, use, payload});
}

// The rank's receive rows are its own again; nobody may touch them before it enters the next operation.
void SimExecutor::end_operation() {
  m_.memory().drop_rank(rank_);
  for (const Use use : {Use::kRecvRows, Use::kArena})
    if (sim::Region* rows = m_.memory().registered(rank_, use)) m_.memory().free(*rows, 0, rows->bytes);
  m_.rank(rank_).first_row.clear();
  m_.rank(rank_).received.clear();
}

void SimExecutor::balance(const BalanceParams& params, const LaunchSettings& s) {
  BalanceParams p = params;
  const uint64_t smem_bytes = plan_balance<SimArch>(p, smem_budget_, s.num_blocks);
  const uint64_t tokens = p.num_tokens, experts = uint64_t(p.shape.num_experts), ranks = uint64_t(p.shape.num_ranks),
                 slots = ranks * uint64_t(p.shape.spare_slots);
  const Use planned = p.replayed ? Use::kInput : Use::kMetadata;
  add("topk_idx", p.topk_idx, 8 * tokens * p.topk, Use::kInput, false);
  add("routing_map", p.routing_map, tokens * experts, Use::kInput, false);
  add("columns", p.columns.columns, 8 * experts, Use::kInput, false);
  add("block_counts", p.block_counts, 4 * uint64_t(s.num_blocks) * experts, Use::kMetadata, false);
  add("log", p.log, p.tables.flow_bytes, Use::kMetadata, false);
  add("out_idx", p.topk_idx ? p.out_idx : nullptr, 8 * tokens * p.topk, Use::kOutput, false);
  add("out_map", p.topk_idx ? nullptr : p.out_map, tokens * p.num_columns(), Use::kOutput, false);
  add("out_columns", p.topk_idx ? nullptr : p.out_columns, 8 * tokens * experts, Use::kOutput, false);
  add("slot_expert", p.slot_expert, 4 * slots, planned, false);
  add("slot_tokens", p.slot_tokens, 8 * slots, planned, false);
  add("take", p.share.take, 8 * slots, planned, false);
  add("first", p.share.first, 8 * slots, planned, false);
  add("counted", p.counted, 8 * ranks * experts, planned, false);
  launch(
      "balance", s.num_blocks, kBalanceWarps<SimArch>, smem_bytes, {},
      [&](SimArch& a, SimTransport& net, std::byte* smem) { balance_kernel<SimArch, SimTransport>(a, net, p, smem); });
  m_.memory().drop_rank(rank_);
}

// The plan, where experts live, and each expert's matrices, of so many bytes an element.
void SimExecutor::add_spares(const SpareParams& p, uint64_t element_bytes, Use use) {
  const uint64_t ranks = uint64_t(m_.config().num_nodes) * uint64_t(p.world.num_ranks());
  add("slot_expert", p.slot_expert, 4 * ranks * p.spare_slots, Use::kInput, false);
  add("columns", p.columns, 8 * ranks * p.num_owners, Use::kInput, false);
  if (!p.experts) return;
  const uint64_t matrices = uint64_t(p.num_owners) * p.num_matrices;
  add("experts", p.experts, 8 * matrices, Use::kInput, false);
  for (uint64_t i = 0; i < matrices; ++i) {
    const auto* at = reinterpret_cast<const unsigned char*>(p.experts[i]);
    const uint64_t bytes = p.matrices[i % p.num_matrices].elements * element_bytes;
    add("expert", at, bytes, use, true);
    if (sim::Region* const sums = m_.memory().find(at, bytes); sums && use == Use::kMetadata)
      m_.memory().fill(*sums, 0, bytes);
  }
}

void SimExecutor::push_weights(const SpareParams& params, const LaunchSettings& s) {
  SpareParams p = params;
  const uint64_t smem_bytes = plan_push<SimArch>(p, kSpareWarps<SimArch>, kNoBudget);
  add_spares(p, p.matrices[0].bytes / p.matrices[0].elements, Use::kInput);
  launch("push_weights", s.num_blocks, kSpareWarps<SimArch>, smem_bytes, {},
         [&](SimArch& a, SimTransport&, std::byte* smem) { push_weights_kernel(a, p, smem); });
  m_.memory().drop_rank(rank_);
}

void SimExecutor::await_weights(const SpareParams& params, const LaunchSettings&) {
  SpareParams p = params;
  p.experts = nullptr;
  add_spares(p, 0, Use::kInput);
  launch("await_weights", 1, 1, SpareTable<SimArch>::bytes(p), {},
         [&](SimArch& a, SimTransport&, std::byte* smem) { await_weights_kernel(a, p, smem); });
  m_.memory().drop_rank(rank_);
}

// Sums are there before, and are written once for each clone of their expert.
void SimExecutor::collect_gradients(const SpareParams& p, const LaunchSettings& s) {
  add_spares(p, 4, Use::kMetadata);
  launch("collect_gradients", s.num_blocks, kSpareWarps<SimArch>, SpareTable<SimArch>::bytes(p), {},
         [&](SimArch& a, SimTransport&, std::byte* smem) { collect_gradients_kernel(a, p, smem); });
  m_.memory().drop_rank(rank_);
}

void SimExecutor::push_nodes(const SpareRailParams& params, const LaunchSettings&) {
  SpareRailParams p = params;
  const uint64_t smem_bytes = plan_push_nodes<SimArch, SimTransport>(p, kNoBudget);
  add_spares(p.node, p.node.matrices[0].bytes / p.node.matrices[0].elements, Use::kInput);
  launch("push_nodes", p.num_blocks(), kRailWarps<SimArch>, smem_bytes, {},
         [&](SimArch& a, SimTransport& net, std::byte* smem) {
           push_nodes_kernel<SimArch, SimTransport>(a, net, p, smem);
         });
  m_.memory().drop_rank(rank_);
}

void SimExecutor::collect_nodes(const SpareRailParams& p, const LaunchSettings&) {
  add_spares(p.node, 4, Use::kMetadata);
  launch("collect_nodes", p.num_blocks(), kRailWarps<SimArch>, collect_nodes_bytes<SimArch>(p), {},
         [&](SimArch& a, SimTransport& net, std::byte* smem) {
           collect_nodes_kernel<SimArch, SimTransport>(a, net, p, smem);
         });
  m_.memory().drop_rank(rank_);
}

void SimExecutor::exchange(const ExchangeParams& params, const LaunchSettings& s) {
  ExchangeParams p = params;
  const uint64_t smem_bytes = plan_exchange<SimArch>(p, smem_budget_, s.num_blocks);
  if (p.notification)
    add("notification", p.notification, CountNotification::make(p.layout).bytes(), Use::kNotification, false);
  const sim::Ps routing = p.num_tokens * m_.config().costs.route_token_ps;
  launch("exchange", s.num_blocks, kExchangeWarps<SimArch>, smem_bytes, {},
         [&](SimArch& a, SimTransport& net, std::byte* smem) {
           if (m_.timed()) m_.spend(*sim::Machine::running(), routing);
           exchange_kernel<SimArch, SimTransport>(a, net, p, smem);
         });
  m_.memory().drop_rank(rank_);
}

void SimExecutor::dispatch(DispatchParams& p, const LaunchSettings& s) {
  plan_dispatch_smem<SimArch>(p, smem_budget_);
  const uint64_t tokens = p.plan.num_tokens, rows = p.plan.numbers->recv_rows, out_rows = p.permute ? p.out_rows : rows;
  const Use metadata = p.plan.fresh ? Use::kMetadata : Use::kInput;
  add("x", p.x, tokens * p.message.row_bytes, Use::kInput, true);
  add("scales", p.scales, tokens * p.message.scale_bytes, Use::kInput, true);
  add("weights", p.weights, tokens * p.plan.weight_stride * 4, Use::kInput, true);
  const uint64_t metadata_end = rows * p.message.metadata_bytes();
  auto& received = m_.rank(rank_).received;
  received = {{0, metadata_end, p.message.metadata_bytes()}};
  if (p.landing.x == align_up(metadata_end, BufferLayout::kLine)) {  // not in the arena, behind all receive rows
    add("out_x", p.out_x, out_rows * p.message.row_bytes, Use::kOutput, true);
    add("out_scales", p.out_scales, out_rows * p.message.scale_bytes, Use::kOutput, true);
    received.push_back({p.landing.x, p.landing.x + rows * p.message.row_bytes, p.message.row_bytes});
    received.push_back({p.landing.scales, p.landing.scales + rows * p.message.scale_bytes, p.message.scale_bytes});
  }
  add("out_weights", p.out_weights, out_rows * (p.permute ? 1 : p.num_node_experts) * 4, Use::kOutput, true);
  for (int n = 0; n < p.world.num_nodes; ++n) {
    add("records", p.plan.records[n], uint64_t(p.plan.node_count[n]) * p.message.record_bytes, Use::kInput, false);
    add("rail_records", p.plan.rail_record(n, 0, p.message.record_bytes),
        uint64_t(p.plan.rail_count[n]) * p.message.record_bytes, metadata, false);
  }
  add("row_records", p.plan.row_records, rows * p.message.record_bytes, metadata, false);
  add("row_weights", p.plan.row_weights, rows * p.plan.weight_stride * 4, metadata, true);
  m_.rank(rank_).first_row = first_row;
  launch(
      "dispatch", s.num_blocks, kDispatchWarps, p.smem_bytes, p.message,
      [&](SimArch& a, SimTransport& net, std::byte* smem) { dispatch_kernel<SimArch, SimTransport>(a, net, p, smem); });
  end_operation();
}

void SimExecutor::combine(CombineParams& p, const LaunchSettings& s) {
  plan_combine_smem<SimArch>(p, smem_budget_);
  const uint64_t tokens = p.plan.num_tokens;
  const uint64_t bytes = combine_rows * p.hidden * dtype_bytes(p.dtype);
  if (sim::Region* const lent = m_.memory().find(p.x, bytes); bytes && lent)
    m_.memory().fill(*lent, lent->offset(p.x), bytes);
  else
    add("x", p.x, bytes, Use::kInput, true);
  add("out_x", p.out_x, tokens * p.hidden * dtype_bytes(p.dtype), Use::kOutput, true);
  add("out_weights", p.out_weights, tokens * p.plan.weight_stride * 4, Use::kOutput, true);
  for (int n = 0; n < p.world.num_nodes; ++n) {
    add("records", p.plan.records[n], uint64_t(p.plan.node_count[n]) * p.record_bytes, Use::kInput, false);
    add("rail_records", p.plan.rail_record(n, 0, p.record_bytes), uint64_t(p.plan.rail_count[n]) * p.record_bytes,
        Use::kInput, false);
  }
  const uint64_t rows = p.plan.numbers->recv_rows;
  add("row_records", p.plan.row_records, rows * p.record_bytes, Use::kInput, false);
  add("row_weights", p.plan.row_weights, rows * p.plan.weight_stride * 4, Use::kInput, true);
  launch(
      "combine", s.num_blocks, kCombineWarps<SimArch>, p.smem_bytes, {},
      [&](SimArch& a, SimTransport& net, std::byte* smem) { combine_kernel<SimArch, SimTransport>(a, net, p, smem); });
  end_operation();
}

void SimExecutor::end_latency() {
  m_.memory().drop_rank(rank_);
}

void SimExecutor::latency_dispatch(LatencyDispatchParams& p, const LaunchSettings& s) {
  plan_latency_dispatch<SimArch>(p, smem_budget_, s.num_blocks, latency_warps);
  const uint64_t tokens = p.plan.num_tokens;
  if (!m_.timed()) {
    const uint64_t rows = p.routes ? first_row.back() : p.plan.numbers->recv_rows,
                   out_rows = p.permute ? p.out_rows : rows;
    add("x", p.x, tokens * p.message.row_bytes, Use::kInput, true);
    add("scales", p.scales, tokens * p.message.scale_bytes, Use::kInput, true);
    add("weights", p.weights, tokens * p.plan.weight_stride * 4, Use::kInput, true);
    add("out_x", p.out_x, out_rows * p.message.row_bytes, Use::kOutput, true);
    add("out_scales", p.out_scales, out_rows * p.message.scale_bytes, Use::kOutput, true);
    add("out_weights", p.out_weights, out_rows * (p.permute ? 1 : p.num_node_experts) * 4, Use::kOutput, true);
    const Use learned = p.plan.fresh ? Use::kMetadata : Use::kInput;
    add("row_records", p.plan.row_records, rows * p.message.record_bytes, learned, false);
    add("row_weights", p.plan.row_weights, rows * p.plan.weight_stride * 4, learned, true);
    add("rail_records", p.world.num_nodes > 1 ? p.plan.rail_records : nullptr,
        uint64_t(p.world.num_nodes) * p.plan.rail_record_stride, learned, false);
    if (p.routes)
      add("latency_counts", p.route.counts, 2 * p.route.layout.num_ranks * p.route.layout.vector_bytes(),
          Use::kMetadata, false);
  }
  const sim::CostModel& costs = m_.config().costs;
  const sim::Ps routing = p.routes ? tokens * costs.route_token_ps : 0;
  placing_ = p.routes ? tokens * costs.place_token_ps : 0;
  launch("latency_dispatch", s.num_blocks, latency_warps, p.smem_bytes, p.message,
         [&](SimArch& a, SimTransport& net, std::byte* smem) {
           if (m_.timed()) m_.spend(*sim::Machine::running(), routing);
           latency_dispatch_kernel<SimArch>(a, net, p, smem);
         });
  end_latency();
}

void SimExecutor::latency_combine(LatencyCombineParams& p, const LaunchSettings& s) {
  const uint64_t smem_bytes = plan_latency_combine<SimArch>(p), tokens = p.plan.num_tokens;
  if (!m_.timed()) {
    const uint64_t weights = combine_rows * (p.permuted ? 1 : p.num_node_experts) * 4;
    add("x", p.x, combine_rows * p.hidden * dtype_bytes(p.dtype), Use::kInput, true);
    add("x_weights", p.x_weights, weights, Use::kInput, true);
    add("out_x", p.out_x, tokens * p.hidden * dtype_bytes(p.dtype), Use::kOutput, true);
    add("out_weights", p.out_weights, tokens * p.plan.weight_stride * 4, Use::kOutput, true);
  }
  launch("latency_combine", s.num_blocks, latency_warps, smem_bytes, {},
         [&](SimArch& a, SimTransport& net, std::byte* smem) { latency_combine_kernel<SimArch>(a, net, p, smem); });
  end_latency();
}

}  // namespace hep
