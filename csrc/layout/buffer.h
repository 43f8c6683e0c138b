// The registered buffer of one rank: which region lies where. Every rank has the same layout, so an offset
// means the same thing everywhere. Sizes are computed here once, for C++ and Python alike.
#pragma once
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout/clone_shape.h"
#include "layout/counts.h"
#include "layout/latency.h"
#include "layout/message.h"
#include "layout/spare_channels.h"
#include "layout/spare_shape.h"

namespace hep {

struct BufferShape {
  uint32_t num_nodes = 1, num_local_ranks = 1, num_experts = 1;
  uint64_t max_tokens = 1;          // of a rank; what recv_rows was chosen for
  uint32_t max_topk = 1;            // pairs of a token
  uint32_t row_bytes = 16;          // payload of a token
  uint32_t scale_bytes = 0;         // quantisation scales of a token
  uint32_t partial_row_bytes = 16;  // payload of a combine partial
  uint64_t recv_rows = 1;           // rows of the receive region
  uint32_t chunk_tokens = 16;       // tokens moved per rail flow-control step
  uint32_t rail_slots = 16;         // chunks in flight per rail peer and direction; rail_slots_of() says how many pay
  uint64_t arena_bytes = 0;         // for results, where rows land without a copy; 0 = none
  bool arena_apart = false;         // in memory of its own, which ranks of the node alone map
  uint64_t latency_tokens = 0;      // of a rank, that the slabs of the latency path hold; 0 = no slabs
  // Clones that its ranks plan together; its experts are logical ones. Without spare slots: none.
  CloneShape clones{.spare_slots = 0};
  SpareShape spares;  // registered slots for their weights and gradients; without spare slots: none

  // Chunks that keep a rail busy. A block waits for the oldest chunk of its peer, so what counts is all that a rank has
  // in flight: with one peer 64 of them, as with the three of four nodes 32 each. More peers have enough with 16.
  static constexpr uint32_t rail_slots_of(uint32_t num_nodes) { return num_nodes <= 2 ? 64 : num_nodes <= 4 ? 32 : 16; }
  bool plans_clones() const { return clones.spare_slots > 0; }
  void validate() const {
    auto need = [](bool ok, const char* what) {
      if (!ok) throw std::invalid_argument(std::string("BufferShape: ") + what);
    };
    need(num_nodes >= 1 && num_local_ranks >= 1, "num_nodes and num_local_ranks must be at least 1");
    need(num_experts >= 1 && num_experts % (num_nodes * num_local_ranks) == 0,
         "num_experts must be a positive multiple of the number of ranks");
    need(row_bytes >= 16 && partial_row_bytes >= 16, "row_bytes and partial_row_bytes must be at least 16");
    need(row_bytes % 16 == 0 && scale_bytes % 16 == 0 && partial_row_bytes % 16 == 0,
         "row_bytes, scale_bytes and partial_row_bytes must be multiples of 16");
    need(chunk_tokens >= 1 && rail_slots >= 1, "chunk_tokens and rail_slots must be at least 1");
    need(max_topk >= 1 && max_topk <= 65535, "max_topk must lie in 1..65535");
    need(latency_tokens <= 0x7fffffff, "latency_tokens must be below 2^31");
    if (spares.spare_slots > 0) validate_spares();
    if (!plans_clones()) return;
    need(clones.num_ranks == int(num_nodes * num_local_ranks) && clones.num_nodes == int(num_nodes),
         "clones must be of the buffer's ranks and nodes");
    need(clones.num_experts % clones.num_ranks == 0, "clones: experts must be a multiple of the number of ranks");
  }

