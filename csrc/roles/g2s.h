// G2S of dispatch: own tokens for this node and tokens that arrived over the rail, into the scatter FIFO.
// Sources are served as they come; a late node delays only its own tokens.
#pragma once
#include "roles/token_loader.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct DispatchG2SRole {
  A& a;
  Net& net;
  const DispatchParams& p;
  StageProducer<A, TokenHead> to;
  uint32_t* cursors;  // shared memory, [num_peers + 1]: next chunk of each source, the last is this rank

  HEP_DEVICE DispatchG2SRole(A& arch, Net& n, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo,
                             std::byte* smem)
      : a(arch), net(n), p(params), to(fifo), cursors(reinterpret_cast<uint32_t*>(smem + params.cursors_at)) {}

  HEP_DEVICE void run(int num_consumers) {
    a.set_role("g2s");
    const uint32_t num_sources = p.rail.num_peers + 1;
    for (uint32_t s = 0; s < num_sources; ++s) a.st_shared(cursors + s, uint32_t(a.block_idx()));
    for (bool more = true; more;) {
      more = false;
      bool progress = false;
      WaitInfo waiting{Site::kRailAny};
      for (uint32_t s = 0; s < num_sources; ++s) {
        const uint32_t chunk = a.ld_shared(cursors + s);
        if (uint64_t(chunk) * p.rail.geometry.chunk_tokens >= num_tokens(s)) continue;
        more = true;
        if (!arrived(s, chunk)) {
          waiting.peer = p.rail.peers[s].rank, waiting.chunk = chunk;
          continue;
        }
        serve(s, chunk);
        a.st_shared(cursors + s, chunk + a.num_blocks());
        progress = true;
      }
      if (progress)
        a.poll_reset();
      else if (more)
        a.poll_idle(waiting, uint64_t(waiting.chunk) + 1, uint64_t(waiting.chunk));
    }
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
    return is_own(s) || kMutant == 6 || RailReceiver::test(a, net, p.rail.geometry, p.rail.peers[s], chunk);
  }
  HEP_DEVICE void serve(uint32_t s, uint32_t chunk) {
    const uint32_t begin = chunk * p.rail.geometry.chunk_tokens, left = num_tokens(s) - begin;
    const uint32_t n = left < p.rail.geometry.chunk_tokens ? left : p.rail.geometry.chunk_tokens;
    const uint32_t tiles = num_tiles(p.message, p.tile_bytes);
    const unsigned char* slot = is_own(s) ? nullptr : RailReceiver::slot(p.rail.geometry, p.rail.peers[s], chunk);
    TokenHead head{};
    head.peer = is_own(s) ? 0 : s + 1;
    head.chunk = chunk;
    head.chunk_stages = n * tiles;
    for (uint32_t i = 0; i < n; ++i) {
      const TokenSource src = is_own(s) ? own_token(p, p.world.node(), begin + i)
                                        : TokenSource::contiguous(p.message, slot + uint64_t(i) * p.message.token_bytes());
      head.index = begin + i;
      for (head.tile = 0; head.tile < tiles; ++head.tile) load_tile(a, to, p.message, p.tile_bytes, src, head);
    }
  }
};

}  // namespace hep
