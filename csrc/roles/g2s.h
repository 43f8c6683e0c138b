// G2S of dispatch: own tokens for this node and tokens that arrived over the rail, into the scatter FIFO.
// Sources are served as they come; a late node delays only its own tokens.
#pragma once
#include "common/bugs.h"
#include "pipeline/chunk_sweep.h"
#include "roles/token_loader.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct DispatchG2SRole {
  A& a;
  Net& net;
  const DispatchParams& p;
  StageProducer<A, TokenHead> to;
  ChunkSweep<A> sweep;  // streams: the rail peers, then this rank's own tokens

  HEP_DEVICE DispatchG2SRole(A& arch, Net& n, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo,
                             std::byte* smem)
      : a(arch),
        net(n),
        p(params),
        to(fifo),
        sweep{arch, params.taken.to_node, params.taken.blocks,
              reinterpret_cast<uint32_t*>(smem + params.arrival_cursors_at), params.rail.num_peers + 1} {}

  HEP_DEVICE void run(int num_consumers) {
    a.set_role(Role::kG2s);
    sweep.run(
        Site::kRailAny, p.rail.geometry.chunk_tokens, [&](uint32_t s) { return num_tokens(s); },
        [&](uint32_t s, uint32_t chunk) { return arrived(s, chunk); },
        [&](uint32_t s, uint32_t chunk) { serve(s, chunk); }, [&](uint32_t s) { return p.rail.peers[s].rank; });
    TokenHead stop{};
    stop.stop = 1;
    to.stop(a, stop, num_consumers);
  }

 private:
  HEP_DEVICE bool is_own(uint32_t source) const { return source == p.rail.num_peers; }
  HEP_DEVICE uint32_t num_tokens(uint32_t s) const {
    return is_own(s) ? p.plan.node_count[p.world.node()] : p.plan.rail_count[p.rail.peers[s].node];
  }
  HEP_DEVICE bool arrived(uint32_t s, uint32_t chunk) {
    return is_own(s) || injected(Bug::kRailChunkUnawaited) ||
           RailReceiver::test(a, net, p.rail.geometry, p.rail.peers[s], chunk);
  }
  HEP_DEVICE void serve(uint32_t s, uint32_t chunk) {
    const uint32_t begin = chunk * p.rail.geometry.chunk_tokens;
    const uint32_t n = chunk_size(num_tokens(s), chunk, p.rail.geometry.chunk_tokens);
    const uint32_t tiles = num_tiles(p.message, p.tile_bytes);
    const unsigned char* slot = is_own(s) ? nullptr : RailReceiver::slot(p.rail.geometry, p.rail.peers[s], chunk);
    TokenHead head{};
    head.peer = is_own(s) ? 0 : s + 1;
    head.chunk = chunk;
    head.chunk_stages = n * tiles;
    OwnTokens own(p, p.world.node(), begin, is_own(s) ? n : 0);
    for (uint32_t i = 0; i < n; ++i) {
      const TokenSource src =
          is_own(s) ? own.next() : TokenSource::contiguous(p.message, slot + uint64_t(i) * p.message.token_bytes());
      head.index = begin + i;
      for (head.tile = 0; head.tile < tiles; ++head.tile, ++head.stage) {
        load_tile(a, to, p.message, p.tile_bytes, src, head);
        a.did(LoopStep::kG2sToken);
      }
    }
  }
};

}  // namespace hep
