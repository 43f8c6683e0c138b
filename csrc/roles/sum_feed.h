// The loading half of a gather-sum: for every output row, the rows to be added in their fixed order, tile by tile,
// into stages; the reduce role adds what comes. Unpermute, node sum and final sum are programs over this.
#pragma once
#include "common/bugs.h"
#include "pipeline/stage_fifo.h"
#include "roles/params.h"

namespace hep {

// Whose rows are added: experts' outputs, which may be scaled; the node's partials of a rail peer's token, whose sums
// go to that peer chunk by chunk; or a token's partials, some of them out of rings that want their credits.
enum class SumOf { kExperts, kNode, kToken };

struct alignas(16) SumHead {
  enum : uint32_t {
    kStop = 1,
    kFirst = 2,
    kLast = 4,
    kEmpty = 8,
    kScaled = 16,
    kWeights = 32,
    kChunkEnd = 64,  // of a chunk for a rail peer: it may be sent
    kSettle = 128,   // of a chunk of own tokens: what was taken from the rings is told
  };
  uint64_t dst;  // address of the output tile
  uint32_t elems, flags;
  float scale;
  uint32_t peer;   // i + 1: the row lies in a ring slot of rail peer i
  uint32_t chunk;  // of that peer; at kChunkEnd: the chunk to send
  uint32_t chunk_stages;

  HEP_DEVICE bool is(uint32_t flag) const { return flags & flag; }
  // Of an element on its way from or to payload of this type.
  HEP_DEVICE DType type(DType payload) const { return is(kWeights) ? DType::kFp32 : payload; }
};

struct SumRow {
  const unsigned char* row;
  float scale = 1.f;
  uint32_t peer = 0, chunk = 0, chunk_stages = 0;
};

template <Arch A>
struct SumFeed {
  A& a;
  const CombineParams& p;
  StageProducer<A, SumHead> to;

  HEP_DEVICE SumFeed(A& arch, const CombineParams& params, const StageFifo<A, SumHead>& fifo)
      : a(arch), p(params), to(fifo) {}

  HEP_DEVICE uint64_t payload_row_bytes() const { return uint64_t(p.hidden) * dtype_bytes(p.dtype); }
  // Stages that one partial row takes.
  HEP_DEVICE uint32_t partial_tiles() const {
    const uint64_t weight_tiles =
        injected(Bug::kCreditBeforeWeights) ? 0 : div_up(p.partial.weight_bytes / 4, p.tile_elems);
    return uint32_t(div_up(p.hidden, p.tile_elems) + weight_tiles);
  }

  // Sums of partial rows: payload tiles, then the weights as fp32 tiles.
  template <class Rows>
  HEP_DEVICE void emit_partial(Rows&& rows, unsigned char* dst, unsigned char* dst_weights, DType out,
                               const SumHead& send) {
    emit(rows, dst, 0, p.hidden, p.partial_dtype, out, 0, p.partial.weight_bytes ? SumHead{} : send);
    if (p.partial.weight_bytes)
      emit(rows, dst_weights, p.partial.weights_at(), p.partial.weight_bytes / 4, DType::kFp32, DType::kFp32,
           SumHead::kWeights, send);
  }

  // rows(add): calls add(SumRow) for every row of the sum, in order; asked once per tile, so it must repeat itself.
  // src_at: where the summed section starts in a row. send: its flags ride on the last stage; by value, which
  // keeps it in registers.
  template <class Rows>
  HEP_DEVICE void emit(Rows&& rows, unsigned char* dst, uint32_t src_at, uint32_t elems, DType in, DType out,
                       uint32_t flags, SumHead send) {
    uint32_t num_rows = 0;
    rows([&](const SumRow&) { ++num_rows; });
    for (uint32_t begin = 0; begin < elems; begin += p.tile_elems) {
      SumHead head{};
      head.dst = reinterpret_cast<uint64_t>(dst) + uint64_t(begin) * dtype_bytes(out);
      head.elems = elems - begin < p.tile_elems ? elems - begin : p.tile_elems;
      const bool last_tile = begin + head.elems == elems;
      if (num_rows == 0) {  // a token that nobody holds: zeros
        finish(head, flags | SumHead::kFirst | SumHead::kLast | SumHead::kEmpty, last_tile, send);
        to.acquire(a);
        to.commit(a, head, 0);
        to.advance();
        continue;
      }
      const uint32_t bytes = head.elems * dtype_bytes(in);
      uint32_t k = 0;
      rows([&](const SumRow& r) {
        head.scale = r.scale;
        head.peer = r.peer;
        head.chunk = r.chunk;
        head.chunk_stages = r.chunk_stages;
        ++k;
        const uint32_t ends =
            (k == 1 ? uint32_t(SumHead::kFirst) : 0u) | (k == num_rows ? uint32_t(SumHead::kLast) : 0u);
        finish(head, flags | ends, last_tile && k == num_rows, send);
        const unsigned char* src = r.row + src_at + uint64_t(begin) * dtype_bytes(in);
        unsigned char* stage = to.acquire(a);
        if constexpr (TileMath<A>::kReadsRows) {
          a.st_shared(reinterpret_cast<uint64_t*>(stage), reinterpret_cast<uint64_t>(src));
          to.commit(a, head, 0);
        } else {
          to.commit(a, head, bytes);
          to.load(a, 0, src, bytes);
        }
        to.advance();
      });
    }
  }
  HEP_DEVICE void stop() {
    SumHead head{};
    head.flags = SumHead::kStop;
    to.stop(a, head, 1);
  }

 private:
  HEP_DEVICE static void finish(SumHead& head, uint32_t flags, bool last, const SumHead& send) {
    head.flags = flags;
    if (!last) return;
    head.flags |= send.flags;
    if (!send.is(SumHead::kChunkEnd)) return;
    head.peer = send.peer;
    head.chunk = send.chunk;
    head.chunk_stages = send.chunk_stages;
  }
};

}  // namespace hep
