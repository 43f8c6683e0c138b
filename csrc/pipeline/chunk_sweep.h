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

template <Arch A>
struct ChunkSweep {
  A& a;
  uint64_t* taken;    // [num_streams], see ChunksTaken
  uint32_t blocks;    // likewise
  uint32_t* cursors;  // [num_streams], shared memory: the chunk of each stream that this block has taken and not served
  uint32_t num_streams;

  // count(s): tokens of stream s. ready(s, chunk): may it be served now? serve(s, chunk): does it.
  // rank_of(s): who is waited for, for the timeout report.
  template <class Count, class Ready, class Serve, class RankOf>
  HEP_DEVICE void run(Site site, uint32_t chunk_tokens, Count&& count, Ready&& ready, Serve&& serve, RankOf&& rank_of) {
    for (uint32_t s = 0; s < num_streams; ++s) a.st_shared(cursors + s, uint32_t(a.block_idx()));
    for (bool more = true; more;) {
      more = false;
      bool progress = false;
      WaitInfo waiting{site};
      for (uint32_t s = 0; s < num_streams; ++s) {
        const uint32_t chunk = a.ld_shared(cursors + s);
        if (uint64_t(chunk) * chunk_tokens >= count(s)) continue;
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

// Tokens of chunk `chunk` of a stream of `count` tokens.
HEP_DEVICE uint32_t chunk_size(uint32_t count, uint32_t chunk, uint32_t chunk_tokens) {
  const uint32_t left = count - chunk * chunk_tokens;
  return left < chunk_tokens ? left : chunk_tokens;
}

}  // namespace hep
