// The pulling half of combine that is for rail peers: node sums.
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
  NodeRows<A, !kRailIsNic<Net>> rows;

  HEP_DEVICE NodeSumRole(A& arch, Net& n, const CombineParams& params, SumFeed<A>& to, std::byte* smem)
      : a(arch), net(n), p(params), feed(to), rows(arch, params, smem, to.index) {}

  // By all lanes of a warp (CombineBlock::feed), of which `elected` does the work. False: a lane has left in its wait.
  HEP_DEVICE bool run(bool elected, std::byte* smem) {
    a.set_role(Role::kNodeSumG2s);
    if (!rows.begin(false)) return false;
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

}  // namespace hep
