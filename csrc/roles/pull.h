// The pulling halves of combine: node sums for the rail peers, and the final sum for this rank's own tokens.
#pragma once
#include "pipeline/chunk_sweep.h"
#include "roles/node_rows.h"

namespace hep {

// Partials of this node's ranks -> one row per token of a rail peer, in slots of the send ring.
template <Arch A, Transport<A> Net>
struct NodeSumRole {
  A& a;
  Net& net;
  const CombineParams& p;
  SumFeed<A>& feed;
  NodeRows<A> rows;

  HEP_DEVICE NodeSumRole(A& arch, Net& n, const CombineParams& params, SumFeed<A>& to, std::byte* smem)
      : a(arch), net(n), p(params), feed(to), rows(arch, params, smem, to.index) {}

  // By all lanes of a warp (CombineBlock::feed), of which `elected` does the work. False: a lane has left in its wait.
  HEP_DEVICE bool run(bool elected, std::byte* smem) {
    a.set_role(Role::kNodeSumG2s);
    if (!rows.template begin<!kRailIsNic<Net>>()) return false;
    if (elected) sum_chunks(smem);
    return true;
  }

 private:
  HEP_DEVICE void sum_chunks(std::byte* smem) {
    auto peer = [&](uint32_t s) -> const RailPeer& { return p.rail.peer_behind(p.world.node(), s); };
    auto* cursors = reinterpret_cast<uint32_t*>(smem + p.credit_cursors_at);
    ChunkSweep<A>{a, p.taken.to_rail, p.taken.blocks, cursors, p.rail.num_peers}.run(
        Site::kRailSlotFree, [&](uint32_t s, uint32_t chunk) { return tokens_of(peer(s), chunk); },
        [&](uint32_t s, uint32_t chunk) { return RailSender::test(a, net, p.rail.geometry, peer(s), chunk); },
        [&](uint32_t s, uint32_t chunk) { sum_chunk(peer(s), chunk); }, [&](uint32_t s) { return peer(s).rank; });
    rows.report();
  }
  HEP_DEVICE ChunkTokens tokens_of(const RailPeer& peer, uint32_t chunk) const {
    return ChunkCut{p.plan.rail_count[peer.node], p.rail.geometry.chunk_tokens}.chunk(chunk);
  }
  HEP_DEVICE void sum_chunk(const RailPeer& peer, uint32_t chunk) {
    const auto [begin, n] = tokens_of(peer, chunk);
    unsigned char* row = RailSender::slot(net, p.rail.geometry, peer, chunk);
    rows.records.open(p.plan.rail_record(peer.node, begin, p.record_bytes), n);
    for (uint32_t i = 0; i < n; ++i, row += p.partial.row_bytes()) {
      feed.begin();
      rows.add_to(feed, i);
      const uint32_t flags = i + 1 == n ? SumHead::kChunkEnd : 0u;
      feed.emit_partial(row, row + p.partial.weights_at(), p.partial_dtype,
                        {.flags = flags, .peer = uint32_t(&peer - p.rail.peers), .chunk = chunk, .chunk_stages = n});
      a.did(LoopStep::kSumToken);
    }
  }
};

// Own node's partials and the other nodes' sums -> the caller's rows.
template <Arch A, Transport<A> Net>
struct FinalSumRole {
  A& a;
  Net& net;
  const CombineParams& p;
  SumFeed<A>& feed;
  NodeRows<A> rows;

  HEP_DEVICE FinalSumRole(A& arch, Net& n, const CombineParams& params, SumFeed<A>& to, std::byte* smem)
      : a(arch), net(n), p(params), feed(to), rows(arch, params, smem, to.index) {}

  // By all lanes of a warp, of which `elected` does the work, of `workers` in the grid. False: a lane has left in its
  // wait.
  HEP_DEVICE bool run(bool elected, uint32_t worker, uint32_t workers) {
    a.set_role(Role::kFinalSumG2s);
    if (!rows.template begin<!kRailIsNic<Net>>()) return false;
    if (elected) sum_tokens(worker, workers);
    return true;
  }

 private:
  HEP_DEVICE void sum_tokens(uint32_t worker, uint32_t workers) {
    const int node = p.world.node();
    // Chunks of tokens no longer than the rails': RailTally's credits come in time because of it.
    const ChunkCut cut = ChunkCut::tapered(p.plan.num_tokens, p.rail.geometry.chunk_tokens, workers);
    for (uint32_t chunk = worker;; chunk = next_chunk(a, p.taken.to_node, workers)) {
      const auto [begin, n] = cut.chunk(chunk);
      if (!n) break;
      const int32_t* const pos = p.plan.node_pos + uint64_t(begin) * p.world.num_nodes + node;
      int32_t first = -1;  // of this node's records of the chunk's tokens, which follow each other
      uint32_t end = n;
      while (end > 0 && pos[(end - 1) * p.world.num_nodes] < 0) --end;
      for (uint32_t i = 0; i < end && first < 0; ++i) first = pos[i * p.world.num_nodes];
      if (end)
        rows.records.open(p.plan.records[node] + uint64_t(first) * p.record_bytes,
                          uint32_t(pos[(end - 1) * p.world.num_nodes] - first) + 1);
      int32_t own = pos[0];
      for (uint32_t i = 0; i < n; ++i) {
        const int32_t mine = own;
        if (i + 1 < n) own = pos[(i + 1) * p.world.num_nodes];  // on its way while this one is summed
        token(begin + i, mine < 0 ? mine : mine - first, i + 1 == n);
      }
    }
    rows.report();
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
