// The ring of chunks between rail peers, with credits. Chunk q of a direction (counted over the life of the
// buffer) uses slot q mod S: full[slot] = q + 1 says "arrived", free[slot] = q + 1 says "consumed, refill". Below the
// number, full says what call the chunk is of: between nodes nothing else stops a rank whose call was refused, and that
// went on to its next one, from reading the bytes of a dispatch as partial rows.
// Per-slot counters instead of one head let blocks finish chunks in any order. Memory is O(peers * S * chunk),
// independent of the number of tokens.
#pragma once
#include <cstdint>

#include "arch/concept.h"
#include "common/bugs.h"
#include "common/macros.h"
#include "common/numeric.h"
#include "layout/buffer.h"
#include "transport/concept.h"

namespace hep {

inline constexpr uint64_t kFlagWords = BufferLayout::kFlagStride / 8;

// What a kernel needs of one peer's pair of rings; plain data, filled by the runtime.
struct RailPeer {
  int32_t node, rank;
  unsigned char *send_slots, *recv_slots;  // this rank's memory, slot_bytes apart
  uint64_t* full_flags;                    // [S] cache lines, written by the peer: chunks for us
  uint64_t* free_flags;                    // [S] cache lines, written by the peer: credits for our chunks
  uint64_t* consumed;                      // [S] rank-private: stages consumed of the slot's chunk
  uint64_t peer_recv_slots, peer_full_flags, peer_free_flags;  // offsets in the peer's segment
  uint64_t *sent, *received;                                   // rank-private: chunks before this kernel
};

// What both ends of a ring must mean alike: the lower bits of its full flags.
struct RailCall {
  enum Kind : uint64_t { kDispatch, kCombine };
  static constexpr int kBits = 20;
  static constexpr uint64_t kMostChunks = uint64_t(1) << (63 - kBits);  // of a ring: at 100,000 a second, for 2.8 years

  // row_bytes: of a token's message, or of a sum's row; multiples of 16, told apart below 2 MiB.
  HEP_HOST_DEVICE static uint32_t word(Kind kind, uint64_t row_bytes, DType sums = DType{}) {
    return uint32_t(row_bytes / 16 << 3 | uint64_t(sums) << 1 | kind) & ((1u << kBits) - 1);
  }
};

struct RailGeometry {
  uint32_t num_slots, chunk_tokens;
  uint64_t slot_bytes;
  uint32_t call = 0;  // a RailCall

