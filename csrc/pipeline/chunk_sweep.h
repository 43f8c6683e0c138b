// Several streams of chunks, dealt to blocks as they come for them, and served by one lane a block as they can move.
// A stream that has to wait (for an arrival or for a credit) never holds up another. That is not only faster. Were a
// sender to wait for one peer's credit while another peer starves, three nodes could wait for each other in a ring.
// A block that shares its SM or was late takes fewer chunks; of its share others wait for the first alone.
#pragma once
#include <cstdint>

#include "arch/concept.h"
#include "common/bugs.h"
#include "common/macros.h"

namespace hep {

// Chunks that this rank's blocks have taken in the operation in progress, beyond the first of each block: one word a
// stream, zero between operations.
struct ChunksTaken {
  uint64_t *to_rail, *to_node;  // [N] each: chunks for rail peers; arrived chunks and this rank's own tokens
  uint32_t blocks;              // that take chunks: the first of the grid
};

// Whoever is through with a chunk takes the lowest that is free; the first of each block is its own number. So the
// lowest that is not served always has an owner. Taken before it is ready: chunks become ready in any order, and a
// block that took ready ones alone would look at the lowest for as long as that is late.
template <Arch A>
HEP_DEVICE uint32_t next_chunk(A& a, uint64_t* taken, uint32_t blocks) {
  return blocks + uint32_t(a.take_rank(taken));
}

struct ChunkTokens {
  uint32_t begin, number;  // none: the chunk is behind the stream's last
};

// How a stream of tokens is cut into chunks.
struct ChunkCut {
  uint32_t tokens, of_chunk;
  uint32_t whole = ~0u;  // chunks before those of a quarter of the tokens

  // What all blocks take at a time is much to bring at once to those who could have begun with it, and with few tokens
  // some blocks have no chunk. So the last of it are short chunks. Not for a stream whose chunks travel on the rail:
  // credits count those.
  HEP_DEVICE static ChunkCut tapered(uint32_t tokens, uint32_t of_chunk, uint32_t blocks) {
    const uint32_t chunks = tokens / of_chunk;
    return {tokens, of_chunk, chunks > blocks ? chunks - blocks : 0};
  }
  HEP_DEVICE ChunkTokens chunk(uint32_t i) const {
    const bool in_full = i < whole;
    const uint32_t most = in_full ? of_chunk : (of_chunk + 3) / 4;
    const uint32_t in_part = in_full ? i : i - whole + injected(Bug::kShortChunkSkipped);
    const uint64_t begin = uint64_t(in_full ? 0 : whole) * of_chunk + uint64_t(in_part) * most;
    if (begin >= tokens) return {tokens, 0};
    const uint32_t left = tokens - uint32_t(begin);
    return {uint32_t(begin), left < most ? left : most};
  }
};

template <Arch A>
struct ChunkSweep {
  A& a;
  uint64_t* taken;    // [num_streams], see ChunksTaken
  uint32_t blocks;    // likewise
  uint32_t* cursors;  // [num_streams], shared memory: the chunk of each stream that this block has taken and not served
  uint32_t num_streams;

  // tokens(s, chunk): those of a chunk of stream s. ready(s, chunk): may it be served now? serve(s, chunk): does it.
  // rank_of(s): who is waited for, for the timeout report.
  template <class Tokens, class Ready, class Serve, class RankOf>
  HEP_DEVICE void run(Site site, Tokens&& tokens, Ready&& ready, Serve&& serve, RankOf&& rank_of) {
    for (uint32_t s = 0; s < num_streams; ++s) a.st_shared(cursors + s, uint32_t(a.block_idx()));
    for (bool more = true; more;) {
      more = false;
      bool progress = false;
      WaitInfo waiting{site};
      for (uint32_t s = 0; s < num_streams; ++s) {
        const uint32_t chunk = a.ld_shared(cursors + s);
        if (!tokens(s, chunk).number) continue;
        more = true;
        if (!ready(s, chunk)) {
          waiting.peer = rank_of(s);
          waiting.chunk = chunk;
          if (!injected(Bug::kStreamsInOrder)) continue;
          while (!ready(s, chunk)) a.poll_idle(waiting, uint64_t(chunk) + 1, chunk);  // in order, come what may
        }
        serve(s, chunk);
        a.st_shared(cursors + s, injected(Bug::kChunkBehindLast) ? chunk + 1 : next_chunk(a, taken + s, blocks));
        progress = true;
      }
      if (progress)
        a.poll_reset();
      else if (more)
        a.poll_idle(waiting, uint64_t(waiting.chunk) + 1, uint64_t(waiting.chunk));
    }
  }
};

}  // namespace hep
