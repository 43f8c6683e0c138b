// Records of a group of receive rows, with the weights of their pairs where rows are scaled, in shared memory, for a
// lane that forms the group's partials: it waits once for sixteen rows, and not in global memory for every pair. A
// machine that reads rows where they lie reads records there as well.
#pragma once
#include "common/bugs.h"
#include "pipeline/stage_fifo.h"
#include "roles/params.h"

namespace hep {

template <Arch A>
class GroupRecords {
 public:
  using Fifo = StageFifo<A, Vec16>;  // of one stage, which the lane that reads it fills

  static FifoLayout layout(uint64_t start, const CombineParams& p) {
    const uint64_t row = uint64_t(p.record_bytes) + (p.multiply ? 4 * p.plan.weight_stride : 0);
    return Fifo::layout(start, 1, kInPlace ? 16 : BufferLayout::kGroupRows * row);
  }
  HEP_DEVICE GroupRecords(A& arch, const CombineParams& params, const Fifo& fifo)
      : a(arch), p(params), stage(fifo.data), loaded_(fifo.full) {}

  // at() and weights_at() have those of rows [begin, end) then.
  HEP_DEVICE void open(uint32_t begin, uint32_t end) {
    if constexpr (kInPlace) return;
    typename A::Mbarrier& loaded = *loaded_;
    const uint32_t records = (end - begin) * p.record_bytes;
    const uint32_t weights = p.multiply ? (end - begin) * 4 * p.plan.weight_stride : 0;
    a.publish_shared();  // the group before has been read, and the async proxy writes next
    a.mbar_arrive_expect_tx(loaded, records + weights);
    a.bulk_g2s(stage, p.plan.row_records + uint64_t(begin) * p.record_bytes, records, loaded);
    if (weights) a.bulk_g2s(stage + first_weight(), row_weights(begin), weights, loaded);
    if (!injected(Bug::kGroupRecordsUnawaited)) a.mbar_wait(loaded, phase, {Site::kStageFull, -1, 0});
    phase ^= 1;
  }
  HEP_DEVICE const unsigned char* at(uint32_t row) const {
    if constexpr (kInPlace) return p.plan.row_records + uint64_t(row) * p.record_bytes;
    return stage + row % BufferLayout::kGroupRows * p.record_bytes;
  }
  HEP_DEVICE const float* weights_at(uint32_t row) const {
    if constexpr (kInPlace) return row_weights(row);
    return reinterpret_cast<const float*>(stage + first_weight()) +
           row % BufferLayout::kGroupRows * p.plan.weight_stride;
  }
  template <class T>
  HEP_DEVICE T load(const T* word) const {
    if constexpr (kInPlace)
      return *word;
    else
      return a.ld_shared(word);
  }

 private:
  static constexpr bool kInPlace = TileMath<A>::kReadsRows;

  HEP_DEVICE const float* row_weights(uint32_t row) const {
    return p.plan.row_weights + uint64_t(row) * p.plan.weight_stride;
  }
  HEP_DEVICE typename A::Mbarrier* barrier() const {  // as far behind the records for both feeds
    return reinterpret_cast<typename A::Mbarrier*>(stage + (p.group_records[0].full_at - p.group_records[0].data_at));
  }
  HEP_DEVICE uint32_t first_weight() const { return BufferLayout::kGroupRows * p.record_bytes; }

  A& a;
  const CombineParams& p;
  unsigned char* const stage;
  typename A::Mbarrier* const loaded_;
  uint32_t phase = 0;
};

}  // namespace hep
