// The loading half of a gather-sum: for every output row, the rows to be added in their fixed order, tile by tile,
// into stages; the reduce role adds what comes, and learns all that it must know from the stages' heads. Unpermute,
// node sum and final sum are programs over this.
#pragma once
#include "common/bugs.h"
#include "pipeline/stage_fifo.h"
#include "roles/params.h"
#include "roles/sum_head.h"

namespace hep {

template <Arch A>
struct SumFeed {
  A& a;
  const CombineParams& p;
  StageProducer<A, SumHead> to;
  Vec16* const rows;  // of the sum, in shared memory: its tiles read them again and again
  const int index;    // of a block's two
  uint32_t num_rows = 0;

  HEP_DEVICE SumFeed(A& arch, const CombineParams& params, const StageFifo<A, SumHead>& fifo, std::byte* smem, int feed)
      : a(arch), p(params), to(fifo), rows(reinterpret_cast<Vec16*>(smem + params.sum_rows_at[feed])), index(feed) {}

  // Of one feed: the most rows that a sum has, times what one takes. A token has at most topk experts, and as many rows
  // where they are read in place of partials.
  HEP_HOST_DEVICE static uint64_t rows_bytes(const CombineParams& p) {
    const uint64_t topk = p.plan.topk, ranks = uint64_t(p.world.num_local_ranks);
    const uint64_t partials = (ranks < topk && !TileMath<A>::kReadsRows ? ranks : topk) + p.rail.num_peers;
    const uint64_t local = p.permuted ? p.plan.num_local_experts : 1, experts = local < topk ? local : topk;
    return align_up(sizeof(SumRow) * (partials > experts ? partials : experts), 128);
  }
  HEP_DEVICE uint64_t payload_row_bytes() const { return uint64_t(p.hidden) * dtype_bytes(p.dtype); }
  // Stages that one partial row takes.
  HEP_DEVICE uint32_t partial_tiles() const {
    const uint64_t weight_tiles =
        injected(Bug::kCreditBeforeWeights) ? 0 : div_up(p.partial.weight_bytes / 4, p.tile_elems);
    return uint32_t(div_up(p.hidden, p.tile_elems) + weight_tiles);
  }

  // A sum: begin, add its rows in order, then emit.
  HEP_DEVICE void begin() { num_rows = 0; }
  HEP_DEVICE void add(const SumRow& row) {
    const auto words = std::bit_cast<HeadWords<SumRow>>(row);
    for (uint32_t i = 0; i < kWords; ++i) a.st_shared(rows + num_rows * kWords + i, words.v[i]);
    ++num_rows;
  }
  // Of partial rows: payload tiles, then the weights as fp32 tiles. The flags of `end` and what belongs to them ride on
  // the last stage.
  HEP_DEVICE void emit_partial(unsigned char* dst, unsigned char* dst_weights, DType out, const SumEnd& end) {
    SumPart part{dst, p.hidden, SumHead::types(p.partial_dtype, out), false};
    const uint32_t num_weights = p.partial.weight_bytes / 4;
    for (uint32_t sections = num_weights ? 2 : 1; sections != 0; --sections) {  // one place: it is long code
      emit(part, sections == 1 ? end : SumEnd{});
      part = {dst_weights, num_weights, SumHead::types(DType::kFp32, DType::kFp32), true};
    }
  }
  HEP_DEVICE void emit(const SumPart& part, const SumEnd& end) {
    SumHead head{};
    head.flags = part.flags;
    const uint32_t in = dtype_bytes(head.in()), out = dtype_bytes(head.out());
    const uint32_t stages = num_rows ? num_rows : 1;  // a token that nobody holds: zeros
    for (uint32_t begin = 0; begin < part.elems; begin += p.tile_elems) {
      head.dst = reinterpret_cast<uint64_t>(part.dst) + uint64_t(begin) * out;
      head.elems = part.elems - begin < p.tile_elems ? part.elems - begin : p.tile_elems;
      const bool last_tile = begin + head.elems == part.elems;
      bool first = true;
      for (uint32_t k = 0; k < stages; ++k) {
        head.flags = part.flags | (first ? uint32_t(SumHead::kFirst) : 0u) |
                     (k + 1 == stages ? uint32_t(SumHead::kLast) : 0u) | (num_rows ? 0u : uint32_t(SumHead::kEmpty));
        const unsigned char* src = nullptr;
        if (num_rows) src = row(head, k, part.weights);
        if (kHasParts && num_rows && !src) continue;  // weights are with the last row of a part
        first = kHasParts && first && head.is(SumHead::kPart) && !head.is(SumHead::kPartLast);
        if (last_tile && k + 1 == stages) finish(head, end);
        stage(head, src + uint64_t(begin) * in, num_rows ? head.elems * in : 0);
      }
    }
  }
  // No sum, only what rides on one.
  HEP_DEVICE void emit_end(const SumEnd& end) {
    SumHead head{};
    head.flags = SumHead::kFirst | SumHead::kLast | SumHead::kEmpty;
    finish(head, end);
    stage(head, nullptr, 0);
  }
  HEP_DEVICE void stop() {
    SumHead head{};
    head.flags = SumHead::kStop;
    to.stop(a, head, 1);
  }

 private:
  static constexpr uint32_t kWords = sizeof(SumRow) / 16;
  static constexpr bool kHasParts = TileMath<A>::kReadsRows;

  // The k-th row's address; what else is known of it goes into the head.
  HEP_DEVICE const unsigned char* row(SumHead& head, uint32_t k, bool weights) {
    HeadWords<SumRow> words;
    for (uint32_t i = 0; i < kWords; ++i) words.v[i] = a.ld_shared(rows + k * kWords + i);
    const auto r = std::bit_cast<SumRow>(words);
    head.scale = r.scale;
    head.peer = r.peer;
    head.chunk = r.chunk;
    head.chunk_stages = r.chunk_stages;
    if (r.chunk_stages) head.flags |= SumHead::kRing;
    if (kHasParts && !weights) head.flags |= r.part;
    return weights ? r.weights : r.payload;
  }
  HEP_DEVICE static void finish(SumHead& head, const SumEnd& end) {
    head.flags |= end.flags;
    if (!(end.flags & (SumHead::kChunkEnd | SumHead::kGroupEnd))) return;
    head.peer = end.peer;
    head.chunk = end.chunk;
    head.chunk_stages = end.chunk_stages;
  }
  HEP_DEVICE void stage(const SumHead& head, const unsigned char* src, uint32_t bytes) {
    unsigned char* data = to.acquire(a);
    if constexpr (TileMath<A>::kReadsRows) {
      a.st_shared(reinterpret_cast<uint64_t*>(data), reinterpret_cast<uint64_t>(src));
      to.commit(a, head, 0);
    } else {
      to.commit(a, head, bytes);
      if (bytes) to.load(a, 0, src, bytes);
    }
    to.advance();
    a.did(LoopStep::kSumRow);
  }
};

}  // namespace hep
