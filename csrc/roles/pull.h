// The pulling halves of combine: node sums for the rail peers, and the final sum for this rank's own tokens.
#pragma once
#include "pipeline/chunk_sweep.h"
#include "roles/sum_feed.h"

namespace hep {

// Partials that this node's ranks hold for one token, and how many of them came over NVLink.
template <Arch A>
struct NodePartials {
  A& a;
  const CombineParams& p;
  uint64_t node_rows = 0, self_rows = 0;

  template <class F>
  HEP_DEVICE void for_each(const unsigned char* record, F&& add) const {
    const auto* rec = reinterpret_cast<const RecordHeader*>(record);
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
    for (uint32_t i = 0; i < rec->num_dsts; ++i)
      add(SumRow{p.peers.recv[dsts[i].local_rank] + uint64_t(dsts[i].row) * p.partial.row_bytes()});
  }
  HEP_DEVICE void count(const unsigned char* record) {
    const auto* rec = reinterpret_cast<const RecordHeader*>(record);
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
    for (uint32_t i = 0; i < rec->num_dsts; ++i)
      dsts[i].local_rank == uint32_t(p.world.local_rank()) ? ++self_rows : ++node_rows;
  }
  HEP_DEVICE void report() {
    a.count_rank(&p.traffic->node_rows, node_rows);
    a.count_rank(&p.traffic->node_bytes, node_rows * p.partial.row_bytes());
    a.count_rank(&p.traffic->self_rows, self_rows);
    a.count_rank(&p.traffic->self_bytes, self_rows * p.partial.row_bytes());
  }
};

// Partials of this node's ranks -> one row per token of a rail peer, in slots of the send ring.
template <Arch A, Transport<A> Net>
struct NodeSumRole {
  A& a;
  Net& net;
  const CombineParams& p;
  SumFeed<A> feed;
  NodePartials<A> partials;

  HEP_DEVICE NodeSumRole(A& arch, Net& n, const CombineParams& params, const StageFifo<A, SumHead>& fifo)
      : a(arch), net(n), p(params), feed(arch, params, fifo), partials{arch, params} {}

  HEP_DEVICE void run(std::byte* smem) {
    a.set_role("node_sum_g2s");
    p.gate.wait_all_ready(a);
    auto peer = [&](uint32_t s) -> const RailPeer& { return p.rail.peer_behind(p.world.node(), s); };
    auto* cursors = reinterpret_cast<uint32_t*>(smem + p.credit_cursors_at);
    ChunkSweep<A>{a, p.taken.to_rail, p.taken.blocks, cursors, p.rail.num_peers}.run(
        Site::kRailSlotFree, p.rail.geometry.chunk_tokens, [&](uint32_t s) { return p.plan.rail_count[peer(s).node]; },
        [&](uint32_t s, uint32_t chunk) { return RailSender::test(a, net, p.rail.geometry, peer(s), chunk); },
        [&](uint32_t s, uint32_t chunk) { sum_chunk(peer(s), chunk); }, [&](uint32_t s) { return peer(s).rank; });
    feed.stop();
    partials.report();
  }

 private:
  HEP_DEVICE void sum_chunk(const RailPeer& peer, uint32_t chunk) {
    const uint32_t begin = chunk * p.rail.geometry.chunk_tokens;
    const uint32_t n = chunk_size(p.plan.rail_count[peer.node], chunk, p.rail.geometry.chunk_tokens);
    unsigned char* slot = RailSender::slot(net, p.rail.geometry, peer, chunk);
    for (uint32_t i = 0; i < n; ++i) {
      const unsigned char* record = p.plan.rail_record(peer.node, begin + i, p.record_bytes);
      partials.count(record);
      const uint32_t end = i + 1 == n ? SumHead::kChunkEnd : 0u;
      const SumHead send{0, 0, end, 0.f, uint32_t(&peer - p.rail.peers) + 1, chunk, n};
      feed.emit_partial([&](auto&& add) { partials.for_each(record, add); }, slot + uint64_t(i) * p.partial.row_bytes(),
                        slot + uint64_t(i) * p.partial.row_bytes() + p.partial.weights_at(), p.partial_dtype, send);
    }
  }
};

// Own node's partials and the other nodes' sums -> the caller's rows.
template <Arch A, Transport<A> Net>
struct FinalSumRole {
  A& a;
  Net& net;
  const CombineParams& p;
  SumFeed<A> feed;
  NodePartials<A> partials;

  HEP_DEVICE FinalSumRole(A& arch, Net& n, const CombineParams& params, const StageFifo<A, SumHead>& fifo)
      : a(arch), net(n), p(params), feed(arch, params, fifo), partials{arch, params} {}

  HEP_DEVICE void run() {
    a.set_role("final_sum_g2s");
    p.gate.wait_all_ready(a);
    const uint32_t chunk_tokens = p.rail.geometry.chunk_tokens;
    // Chunks of tokens no longer than the rails': RailTally's credits come in time because of it.
    for (uint32_t chunk = uint32_t(a.block_idx()); uint64_t(chunk) * chunk_tokens < p.plan.num_tokens;
         chunk = next_chunk(a, p.taken.to_node, p.taken.blocks)) {
      const uint32_t begin = chunk * chunk_tokens, n = chunk_size(p.plan.num_tokens, chunk, chunk_tokens);
      for (uint32_t i = 0; i < n; ++i) token(begin + i, i + 1 == n);
    }
    feed.stop();
    partials.report();
  }

 private:
  HEP_DEVICE void token(uint32_t t, bool last_of_chunk) {
    const int32_t* pos = p.plan.node_pos + uint64_t(t) * p.world.num_nodes;
    for (uint32_t i = 0; i < p.rail.num_peers; ++i)
      if (int32_t j = pos[p.rail.peers[i].node]; j >= 0)
        RailReceiver::wait(a, net, p.rail.geometry, p.rail.peers[i], uint32_t(j) / p.rail.geometry.chunk_tokens);
    const int32_t own_pos = pos[p.world.node()];
    const unsigned char* own =
        own_pos < 0 ? nullptr : p.plan.records[p.world.node()] + uint64_t(own_pos) * p.record_bytes;
    if (own) partials.count(own);
    auto rows = [&](auto&& add) {
      if (own) partials.for_each(own, add);
      for (uint32_t i = 0; i < p.rail.num_peers; ++i) {
        const RailPeer& peer = p.rail.peers[i];
        const int32_t j = pos[peer.node];
        if (j < 0) continue;
        const uint32_t chunk = uint32_t(j) / p.rail.geometry.chunk_tokens,
                       in_chunk = uint32_t(j) % p.rail.geometry.chunk_tokens;
        const uint32_t n = chunk_size(p.plan.node_count[peer.node], chunk, p.rail.geometry.chunk_tokens);
        add(SumRow{RailReceiver::slot(p.rail.geometry, peer, chunk) + uint64_t(in_chunk) * p.partial.row_bytes(), 1.f,
                   i + 1, chunk, n * feed.partial_tiles()});
      }
    };
    auto* weights =
        p.out_weights ? reinterpret_cast<unsigned char*>(p.out_weights + uint64_t(t) * p.plan.weight_stride) : nullptr;
    SumHead end{};
    if (last_of_chunk) end.flags = SumHead::kSettle;
    feed.emit_partial(rows, p.out_x + uint64_t(t) * feed.payload_row_bytes(), weights, p.dtype, end);
  }
};

}  // namespace hep
