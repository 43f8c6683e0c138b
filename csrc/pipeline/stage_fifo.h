// A bounded FIFO of shared-memory stages between one producer lane and its consumers. The only place that
// knows phases: roles say acquire, load, commit, wait, release.
#pragma once
#include <bit>
#include <cstdint>

#include "arch/concept.h"
#include "common/bugs.h"
#include "layout/smem.h"

namespace hep {

// Position in the FIFO. Several consumer warps share a FIFO by taking every stride-th stage.
struct StageCursor {
  uint32_t stage = 0, phase = 0;

  HEP_DEVICE void advance(uint32_t by, uint32_t num_stages) {
    stage += by;
    while (stage >= num_stages) {
      stage -= num_stages;
      phase ^= 1;
    }
  }
};

// A head is what the producer tells the consumers about a stage; moved in 16-byte words.
template <class Head>
struct HeadWords {
  static_assert(sizeof(Head) % 16 == 0 && alignof(Head) == 16);
  Vec16 v[sizeof(Head) / 16];
};

template <Arch A, class Head>
struct StageFifo {
  using Mbarrier = typename A::Mbarrier;
  unsigned char* data;
  Head* heads;
  Mbarrier *full, *empty;
  uint32_t num_stages, stage_bytes;

  HEP_DEVICE StageFifo(std::byte* smem, const FifoLayout& f)
      : data(reinterpret_cast<unsigned char*>(smem) + f.data_at),
        heads(reinterpret_cast<Head*>(smem + f.heads_at)),
        full(reinterpret_cast<Mbarrier*>(smem + f.full_at)),
        empty(reinterpret_cast<Mbarrier*>(smem + f.empty_at)),
        num_stages(f.num_stages),
        stage_bytes(f.stage_bytes) {}

  static FifoLayout layout(uint64_t start, uint32_t num_stages, uint64_t stage_bytes) {
    return FifoLayout::make(start, num_stages, stage_bytes, sizeof(Head), sizeof(Mbarrier));
  }

  // By one lane, before the block_sync that opens the kernel. `releases`: arrivals that free a stage, one for
  // each warp that reads it.
  HEP_DEVICE void init(A& a, uint32_t releases) const {
    for (uint32_t i = 0; i < num_stages; ++i) {
      a.mbar_init(full[i], 1, false);
      a.mbar_init(empty[i], releases, true);
    }
  }
};

// Producer end; lives on one lane. Loads of a stage: expect(total bytes) through commit, then load(...).
template <Arch A, class Head>
struct StageProducer {
  StageFifo<A, Head> fifo;
  StageCursor at;

  HEP_DEVICE explicit StageProducer(const StageFifo<A, Head>& f) : fifo(f) {}

  // Waits until the stage may be refilled.
  HEP_DEVICE unsigned char* acquire(A& a) {
    const uint32_t phase = injected(Bug::kWrongStagePhase) ? at.phase : at.phase ^ 1;
    if (!injected(Bug::kRefillBeforeConsumed))
      a.mbar_wait(fifo.empty[at.stage], phase, {Site::kStageEmpty, -1, int64_t(at.stage)});
    return fifo.data + uint64_t(at.stage) * fifo.stage_bytes;
  }
  // Publishes the head and the number of bytes that the loads after it will bring.
  HEP_DEVICE void commit(A& a, const Head& head, uint32_t bytes) {
    const auto words = std::bit_cast<HeadWords<Head>>(head);
    auto* dst = reinterpret_cast<Vec16*>(&fifo.heads[at.stage]);
    for (size_t i = 0; i < sizeof(Head) / 16; ++i) a.st_shared(dst + i, words.v[i]);
    if (bytes)
      a.mbar_arrive_expect_tx(fifo.full[at.stage], bytes);
    else
      a.mbar_arrive(fifo.full[at.stage]);
  }
  HEP_DEVICE void load(A& a, uint32_t stage_offset, const void* src, uint32_t bytes) {
    a.bulk_g2s(fifo.data + uint64_t(at.stage) * fifo.stage_bytes + stage_offset, src, bytes, fifo.full[at.stage]);
  }
  HEP_DEVICE void advance() { at.advance(1, fifo.num_stages); }

