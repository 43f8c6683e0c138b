// Clones of a micro-batch: what the kernel that plans them is told, and its memory.
#include <string>

#include "runtime/engine_call.h"

namespace hep {
namespace {

// The counts of all blocks; the log of the search lies behind them.
uint64_t counts_bytes(const CloneShape& s) {
  return align_up(4 * uint64_t(kMostExchangeBlocks) * uint64_t(s.num_experts), 64);
}

}  // namespace

void Engine::make_clone_state() {
  if (!shape_.plans_clones()) return;
  clone_state_ = executor_->allocate(counts_bytes(shape_.clones) + CloneLayout::make(shape_.clones, 1, 1).flow_bytes);
}

void Engine::balance(const RoutingInput& in, const BalanceCall& c) {
  if (!shape_.plans_clones())
    throw std::invalid_argument("clones: this buffer was made without spare slots to plan for; give spare_slots");
  require_blocks("num_blocks", c.num_blocks);
  if (c.num_blocks > int(kMostExchangeBlocks))
    throw std::invalid_argument("num_blocks: is " + std::to_string(c.num_blocks) + "; give at most " +
                                std::to_string(kMostExchangeBlocks));
  if (!in.topk_idx == !in.routing_map || (in.topk_idx ? !c.out_idx : !c.out_map))
    throw std::logic_error("balance: one routing has to be given, with a place for the same over slots");
  BalanceParams p{};
  p.world = world_;
  p.layout = layout_.clone_counts;
  p.progress = progress_;
  p.shape = shape_.clones;
  p.columns = {c.columns, shape_.clones.num_experts / world_.num_ranks(), shape_.clones.spare_slots};
  p.owners_digest = c.owners_digest;
  p.topk_idx = in.topk_idx;
  p.routing_map = in.routing_map;
  p.num_tokens = in.num_tokens;
  p.topk = in.topk;
  p.out_idx = c.out_idx;
  p.out_map = c.out_map;
  p.out_columns = c.out_columns;
  p.slot_expert = c.slot_expert;
  p.slot_tokens = c.slot_tokens;
  p.share = {c.take, c.first};
  p.plan = reinterpret_cast<ClonePlan*>(c.numbers);
  p.counted = c.counts;
  p.replayed = c.replayed;
  auto* const state = static_cast<unsigned char*>(clone_state_.get());
  p.block_counts = reinterpret_cast<uint32_t*>(state);
  p.log = reinterpret_cast<CloneFlow*>(state + counts_bytes(shape_.clones));
  p.counts_offset = layout_.clone_counts_at;
  p.counts = own() + p.counts_offset;
  p.peer_counts = {view_.peer_counts, int64_t(layout_.clone_counts_at - layout_.counts_at)};
  p.rail_flags = flag(world_.rank, layout_.clones_rail);
  p.node_flags = flag(world_.rank, layout_.clones_node);
  p.peer_node_flags = {view_.peer_node_flags, int64_t(layout_.clones_node - layout_.counts_node)};
  p.rail_flag_offset = layout_.clones_rail + uint64_t(world_.node()) * BufferLayout::kFlagStride;
  p.traffic = traffic_;
  p.waited = waited_in(WaitedIn::kExchange);
  Call call(*this);
  executor_->require_shared_memory(p);
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks;
  call.run([&] { executor_->balance(p, settings); });
}

}  // namespace hep
