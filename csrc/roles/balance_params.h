// What the balance kernel is told: this rank's routing over logical experts, and where the same over physical slots is
// to lie, and the plan of the clones.
#pragma once
#include "layout/clone_shape.h"
#include "roles/clone_params.h"
#include "roles/exchange_params.h"

namespace hep {

struct CloneFlow;
struct ClonePlan;

// Words of the header of a vector of clone counts.
inline constexpr int kCloneHeaderOwners = 0;  // a digest of the columns, which ranks must have alike

struct BalanceParams {
  // Where the vectors of ranks of the node lie: so many bytes from those of their exchanges.
  template <class T>
  struct OfPeers {
    T* const* exchange;
    int64_t bytes;
    HEP_DEVICE T* operator[](int local) const {
      return reinterpret_cast<T*>(reinterpret_cast<uint64_t>(exchange[local]) + uint64_t(bytes));
    }
  };

  World world;
  CountsLayout layout;  // tokens by logical expert alone
  RankProgress* progress;
  CloneShape shape;
  CloneColumns columns;
  uint32_t owners_digest;  // of the columns
  // Routing: exactly one of topk_idx [T, topk] (-1 = dropped) and routing_map [T, E], over logical experts.
  const int64_t* topk_idx;
  const unsigned char* routing_map;
  uint32_t num_tokens, topk;
  // Results: the same over physical slots, [T, topk] or [T, R * width], and for a map the column of every pair [T, E],
  // which may be null.
  int64_t* out_idx;
  unsigned char* out_map;
  int64_t* out_columns;
  // The plan: expert [R][S] of each spare slot, -1 for none, the tokens that it takes, this rank's share of them, what
  // came of it, and the counts [R][E]. replayed: it is there already, and no other rank is asked.
  int32_t* slot_expert;
  int64_t* slot_tokens;
  CloneShare share;
  ClonePlan* plan;
  int64_t* counted;
  bool replayed;
  // Of the rank's blocks: counts [blocks][E]; CloneLayout::flow_bytes for the search.
  uint32_t* block_counts;
  CloneFlow* log;
  // Set for a launch by plan_balance: warps of a block that count, tokens of each, and where the tables of a plan lie
  // in shared memory, behind the counters.
  uint32_t walkers, run_tokens, tables_at;
  CloneLayout tables;
  // Registered memory, as in ExchangeParams.
  unsigned char* counts;
  OfPeers<unsigned char> peer_counts;
  uint64_t counts_offset;
  uint64_t *rail_flags, *node_flags;
  OfPeers<uint64_t> peer_node_flags;
  uint64_t rail_flag_offset;
  TrafficCounters* traffic;
  uint64_t* waited;  // [R] nanoseconds that exchanges of counts waited for each rank, as count_rank sums

  HEP_DEVICE uint64_t sequence() const { return progress->plans + 1; }
  HEP_DEVICE uint64_t parity_bytes() const { return bytes_of(sequence()); }
  // Vectors of this plan as this rank sees them.
  HEP_DEVICE CountsView gathered() const {
    return {layout, counts + bytes_of(sequence() - injected(Bug::kCloneCountsOneStepOld))};
  }
  HEP_DEVICE uint64_t parity_flag_bytes() const {
    return (sequence() & 1) * uint64_t(world.num_nodes) * BufferLayout::kFlagStride;
  }
  HEP_HOST_DEVICE uint32_t num_columns() const { return uint32_t(shape.num_ranks * columns.width()); }

 private:
  HEP_DEVICE uint64_t bytes_of(uint64_t sequence) const {
    return (sequence & 1) * uint64_t(world.num_ranks()) * layout.vector_bytes();
  }
};

}  // namespace hep