  HEP_DEVICE uint64_t* full_flag(const RailPeer& p, uint64_t q) const {
    return p.full_flags + (q % num_slots) * kFlagWords;
  }
  // Of the q-th chunk: less than any value of it, and the value itself.
  HEP_DEVICE uint64_t full_from(uint64_t q) const { return (q + 1) << RailCall::kBits; }
  HEP_DEVICE uint64_t full(uint64_t q) const { return full_from(q) | call; }
};

struct RailSender {
  // Where the bytes of this kernel's `chunk`-th chunk to the peer are stored: where the peer receives them if this rank
  // reaches that, else in a send slot, out of which they are put.
  template <class Net>
  HEP_DEVICE static unsigned char* slot(const Net& net, const RailGeometry& g, const RailPeer& p, uint64_t chunk) {
    const uint64_t base = injected(Bug::kSendSlotsFromOperationStart) ? 0 : *p.sent;
    const uint64_t at = ((base + chunk) % g.num_slots) * g.slot_bytes;
    if constexpr (kIsMapped<Net>)
      return net.mapped(p.node) + p.peer_recv_slots + at;
    else
      return p.send_slots + at;
  }
  // Is there a credit for this kernel's `chunk`-th chunk to the peer? Then its slot may be filled: the slot's
  // previous chunk is consumed, which also means that the put from our side of the slot is complete.
  template <class A, class Net>
  HEP_DEVICE static bool test(A& a, Net& net, const RailGeometry& g, const RailPeer& p, uint64_t chunk) {
    const uint64_t q = *p.sent + chunk;
    uint64_t credit = q + 1 > g.num_slots ? q + 1 - g.num_slots : 0;
    if (injected(Bug::kCreditOneChunkOld) && credit > 0) --credit;
    return credit == 0 ||
           net.test_signal(a, p.free_flags + ((q + injected(Bug::kCreditOfAnotherSlot)) % g.num_slots) * kFlagWords,
                           credit);
  }
  // Hands the filled slot over. The caller's stores into it are complete (bulk_wait<0> by the same lane, or by lanes
  // that it has met since).
  template <class A, class Net>
  HEP_DEVICE static void commit(A& a, Net& net, const RailGeometry& g, const RailPeer& p, uint64_t chunk,
                                uint64_t bytes) {
    const uint64_t q = *p.sent + chunk, slot = q % g.num_slots;
    uint64_t data = p.peer_recv_slots + slot * g.slot_bytes,
             flag = p.peer_full_flags + slot * BufferLayout::kFlagStride;
    if constexpr (kIsMapped<Net>) {
      net.signal(a, p.node, flag, g.full(q - injected(Bug::kSignalOneLow)));
    } else if (injected(Bug::kSignalWithoutOrder)) {  // flag before data: a put, then a signal that does not order it
      net.put(a, p.node, data, p.send_slots + slot * g.slot_bytes, bytes);
      net.signal(a, p.node, flag, g.full(q));
    } else {
      net.put_signal(a, p.node, data, p.send_slots + slot * g.slot_bytes, bytes, flag,
                     g.full(q - injected(Bug::kSignalOneLow)));
    }
  }
};

// A chunk of another call is taken by nobody: whoever finds it waits for the slot's next one, which does not come
// before this one is consumed, and so for the deadline. (Memory that stands for a peer may say that it has come.)
struct RailReceiver {
  HEP_DEVICE static unsigned char* slot(const RailGeometry& g, const RailPeer& p, uint64_t chunk) {
    const uint64_t base = injected(Bug::kRecvSlotsFromOperationStart) ? 0 : *p.received;
    return p.recv_slots + ((base + chunk) % g.num_slots) * g.slot_bytes;
  }
  template <class A, class Net>
  HEP_DEVICE static bool test(A& a, Net& net, const RailGeometry& g, const RailPeer& p, uint64_t chunk) {
    const uint64_t q = *p.received + chunk, said = net.read_signal(a, g.full_flag(p, q), g.full_from(q));
    if (said < g.full_from(q)) return false;
    if (said != g.full(q) && !injected(Bug::kRailCallUnchecked))
      net.wait_signal(a, g.full_flag(p, q), g.full_from(q + 1), {Site::kRailCall, p.rank, int64_t(chunk)});
    return true;
  }
  template <class A, class Net>
  HEP_DEVICE static void wait(A& a, Net& net, const RailGeometry& g, const RailPeer& p, uint64_t chunk) {
    if (injected(Bug::kRailChunkUnawaited)) return;
    const uint64_t q = *p.received + chunk, *const flag = g.full_flag(p, q);
    // Mostly one look says that it is there, and of what call it is. Else it is late, or of another.
    HEP_NO_UNROLL  // one wait in the code, not two: combine has no register to spare
    for (uint32_t other = 0; net.read_signal(a, flag, g.full_from(q)) != g.full(q);) {
      net.wait_signal(a, flag, g.full_from(q + other),
                      {other ? Site::kRailCall : Site::kRailChunk, p.rank, int64_t(chunk)});
      if (other++ || injected(Bug::kRailCallUnchecked)) break;
    }
  }
  // `n` of the chunk's `total` stages are out of the slot. Whoever takes the last returns the credit; the
  // counter goes back to zero before that, so the next chunk finds it clean. The lane waits for the counter's old
  // value, longer than for a tile: callers count for themselves and come here as rarely as they may.
  template <class A, class Net>
  HEP_DEVICE static void consume(A& a, Net& net, const RailGeometry& g, const RailPeer& p, uint64_t chunk, uint64_t n,
                                 uint64_t total) {
    const uint64_t q = *p.received + chunk, slot = q % g.num_slots;
    const uint64_t before = a.add_acq_rel_rank(p.consumed + slot, n);
    const uint64_t last = injected(Bug::kCreditAtFirstStage)                 ? 1
                          : injected(Bug::kCreditOneStageEarly) && total > 1 ? total - 1
                                                                             : total;
    if (before >= last || before + n < last) return;
    if (!injected(Bug::kConsumedNotReset)) p.consumed[slot] = 0;
    if (!injected(Bug::kNoCredits)) net.signal(a, p.node, p.peer_free_flags + slot * BufferLayout::kFlagStride, q + 1);
  }
};

}  // namespace hep