 private:
  void validate_spares() const {
    auto need = [](bool ok, const char* what) {
      if (!ok) throw std::invalid_argument(std::string("BufferShape: spares: ") + what);
    };
    need(spares.rail_chunk_bytes % 16 == 0, "rail_chunk_bytes must be a multiple of 16");
    need(spares.rail_slots == 0 || std::has_single_bit(spares.rail_slots), "rail_slots must be a power of two");
    need(spares.num_owners >= 1, "num_owners must be at least 1");
    need(spares.element_bytes == 2 || spares.element_bytes == 4, "element_bytes must be 2 or 4");
    need(spares.num_matrices >= 1 && spares.num_matrices <= SpareShape::kMostMatrices,
         "an expert must have 1 to 16 matrices");
    for (uint32_t m = 0; m < spares.num_matrices; ++m)
      need(spares.elements[m] > 0 && spares.elements[m] % (16 / spares.element_bytes) == 0,
           "a matrix must be a positive multiple of 16 bytes");
    for (uint32_t m = 0; m < spares.num_matrices; ++m)
      need(spares.elements[m] >> 32 == 0, "a matrix must have fewer than 2^32 elements");
  }
};

struct Region {
  const char* name;
  uint64_t offset, bytes;
};

// Offsets from the start of a rank's segment. A flag has a cache line of its own: one writer, one reader. Flags of
// groups of rows, which are many, have a word.
struct BufferLayout {
  static constexpr uint64_t kFlagStride = 64;
  static constexpr uint64_t kLine = 128;      // of a GPU's memory: a row that begins elsewhere touches one line more
  static constexpr uint32_t kGroupRows = 16;  // receive rows that share a counter of what landed, and partials' flags

  CountsLayout counts, clone_counts;
  uint32_t num_nodes, num_local_ranks, num_ranks, rail_slots, chunk_tokens;
  uint64_t token_stride;  // largest message or partial row that this shape admits
  uint64_t slot_bytes;    // one ring slot: a chunk of those
  uint64_t ready, done, counts_rail, counts_node, clones_rail, clones_node, rail_full, rail_free;  // flag arrays
  uint64_t spare_free, spare_full, gradients_ready, gradients_summed, gradients_taken;             // likewise
  LatencySlabs slabs;
  LatencyRail latency_rail;
  uint64_t latency_signals, latency_send, latency_recv;
  uint64_t counts_at, clone_counts_at, landed, partials, latency, rail_send, rail_recv, recv, arena;  // data regions
  uint64_t spare_weights, spare_gradients, gradient_bytes;
  SpareChannels channels;
  uint64_t channel_flags, channel_rings;
  uint64_t groups, recv_bytes, arena_bytes;
  uint64_t segment_bytes, total;  // of a rank's segment, and with an arena apart
  std::vector<Region> regions;

