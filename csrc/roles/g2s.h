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
  const ChunkCut own_tokens;

  HEP_DEVICE DispatchG2SRole(A& arch, Net& n, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo,
                             std::byte* smem)
      : a(arch),
        net(n),
        p(params),
        to(fifo),
        sweep{arch, params.taken.to_node, params.taken.blocks,
              reinterpret_cast<uint32_t*>(smem + params.arrival_cursors_at), params.rail.num_peers + 1},
        own_tokens(cut_of(params.plan.node_count[params.world.node()])) {}

  HEP_DEVICE void run(int num_consumers) {
    a.set_role(Role::kG2s);
    sweep.run(
        Site::kRailAny, [&](uint32_t s, uint32_t chunk) { return tokens(s, chunk); },
        [&](uint32_t s, uint32_t chunk) { return arrived(s, chunk); },
        [&](uint32_t s, uint32_t chunk) { serve(s, chunk); }, [&](uint32_t s) { return p.rail.peers[s].rank; });
    TokenHead stop{};
    stop.stop = 1;
    to.stop(a, stop, num_consumers);
  }

 private:
  HEP_DEVICE bool is_own(uint32_t source) const { return source == p.rail.num_peers; }
  HEP_DEVICE ChunkCut cut_of(uint32_t tokens) const {
    const uint32_t most = p.rail.geometry.chunk_tokens;
    return p.rail.num_peers ? ChunkCut{tokens, most} : ChunkCut::tapered(tokens, most, p.taken.blocks);
  }
  HEP_DEVICE ChunkTokens tokens(uint32_t s, uint32_t chunk) const {
    if (is_own(s)) return own_tokens.chunk(chunk);
    return ChunkCut{p.plan.rail_count[p.rail.peers[s].node], p.rail.geometry.chunk_tokens}.chunk(chunk);
  }
  HEP_DEVICE bool arrived(uint32_t s, uint32_t chunk) {
    return is_own(s) || injected(Bug::kRailChunkUnawaited) ||
           RailReceiver::test(a, net, p.rail.geometry, p.rail.peers[s], chunk);
  }
  HEP_DEVICE void serve(uint32_t s, uint32_t chunk) {
    const auto [begin, n] = tokens(s, chunk);
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
