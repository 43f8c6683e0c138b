// Fills stages with tiles of one token's message. Stage layout: the message's own, cut to one tile of payload;
// tile 0 carries every section, later tiles the record (for the addresses in it) and their part of the payload.
#pragma once
#include "common/bugs.h"
#include "pipeline/stage_fifo.h"
#include "roles/params.h"

namespace hep {

// With so many stages of its own a warp that stores tokens keeps one while the next one's stores read theirs. With
// fewer the loads would wait for it.
inline constexpr uint32_t kManyStages = 6;

struct alignas(16) TokenHead {
  uint32_t stop;
  uint32_t tile;
  uint32_t peer;                 // 0: this rank's own token; i + 1: from rail peer i
  uint32_t index;                // token position in its list, or receive row
  uint32_t chunk;                // of the rail peer, for the credit
  uint32_t chunk_stages, stage;  // of them, from 0
  uint32_t bare;                 // deliver: metadata without a row
};

// Where the sections of one token lie. `weights` and `scales` are null when they do not travel.
struct TokenSource {
  const unsigned char *record, *weights, *scales, *payload;

  HEP_DEVICE static TokenSource contiguous(const MessageLayout& m, const unsigned char* at) {
    return {at, m.weight_bytes ? at + m.weights_at() : nullptr, m.scale_bytes ? at + m.scales_at() : nullptr,
            at + m.payload_at()};
  }
};

// Bytes of a stage that holds a tile, with its head and barriers.
template <Arch A>
uint64_t token_stage_bytes(const DispatchParams& p) {
  return align_up(p.message.payload_at() + p.tile_bytes, 128) + sizeof(TokenHead) + 2 * sizeof(typename A::Mbarrier);
}

struct TileShape {
  uint32_t begin, bytes;  // of the payload
};
HEP_DEVICE TileShape tile_shape(const MessageLayout& m, uint32_t tile_bytes, uint32_t tile) {
  const uint32_t begin = tile * tile_bytes, left = m.row_bytes - begin;
  return {begin, left < tile_bytes ? left : tile_bytes};
}
HEP_DEVICE uint32_t num_tiles(const MessageLayout& m, uint32_t tile_bytes) {
  return uint32_t(div_up(m.row_bytes, tile_bytes));
}

template <Arch A>
HEP_DEVICE void load_tile(A& a, StageProducer<A, TokenHead>& to, const MessageLayout& m, uint32_t tile_bytes,
                          const TokenSource& src, const TokenHead& head) {
  const TileShape t = tile_shape(m, tile_bytes, head.tile);
  to.acquire(a);
  const uint32_t sections = head.tile == 0 ? m.payload_at() : m.record_bytes;
  to.commit(a, head, (injected(Bug::kFewerBytesAnnounced) ? m.record_bytes : sections) + t.bytes);
  to.load(a, 0, src.record, m.record_bytes);
  if (head.tile == 0) {
    if (src.weights) to.load(a, m.weights_at(), src.weights, m.weight_bytes);
    if (src.scales) to.load(a, m.scales_at(), src.scales, m.scale_bytes);
  }
  to.load(a, m.payload_at(), src.payload + (injected(Bug::kTilesFromRowStart) ? 0 : t.begin), t.bytes);
  to.advance();
}

// A stage with the metadata of a token alone.
template <Arch A>
HEP_DEVICE void load_metadata(A& a, StageProducer<A, TokenHead>& to, const MessageLayout& m,
                              const unsigned char* metadata, const TokenHead& head) {
  to.acquire(a);
  to.commit(a, head, m.metadata_bytes());
  to.load(a, 0, metadata, m.metadata_bytes());
  to.advance();
}

// This rank's tokens for a node, from the j-th on, in their order. Which token comes next is on its way from memory
// while one is loaded: a lane that looked it up when it needs it would wait longer for that than for all else.
class OwnTokens {
 public:
  HEP_DEVICE OwnTokens(const DispatchParams& params, int node, uint32_t j, uint32_t number)
      : p(params),
        token(params.plan.node_tokens[node] + j),
        end(token + number),
        record(params.plan.records[node] + uint64_t(j) * params.message.record_bytes),
        ahead(number ? *token : 0) {}

  HEP_DEVICE TokenSource next() {
    const uint64_t t = ahead;
    if (++token < end) ahead = *token;
    const unsigned char* const mine = record;
    record += p.message.record_bytes;
    return {mine, p.weights ? reinterpret_cast<const unsigned char*>(p.weights + t * p.plan.weight_stride) : nullptr,
            p.scales ? p.scales + t * p.message.scale_bytes : nullptr, p.x + t * p.message.row_bytes};
  }

 private:
  const DispatchParams& p;
  const uint32_t *token, *end;
  const unsigned char* record;
  uint32_t ahead;
};

}  // namespace hep
