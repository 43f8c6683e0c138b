// N2N: this rank's tokens to its rail peers, chunk by chunk: gathered into a slot of the send ring, then one
// put with a signal; or stored into the peer's slot, then the signal, where that is mapped. One lane is both ends of
// its small stage FIFO, loads running ahead of stores.
#pragma once
#include "common/bugs.h"
#include "pipeline/chunk_sweep.h"
#include "roles/token_loader.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct N2NRole {
  A& a;
  Net& net;
  const DispatchParams& p;
  StageProducer<A, TokenHead> in;
  StageConsumer<A, TokenHead> out;
  ChunkSweep<A> sweep;  // streams: the rail peers, starting behind our own node
  uint64_t rows = 0;

  HEP_DEVICE N2NRole(A& arch, Net& n, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo,
                     std::byte* smem)
      : a(arch),
        net(n),
        p(params),
        in(fifo),
        out(fifo, 0, 1),
        sweep{arch, params.taken.to_rail, params.taken.blocks,
              reinterpret_cast<uint32_t*>(smem + params.credit_cursors_at), params.rail.num_peers} {}

  HEP_DEVICE void run() {
    a.set_role(Role::kN2n);
    sweep.run(
        Site::kRailSlotFree, [&](uint32_t s, uint32_t chunk) { return tokens_of(peer(s), chunk); },
        [&](uint32_t s, uint32_t chunk) { return RailSender::test(a, net, p.rail.geometry, peer(s), chunk); },
        [&](uint32_t s, uint32_t chunk) { send_chunk(peer(s), chunk); }, [&](uint32_t s) { return peer(s).rank; });
    if (rows) {
      a.count_rank(&p.traffic->rail_rows, rows);
      a.count_rank(&p.traffic->rail_bytes, rows * p.message.token_bytes());
    }
  }

 private:
  HEP_DEVICE const RailPeer& peer(uint32_t stream) const { return p.rail.peer_behind(p.world.node(), stream); }
  HEP_DEVICE ChunkTokens tokens_of(const RailPeer& peer, uint32_t chunk) const {
    return ChunkCut{p.plan.node_count[peer.node], p.rail.geometry.chunk_tokens}.chunk(chunk);
  }
  HEP_DEVICE void send_chunk(const RailPeer& peer, uint32_t chunk) {
    const auto [begin, n] = tokens_of(peer, chunk);
    const uint32_t tiles = num_tiles(p.message, p.tile_bytes), total = n * tiles;
    const uint32_t lag = in.fifo.num_stages - 2;  // loads in flight before the first store
    unsigned char* slot = RailSender::slot(net, p.rail.geometry, peer, chunk);
    OwnTokens own(p, peer.node, begin, n);
    TokenSource src{};
    TokenHead head{};
    uint32_t stored = 0;  // tiles of the token that is being stored
    for (uint32_t i = 0; i < total + lag; ++i) {
      if (i < total) {
        if (head.tile == 0) src = own.next();
        load_tile(a, in, p.message, p.tile_bytes, src, head);
        a.did(LoopStep::kN2nToken);
        if (++head.tile == tiles) head.tile = 0;
      }
      if (i < lag) continue;
      store_tile(slot, stored, i == lag);
      if (++stored < tiles) continue;
      stored = 0;
      slot += p.message.token_bytes();
    }
    a.template bulk_wait_read<0>();
    out.release(a);
    if (!injected(Bug::kPutBeforeSlotStored))
      a.template bulk_wait<0>();  // the slot is complete before anybody reads it
    RailSender::commit(a, net, p.rail.geometry, peer, chunk, uint64_t(n) * p.message.token_bytes());
    rows += n;
  }
  HEP_DEVICE void store_tile(unsigned char* token, uint32_t tile, bool first) {
    const TileShape t = tile_shape(p.message, p.tile_bytes, tile);
    out.wait(a);
    const unsigned char* stage = out.data();
    if (tile == 0)
      a.bulk_s2g(token, stage, p.message.payload_at() + t.bytes);
    else
      a.bulk_s2g(token + p.message.payload_at() + t.begin, stage + p.message.payload_at(), t.bytes);
    a.bulk_commit();
    out.advance();
    if (!first) {
      if (!injected(Bug::kN2nStageBackEarly)) a.template bulk_wait_read<1>();
      out.release(a);
    }
  }
};

}  // namespace hep