  explicit BufferLayout(const BufferShape& s) {
    s.validate();
    num_nodes = s.num_nodes;
    num_local_ranks = s.num_local_ranks;
    num_ranks = num_nodes * num_local_ranks;
    rail_slots = s.rail_slots;
    chunk_tokens = s.chunk_tokens;
    counts = CountsLayout{num_ranks, num_nodes, s.num_experts};
    clone_counts = CountsLayout{0, 0, s.plans_clones() ? uint32_t(s.clones.num_experts) : 0};
    World w{int32_t(num_nodes), int32_t(num_local_ranks), 0};
    uint64_t message = MessageLayout::make(w, s.max_topk, true, s.scale_bytes, s.row_bytes).token_bytes();
    uint64_t partial = uint64_t(s.partial_row_bytes) + MessageLayout::weight_section_bytes(s.max_topk);
    token_stride = message > partial ? message : partial;
    slot_bytes = align_up(token_stride * chunk_tokens, 128);
    const uint64_t ring = uint64_t(num_nodes - 1) * rail_slots;
    recv_bytes = align_up(token_stride * s.recv_rows, kLine) + 2 * kLine;  // rows and scales begin at lines
    total = 0;
    ready = add("ready_flags", num_local_ranks * kFlagStride);
    done = add("done_flags", num_local_ranks * kFlagStride);
    counts_rail = add("counts_rail_flags", 2 * num_nodes * kFlagStride);  // of each parity of the vectors
    counts_node = add("counts_node_flags", num_ranks * kFlagStride);
    const uint64_t planned = s.plans_clones();
    clones_rail = add("clone_counts_rail_flags", planned * 2 * num_nodes * kFlagStride);
    clones_node = add("clone_counts_node_flags", planned * num_ranks * kFlagStride);
    rail_full = add("rail_full_flags", ring * kFlagStride);
    rail_free = add("rail_free_flags", ring * kFlagStride);
    const uint64_t spare = s.spares.spare_slots, sharing = spare ? num_local_ranks : 0;
    spare_free = add("spare_free_flags", sharing * kFlagStride);
    const uint64_t parts = spare * num_local_ranks * SpareShape::kMostPieces;
    spare_full = add("spare_full_flags", parts * kFlagStride);
    gradients_ready = add("gradients_ready_flags", sharing * kFlagStride);
    gradients_summed = add("gradients_summed_flags", parts * kFlagStride);
    gradients_taken = add("gradients_taken_flags", sharing * kFlagStride);
    channels = SpareChannels::make(s.spares, num_nodes, num_local_ranks);
    channel_flags = add("spare_channel_flags", channels.flags() * kFlagStride);
    counts_at = add("counts", 2 * num_ranks * counts.vector_bytes());  // two parities, see exchange.h
    clone_counts_at = add("clone_counts", planned * 2 * num_ranks * clone_counts.vector_bytes());
    spare_weights = add("spare_weights", spare ? s.spares.weights_at(s.spares.num_matrices) : 0);
    gradient_bytes = spare ? s.spares.gradients_at(s.spares.num_matrices) : 0;
    spare_gradients = add("spare_gradients", gradient_bytes);
    channel_rings = add("spare_channel_rings", channels.ring_bytes());
    groups = div_up(s.recv_rows, kGroupRows);
    landed = add("landed_counters", 8 * groups);
    partials = add("partial_flags", 2 * 8 * groups * num_local_ranks);
    slabs = LatencySlabs::make(counts, s.latency_tokens, token_stride);
    latency = add("latency_slabs", slabs.bytes());
    latency_rail = LatencyRail::make(counts, s.latency_tokens, token_stride);
    latency_signals = add("latency_rail_signals", latency_rail.signal_bytes());
    latency_send = add("latency_rail_send", latency_rail.bytes());
    latency_recv = add("latency_rail_receive", latency_rail.bytes());
    rail_send = add("rail_send_ring", ring * slot_bytes);
    rail_recv = add("rail_receive_ring", ring * slot_bytes);
    recv = add("receive_rows", recv_bytes);
    arena_bytes = align_up(s.arena_bytes, 4096);
    arena = add("arena", arena_bytes);  // the last, so that offsets go on from the segment's end where it is apart
    total = align_up(total, 4096);
    segment_bytes = s.arena_apart ? align_up(arena, 4096) : total;
  }

  uint64_t ready_flag(int local) const { return ready + local * kFlagStride; }
  uint64_t done_flag(int local) const { return done + local * kFlagStride; }
  uint64_t counts_rail_flag(int parity, int node) const {
    return counts_rail + (uint64_t(parity) * num_nodes + node) * kFlagStride;
  }
  uint64_t counts_node_flag(int rank) const { return counts_node + rank * kFlagStride; }
  // Rings exist for the other nodes only; `node` is the peer's, `own` that of the segment's owner.
  uint64_t ring_entry(int own, int node, uint64_t slot) const {
    return uint64_t(node < own ? node : node - 1) * rail_slots + slot;
  }
  uint64_t rail_full_flag(int own, int node, uint64_t slot) const {
    return rail_full + ring_entry(own, node, slot) * kFlagStride;
  }
  uint64_t rail_free_flag(int own, int node, uint64_t slot) const {
    return rail_free + ring_entry(own, node, slot) * kFlagStride;
  }
  uint64_t rail_send_slot(int own, int node, uint64_t slot) const {
    return rail_send + ring_entry(own, node, slot) * slot_bytes;
  }
  uint64_t rail_recv_slot(int own, int node, uint64_t slot) const {
    return rail_recv + ring_entry(own, node, slot) * slot_bytes;
  }
  uint64_t counts_vector(int parity, int rank) const {
    return counts_at + (uint64_t(parity) * num_ranks + rank) * counts.vector_bytes();
  }

 private:
  uint64_t add(const char* name, uint64_t bytes) {
    uint64_t at = align_up(total, 128);
    regions.push_back({name, at, bytes});
    total = at + bytes;
    return at;
  }
};

}  // namespace hep
