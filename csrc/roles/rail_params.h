// What the kernels that take clones over rails are told. An expert with copies on another node than its owner's goes
// there once, in as many stripes as a node has ranks: stripe j along the rail of local rank j. The channels
// (layout/spare_channels.h) of an owner and a node have the owner's experts that the node holds, in the owner's order,
// each matrix by matrix, in chunks.
#pragma once
#include "layout/spare_channels.h"
#include "roles/spare_params.h"

namespace hep {

struct SpareRailParams {
  SpareParams node;  // of this rank's node, but for the plan and the columns, which are the group's
  World world;       // the group
  SpareChannels channels;
  int64_t flags, rings;  // regions, from a rank's receive rows
  uint64_t recv_at;      // of these, in a segment
  uint64_t* chunks;      // [directions][places][channels]: in the life of the buffer, as each place counts them
  // Zero between kernels: warps of the grid that have left [places]; chunks of an expert that this rank has stored in
  // its node's slots, by the first that holds it [node's slots].
  uint64_t *leaving, *stored;
  SpareBlocks blocks;  // behind those of the node's
  // Set for a push: bytes of a stage, and a warp's stages.
  uint32_t stage_bytes;
  FifoLayout fifo;
  uint64_t fifo_stride;

  int num_blocks() const { return int(blocks.first + blocks.number); }  // of the launch
  HEP_DEVICE int slots_of_node() const { return world.num_local_ranks * int(node.spare_slots); }
  HEP_DEVICE int num_slots() const { return world.num_nodes * slots_of_node(); }
  HEP_DEVICE int node_of_slot(int slot) const { return slot / slots_of_node(); }
  HEP_DEVICE int local_of_slot(int slot) const { return slot / int(node.spare_slots) % world.num_local_ranks; }
  HEP_DEVICE int owner_of(int column) const { return column / node.width(); }
  // With node `other` and local rank `local`.
  HEP_DEVICE uint32_t channel(int other, int local) const { return channels.channel(world.node(), other, local); }
  // As its other end along the rail, on node `other`, counts it.
  HEP_DEVICE uint32_t channel_there(int other, int local) const { return channels.channel(other, world.node(), local); }
  HEP_DEVICE uint64_t* count(SpareChannels::Direction d, SpareChannels::Place place, uint32_t channel) const {
    return chunks + channels.counter(d, place, channel);
  }
  // A flag of a local rank, and the same as the rail takes it.
  HEP_DEVICE uint64_t* flag(int local, uint32_t number) const { return node.flag(local, flags, int(number)); }
  HEP_DEVICE uint64_t* own_flag(uint32_t number) const { return flag(world.local_rank(), number); }
  HEP_DEVICE uint64_t flag_there(uint32_t number) const {
    return recv_at + uint64_t(flags) + uint64_t(number) * BufferLayout::kFlagStride;
  }
  HEP_DEVICE unsigned char* ring(int local, SpareChannels::Direction d, SpareChannels::Ring r, uint32_t channel,
                                 uint64_t q) const {
    return node.at(local, rings) + channels.slot(d, r, channel, q);
  }
  HEP_DEVICE uint64_t ring_there(SpareChannels::Direction d, uint32_t channel, uint64_t q) const {
    return recv_at + uint64_t(rings) + channels.slot(d, SpareChannels::kBehind, channel, q);
  }
};

// The node and the local rank that a channel of this rank is with.
struct ChannelPeer {
  int node, local;
  HEP_DEVICE static ChannelPeer of(const SpareRailParams& p, uint32_t channel) {
    const int before = int(channel) / p.world.num_local_ranks;
    return {before < p.world.node() ? before : before + 1, int(channel) % p.world.num_local_ranks};
  }
};

}  // namespace hep