  // One empty stage with a stop head for each consumer warp.
  HEP_DEVICE void stop(A& a, const Head& head, int num_consumers) {
    for (int i = 0; i < num_consumers; ++i) {
      acquire(a);
      commit(a, head, 0);
      advance();
    }
  }
};

// Waits for the stage's loads.
template <Arch A, class Head>
HEP_DEVICE void await_stage(A& a, const StageFifo<A, Head>& fifo, const StageCursor& at) {
  if (!injected(Bug::kReadBeforeLoaded))
    a.mbar_wait(fifo.full[at.stage], at.phase, {Site::kStageFull, -1, int64_t(at.stage)});
}
template <Arch A, class Head>
HEP_DEVICE Head head_of_stage(A& a, const StageFifo<A, Head>& fifo, const StageCursor& at) {
  const auto* src = reinterpret_cast<const Vec16*>(&fifo.heads[at.stage]);
  HeadWords<Head> words;
  for (size_t i = 0; i < sizeof(Head) / 16; ++i) words.v[i] = a.ld_shared(src + i);
  return std::bit_cast<Head>(words);
}

// Consumer end of warp `index` of `stride` consumer warps. num_stages is a multiple of stride, else a consumer would
// meet one stage in the same phase twice.
template <Arch A, class Head>
struct StageConsumer {
  StageFifo<A, Head> fifo;
  StageCursor at, oldest;  // next stage to read; oldest stage not yet released
  uint32_t stride;

  HEP_DEVICE StageConsumer(const StageFifo<A, Head>& f, uint32_t index, uint32_t stride_) : fifo(f), stride(stride_) {
    at.advance(index, f.num_stages);
    oldest = at;
  }
  HEP_DEVICE Head wait(A& a) {
    await_stage(a, fifo, at);
    return head_of_stage(a, fifo, at);
  }
  HEP_DEVICE unsigned char* data() const { return fifo.data + uint64_t(at.stage) * fifo.stage_bytes; }
  HEP_DEVICE void advance() { at.advance(stride, fifo.num_stages); }
  // Gives the oldest held stage back, by a consumer that is one lane. What was read of it through the generic proxy is
  // published first, because the next writer is the async proxy.
  HEP_DEVICE void release(A& a) {
    if (!injected(Bug::kStageBackUnpublished)) a.publish_shared();
    a.mbar_arrive(fifo.empty[oldest.stage]);
    oldest.advance(stride, fifo.num_stages);
  }
};

// Consumer end of a warp whose lanes all read each stage, every one in turn, and which holds one at a time. Its loop is
// short, with no multiplication and no load from constant memory on the way to the next stage's bytes.
template <Arch A, class Head>
struct WarpConsumer {
  StageFifo<A, Head> fifo;
  StageCursor at;
  const unsigned char* stage_data;  // of `at`
  bool elected;                     // the lane that arrives for its warp

  // By all lanes of the warp.
  HEP_DEVICE WarpConsumer(A& a, const StageFifo<A, Head>& f) : fifo(f), stage_data(f.data), elected(a.elect_one()) {}

  HEP_DEVICE Head wait(A& a) {
    await(a);
    return head(a);
  }
  // wait() in its parts. is_here: the stage's loads are, so that await() would return at once.
  HEP_DEVICE bool is_here(A& a) { return a.mbar_test(fifo.full[at.stage], at.phase); }
  HEP_DEVICE void await(A& a) { await_stage(a, fifo, at); }
  HEP_DEVICE Head head(A& a) const { return head_of_stage(a, fifo, at); }
  HEP_DEVICE const unsigned char* data() const { return stage_data; }
  // Gives the stage back and advances. Published by every lane that has read it, as in StageConsumer::release.
  HEP_DEVICE void pass(A& a) {
    if (!injected(Bug::kStageBackUnpublished)) a.publish_shared();
    if (!injected(Bug::kStageBackByOneLane)) a.warp_sync();
    if (elected) a.mbar_arrive(fifo.empty[at.stage]);
    stage_data += fifo.stage_bytes;
    if (++at.stage != fifo.num_stages) return;
    at = {0, at.phase ^ 1};
    stage_data = fifo.data;
  }
};

}  // namespace hep
