// Clones for one micro-batch: what a planner is told, and the memory of the block that plans. Nothing here depends on
// the counts, so that all of it is known when a buffer is made.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#include "common/macros.h"
#include "common/world.h"

namespace hep {

enum class CloneStrategy : uint8_t { kBest, kAlias, kBestFit };

// What does not change between micro-batches. Fractions are in parts per million.
struct CloneShape {
  int num_ranks = 1, num_experts = 1, spare_slots = 1, num_nodes = 1;
  bool within_node = false;         // clones only on ranks of the owner's node
  bool near = false;                // on others where those do not level the ranks, and then on few
  int64_t epsilon_ppm = 10'000;     // a rank may end this far above the mean
  int64_t skip_below_ppm = 30'000;  // imbalance under which nothing is cloned
  int64_t min_chunk = 1;            // tokens, the least worth a clone
  int64_t instance_cost = 0;        // fixed cost of an expert with tokens, in tokens
  int64_t tile = 1;                 // tokens to which the expert's GEMM is padded
  int64_t fan_out = 0;              // most clones one rank pushes; 0: no limit
  int search_nodes = 1000;          // most work of the search where constructions miss the target; 0: no search
  CloneStrategy strategy = CloneStrategy::kBest;

  // Ranks that may hold each other's clones are neighbours: so many of them.
  HEP_HOST_DEVICE int domain() const { return within_node ? ranks_per_node() : num_ranks; }
  HEP_HOST_DEVICE int ranks_per_node() const { return num_ranks / num_nodes; }
  HEP_HOST_DEVICE bool prefers_near() const {
    return near && num_nodes > 1 && !within_node && strategy == CloneStrategy::kBest;
  }
  // With nothing to spare an exact plan needs at most R - 1 clones (a tree over the ranks).
  HEP_HOST_DEVICE int most_copies() const { return epsilon_ppm == 0 ? num_ranks - 1 : num_ranks * spare_slots; }
  HEP_HOST_DEVICE bool searchable() const {
    return search_nodes && strategy == CloneStrategy::kBest && spare_slots == 1 && tile == 1 && min_chunk == 1 &&
           !instance_cost && !fan_out && !within_node;
  }
};

// Where things lie in the memory of a block, in bytes. int64 first, then int32: all are aligned.
struct CloneLayout {
  static constexpr uint32_t kAims = 5;          // constructions that may be made side by side
  static constexpr uint32_t kScratch = 2 * 16;  // bytes of a lane: what a warp finds together, of two rounds

  // Of all constructions: tokens of an expert [E], its owner [E], experts by owner [E] and where those of a rank begin
  // [R + 1]; cost of a rank [R], its largest expert [R].
  uint32_t total_at = 0, load_at = 0, hot_at = 0, owner_at = 0, by_owner_at = 0, first_at = 0;
  // Of one construction, behind its begin: cost of a rank, its keys as giver and as receiver, its largest expert [R];
  // tokens left of an expert [E]; tokens [R][S] and experts [R][S] of clones; slots used, clones pushed [R].
  uint32_t drafts_at = 0, draft_bytes = 0, draft_load = 0, draft_giver = 0, draft_receiver = 0, draft_hot = 0,
           draft_left = 0, draft_tokens = 0, draft_experts = 0, draft_used = 0, draft_pushed = 0;
  // Of the search: what a rank lacks, what its clone has [R], tokens left of an expert [E], expert cloned on a rank
  // [R]; of a choice under way its rank, the expert to try next, and flows before it [R]; how many choices.
  uint32_t search_at = 0, search_moved = 0, search_left = 0, search_clone = 0, search_rank = 0, search_next = 0,
           search_mark = 0, search_depth = 0;
  uint32_t outcomes_at = 0, scratch_at = 0;
  uint32_t num_drafts = 0, aims_at_once = 0, bytes = 0;
  uint64_t flow_bytes = 0;  // of the search's flows, in the memory of the rank

  static CloneLayout make(const CloneShape& s, int warps, int lanes) {
    const uint32_t R = uint32_t(s.num_ranks), E = uint32_t(s.num_experts), RS = R * uint32_t(s.spare_slots);
    CloneLayout m;
    uint32_t at = 0;
    const auto take = [&at](uint32_t n, uint32_t size) { return std::exchange(at, at + n * size); };
    m.total_at = take(E, 8), m.load_at = take(R, 8), m.hot_at = take(R, 8);
    m.owner_at = take(E, 4), m.by_owner_at = take(E, 4), m.first_at = take(R + 1, 4);
    m.aims_at_once = std::clamp(uint32_t(warps), 1u, kAims);
    m.num_drafts = 2 + 1 + m.aims_at_once;  // two strategies, the best of the third, and those that try to be
    at = 0;
    m.draft_load = take(R, 8), m.draft_giver = take(R, 8), m.draft_receiver = take(R, 8), m.draft_hot = take(R, 8);
    m.draft_left = take(E, 8), m.draft_tokens = take(RS, 8), m.draft_experts = take(RS, 4);
    m.draft_used = take(R, 4), m.draft_pushed = take(R, 4);
    m.draft_bytes = uint32_t(align_up(at, 16));
    m.drafts_at = uint32_t(align_up(m.first_at + 4 * (R + 1), 16));
    m.search_at = m.drafts_at + m.num_drafts * m.draft_bytes;
    at = 0;
    if (s.searchable()) {
      take(R, 8), m.search_moved = take(R, 8), m.search_left = take(E, 8);
      m.search_clone = take(R, 4), m.search_rank = take(R, 4), m.search_next = take(R, 4);
      m.search_mark = take(R, 4), m.search_depth = take(1, 4);
      // A choice lets what a rank lacks flow over each rank once, and there are at most as many choices as ranks.
      m.flow_bytes = 16ull * R * std::min(R, uint32_t(s.search_nodes));
    }
    m.outcomes_at = uint32_t(align_up(m.search_at + at, 16));
    m.scratch_at = m.outcomes_at + 16 * m.num_drafts;
    m.bytes = m.scratch_at + (lanes > 1 ? uint32_t(warps * lanes) * kScratch : 0);
    return m;
  }
};

}  // namespace hep
