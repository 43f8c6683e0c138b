// Spare slots: what the kernels that fill them, and bring gradients home, are told.
#include <algorithm>
#include <string>

#include "runtime/engine_call.h"

namespace hep {

void Engine::make_spare_state() {
  if (!shape_.spares.spare_slots) return;
  const uint64_t slots = uint64_t(world_.num_local_ranks + 1) * shape_.spares.spare_slots;
  const uint64_t parts = align_up(sizeof(SpareProgress), 64) + 8 * slots * SpareShape::kMostPieces;
  spare_state_ = executor_->allocate(parts + 8 * (layout_.channels.counters() + SpareChannels::kPlaces + slots));
  channel_chunks_ = reinterpret_cast<uint64_t*>(static_cast<unsigned char*>(spare_state_.get()) + parts);
}

SpareParams Engine::spare_params(const SpareCall& c) const {
  const SpareShape& s = shape_.spares;
  if (!s.spare_slots)
    throw std::invalid_argument("spares: this buffer was made without spare slots for weights; give spare_slots");
  const bool nodes = layout_.channels.number() > 0;
  require_blocks("num_blocks", c.num_blocks);
  const int num_blocks = nodes ? std::max(2, c.num_blocks) : c.num_blocks;
  if (c.chunk_bytes % 16)
    throw std::invalid_argument("chunk_bytes: is " + std::to_string(c.chunk_bytes) + "; give a multiple of 16");
  SpareParams p{};
  p.world = {1, world_.num_local_ranks, world_.local_rank()};
  p.first_rank = world_.rank_of(world_.node(), 0);
  auto* const state = static_cast<unsigned char*>(spare_state_.get());
  p.progress = reinterpret_cast<SpareProgress*>(state);
  p.stored = reinterpret_cast<uint64_t*>(state + align_up(sizeof(SpareProgress), 64));
  p.summed = p.stored + uint64_t(world_.num_local_ranks) * s.spare_slots * SpareShape::kMostPieces;
  p.spare_slots = s.spare_slots;
  p.num_owners = s.num_owners;
  p.num_matrices = s.num_matrices;
  p.num_experts = uint32_t(world_.num_ranks()) * s.num_owners;
  for (uint32_t m = 0; m < s.num_matrices; ++m)
    p.matrices[m] = {s.elements[m] * s.element_bytes, s.weights_at(m), s.elements[m], s.gradients_at(m)};
  p.chunk_bytes = c.chunk_bytes;
  p.blocks = {0, uint32_t(nodes ? std::max(1, num_blocks / 3) : num_blocks)};
  p.between_nodes = nodes;
  p.slot_expert = c.slot_expert;
  p.columns = c.columns;
  p.experts = c.experts;
  p.recv = view_.recv;
  const auto region = [this](uint64_t at) { return int64_t(at) - int64_t(layout_.recv); };
  p.weights = region(layout_.spare_weights);
  p.gradients = region(layout_.spare_gradients);
  p.free = region(layout_.spare_free);
  p.full = region(layout_.spare_full);
  p.ready = region(layout_.gradients_ready);
  p.sums = region(layout_.gradients_summed);
  p.taken = region(layout_.gradients_taken);
  return p;
}

SpareRailParams Engine::spare_rail_params(const SpareCall& c) const {
  const SpareParams node = spare_params(c);
  SpareRailParams p{};
  p.node = node;
  p.world = world_;
  p.channels = layout_.channels;
  p.flags = int64_t(layout_.channel_flags) - int64_t(layout_.recv);
  p.rings = int64_t(layout_.channel_rings) - int64_t(layout_.recv);
  p.recv_at = layout_.recv;
  p.chunks = channel_chunks_;
  p.leaving = channel_chunks_ + layout_.channels.counters();
  p.stored = p.leaving + SpareChannels::kPlaces;
  p.blocks = {node.blocks.number, uint32_t(std::max(2, c.num_blocks)) - node.blocks.number};
  return p;
}

// When slots are made, not in the first step of a training.
void Engine::require_spares(int num_blocks) const {
  SpareCall call;
  call.num_blocks = num_blocks;
  const SpareParams p = spare_params(call);
  if (p.between_nodes)
    executor_->require_shared_memory(spare_rail_params(call));
  else
    executor_->require_shared_memory(p);
}

std::shared_ptr<unsigned char> Engine::spare_memory(bool gradients) const {
  return {segments_[size_t(world_.rank)], own() + (gradients ? layout_.spare_gradients : layout_.spare_weights)};
}

uint64_t Engine::spare_bytes(bool gradients) const {
  const SpareShape& s = shape_.spares;
  return gradients ? s.gradients_at(s.num_matrices) : s.weights_at(s.num_matrices);
}

void Engine::push_weights(const SpareCall& c) {
  const SpareParams p = spare_params(c);
  Call call(*this);
  require_spares(c.num_blocks);
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks;
  call.run([&] {
    if (p.between_nodes)
      executor_->push_nodes(spare_rail_params(c), settings);
    else
      executor_->push_weights(p, settings);
  });
}

void Engine::await_weights(const SpareCall& c) {
  const SpareParams p = spare_params(c);
  Call call(*this);
  call.run([&] { executor_->await_weights(p, settings_); });
}

void Engine::collect_gradients(const SpareCall& c) {
  if (!shape_.spares.gradients)
    throw std::invalid_argument("spares: these slots were made without memory for gradients; collect from others");
  const SpareParams p = spare_params(c);
  Call call(*this);
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks;
  call.run([&] {
    if (p.between_nodes)
      executor_->collect_nodes(spare_rail_params(c), settings);
    else
      executor_->collect_gradients(p, settings);
  });
}

}  // namespace hep
