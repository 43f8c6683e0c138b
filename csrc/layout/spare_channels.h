// Registered memory of the channels that take weights of clones to other nodes, and their gradients back.
//
// A channel goes from an expert's owner to another node by way of one rail: the owner, the rank of its node that has
// that rail, and the rank of the other node that has it. Weights go that way, gradients against it. Either way it is a
// sequence of chunks, each of which has a slot in a ring at both ends of the rail, and as many as a ring has slots may
// be on their way. A rank has as many channels of each kind as there are pairs of another node and a local rank, and a
// ring and flags for each, whatever it is in the channel.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/macros.h"
#include "layout/spare_shape.h"

namespace hep {

struct SpareChannels {
  // Flags of a channel and direction, each of every slot: a chunk came along the rail, its other end is done with it;
  // one came within the node, the other end there is done with it. A slot has words of its own because several warps
  // serve a channel, and a rail orders no two signals: none is sent to a word before the one before has been seen.
  enum Flag : uint32_t { kRailFull, kRailFree, kNodeFull, kNodeFree, kFlags };
  enum Direction : uint32_t { kWeights, kGradients, kDirections };
  // Of a rank in a channel, as the chunks go: the middle is the rail's end at the owner's node, in both directions.
  enum Place : uint32_t { kFirst, kMiddle, kLast, kPlaces };
  // Rings of a direction: in front of the rail, where the bytes are put from, and behind it.
  enum Ring : uint32_t { kBefore, kBehind };

  uint32_t num_nodes = 1, num_local_ranks = 1, spare_slots = 0, chunk_bytes = 0;
  uint32_t slots = 1;  // of a ring, a power of two: chunks of a channel that are on their way

  static SpareChannels make(const SpareShape& s, uint32_t nodes, uint32_t local_ranks) {
    const uint32_t spares = nodes > 1 && s.rail_chunk_bytes ? s.spare_slots : 0;
    const uint32_t slots = s.rail_slots ? s.rail_slots : spares ? slots_for((nodes - 1) * local_ranks) : 1;
    return {nodes, local_ranks, spares, s.rail_chunk_bytes, slots};
  }
  // Rings of 64 to 128 MiB, with chunks of 32 KiB and 8 to 256 channels, of which a hot expert may have all.
  static uint32_t slots_for(uint32_t channels) { return std::bit_floor(std::clamp(1024 / channels, 4u, 64u)); }
  HEP_HOST_DEVICE uint32_t number() const { return spare_slots ? (num_nodes - 1) * num_local_ranks : 0; }
  // Of a rank on node `own`: that with node `other` and local rank `local`.
  HEP_HOST_DEVICE uint32_t channel(int own, int other, int local) const {
    return uint32_t(other < own ? other : other - 1) * num_local_ranks + uint32_t(local);
  }
  HEP_HOST_DEVICE uint32_t place(uint64_t q) const { return uint32_t(q) & (slots - 1); }  // of chunk q, in a ring
  HEP_HOST_DEVICE uint32_t flag(Direction d, uint32_t channel, Flag flag, uint64_t q) const {
    return ((uint32_t(d) * number() + channel) * kFlags + flag) * slots + place(q);
  }
  // Of a slot of this rank, by the local rank that stores its stripe: stored. And of local ranks: gradients read.
  HEP_HOST_DEVICE uint32_t stored(uint32_t slot, int local) const {
    return kDirections * number() * kFlags * slots + slot * num_local_ranks + uint32_t(local);
  }
  HEP_HOST_DEVICE uint32_t read(int local) const { return stored(spare_slots, local); }
  HEP_HOST_DEVICE uint64_t flags() const { return number() ? read(int(num_local_ranks)) : 0; }
  // Counts of chunks that a rank keeps: of each direction, by its place in the channel.
  HEP_HOST_DEVICE uint32_t counter(Direction d, Place place, uint32_t channel) const {
    return (uint32_t(d) * kPlaces + place) * number() + channel;
  }
  HEP_HOST_DEVICE uint32_t counters() const { return counter(kDirections, kFirst, 0); }
  // Where chunk q lies in a channel's ring.
  HEP_HOST_DEVICE uint64_t slot(Direction d, Ring ring, uint32_t channel, uint64_t q) const {
    return ((uint64_t(2 * uint32_t(d) + ring) * number() + channel) * slots + place(q)) * chunk_bytes;
  }
  HEP_HOST_DEVICE uint64_t ring_bytes() const { return 4 * uint64_t(number()) * slots * chunk_bytes; }
};

}  // namespace hep
