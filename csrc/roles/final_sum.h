// The pulling half of combine that is for this rank's own tokens: final sums.
#pragma once
#include "pipeline/chunk_sweep.h"
#include "roles/node_rows.h"

namespace hep {

// Own node's partials and the other nodes' sums -> the caller's rows.
template <Arch A, Transport<A> Net>
struct FinalSumRole {
  static constexpr bool kMayLook = A::kMayLookTogether && !kRailIsNic<Net> && !TileMath<A>::kReadsRows;

  A& a;
  Net& net;
  const CombineParams& p;
  SumFeed<A>& feed;
  NodeRows<A, !kRailIsNic<Net>, kMayLook> rows;

  HEP_DEVICE FinalSumRole(A& arch, Net& n, const CombineParams& params, SumFeed<A>& to, std::byte* smem)
      : a(arch), net(n), p(params), feed(to), rows(arch, params, smem, to.index) {}

  // By all lanes of a warp, of which `elected` does the work, of `workers` in the grid. False: a lane has left in its
  // wait.
  HEP_DEVICE bool run(bool elected, uint32_t worker, uint32_t workers) {
    a.set_role(Role::kFinalSumG2s);
    if (!rows.begin(worker == 0)) return false;
    if (kMayLook && rows.look_together())
      sum_together(elected, worker, workers);
    else if (elected)
      sum_alone(worker, workers);
    return true;
  }

 private:
  using Looks = PartialLooks<A>;

  // Chunks of tokens no longer than the rails': RailTally's credits come in time because of it.
  HEP_DEVICE ChunkCut cut(uint32_t workers) const {
    return ChunkCut::tapered(p.plan.num_tokens, p.rail.geometry.chunk_tokens, workers);
  }
  HEP_DEVICE void sum_alone(uint32_t worker, uint32_t workers) {
    const ChunkCut chunks = cut(workers);
    for (uint32_t chunk = worker;; chunk = next_chunk(a, p.taken.to_node, workers)) {
      const auto [begin, n] = chunks.chunk(chunk);
      if (!n) break;
      sum(begin, n, open(begin, n, false), true);
    }
    rows.report();
  }
  // As many tokens of a chunk at a time as lanes look at together.
  HEP_DEVICE void sum_together(bool elected, uint32_t worker, uint32_t workers) {
    if constexpr (kMayLook) {
      const ChunkCut chunks = cut(workers);
      ChunkTokens left = chunks.chunk(worker);
      for (;;) {
        const uint32_t begin = left.begin, n = left.number < Looks::kMost ? left.number : Looks::kMost;
        const int32_t first = elected ? open(begin, n, true) : 0;
        if (!rows.looks().look()) break;
        if (!elected) continue;
        left = {begin + n, left.number - n};
        sum(begin, n, first, left.number == 0);
        if (left.number == 0) left = chunks.chunk(next_chunk(a, p.taken.to_node, workers));
      }
      if (elected) rows.report();
    }
  }
  // Of n tokens, whose records of this node follow each other: the first record, -1: none is of them. n is 0: the last.
  HEP_DEVICE int32_t open(uint32_t begin, uint32_t n, bool looked) {
    const int node = p.world.node();
    const int32_t* const pos = p.plan.node_pos + uint64_t(begin) * p.world.num_nodes + node;
    int32_t first = -1;
    uint32_t end = n;
    while (end > 0 && pos[(end - 1) * p.world.num_nodes] < 0) --end;
    for (uint32_t i = 0; i < end && first < 0; ++i) first = pos[i * p.world.num_nodes];
    if (end)
      rows.records.open(p.plan.records[node] + uint64_t(first) * p.record_bytes,
                        uint32_t(pos[(end - 1) * p.world.num_nodes] - first) + 1);
    if (looked) rows.looks().say(rows.records, end != 0, n == 0);
    return first;
  }
  HEP_DEVICE void sum(uint32_t begin, uint32_t n, int32_t first, bool ends_chunk) {
    const int32_t* const pos = p.plan.node_pos + uint64_t(begin) * p.world.num_nodes + p.world.node();
    int32_t own = pos[0];
    for (uint32_t i = 0; i < n; ++i) {
      const int32_t mine = own;
      if (i + 1 < n) own = pos[(i + 1) * p.world.num_nodes];  // on its way while this one is summed
      token(begin + i, mine < 0 ? mine : mine - first, i + 1 == n && ends_chunk);
    }
  }
  // own: which of the open records is the token's, -1: none.
  HEP_DEVICE void token(uint32_t t, int32_t own, bool last_of_chunk) {
    const int32_t* pos = p.plan.node_pos + uint64_t(t) * p.world.num_nodes;
    feed.begin();
    if (own >= 0) rows.add_to(feed, uint32_t(own));
    for (uint32_t i = 0; i < p.rail.num_peers; ++i)
      if (const int32_t j = pos[p.rail.peers[i].node]; j >= 0) add_sum_of(i, uint32_t(j));
    unsigned char* weights = nullptr;
    if (p.out_weights) weights = reinterpret_cast<unsigned char*>(p.out_weights + uint64_t(t) * p.plan.weight_stride);
    feed.emit_partial(p.out_x + uint64_t(t) * feed.payload_row_bytes(), weights, p.dtype,
                      {.flags = last_of_chunk ? SumHead::kSettle : 0u});
    a.did(LoopStep::kSumToken);
  }
  // Of the j-th token of ours that the peer's node needed, when it is there.
  HEP_DEVICE void add_sum_of(uint32_t i, uint32_t j) {
    const RailGeometry& g = p.rail.geometry;
    const RailPeer& peer = p.rail.peers[i];
    const uint32_t chunk = j / g.chunk_tokens,
                   n = ChunkCut{p.plan.node_count[peer.node], g.chunk_tokens}.chunk(chunk).number;
    RailReceiver::wait(a, net, g, peer, chunk);
    const unsigned char* row =
        RailReceiver::slot(g, peer, chunk) + uint64_t(j % g.chunk_tokens) * p.partial.row_bytes();
    feed.add({row, row + p.partial.weights_at(), 1.f, uint16_t(i), 0, chunk, n * feed.partial_tiles()});
  }
};

}  // namespace hep
