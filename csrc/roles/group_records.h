// Records of a group of receive rows, with the weights of their pairs where rows are scaled, in shared memory, for a
// lane that forms the group's partials: it waits once for sixteen rows, or eight, and not in global memory for every
// pair. A machine that reads rows where they lie reads records there as well.
#pragma once
#include "common/bugs.h"
#include "roles/record_window.h"

namespace hep {

template <Arch A>
class GroupRecords {
 public:
  using Mbarrier = typename A::Mbarrier;

  // They lie where the feed's record window has its blocks: before it is opened, or in a block that has no sums.
  // Weights take at most as much as records, so that half a group with them fits where a whole one without does.
  static_assert(RecordWindow<A>::kRecords * RecordWindow<A>::kStages == BufferLayout::kGroupRows);

  HEP_DEVICE GroupRecords(A& arch, const CombineParams& params, std::byte* smem, int feed)
      : a(arch),
        p(params),
        stage(reinterpret_cast<unsigned char*>(smem) + params.records[feed].data_at),
        loaded(barrier(params, smem, feed)) {}

  // Of the barriers of both feeds; and by one lane, before the block meets.
  static constexpr uint64_t kBarrierBytes = align_up(2 * sizeof(Mbarrier), 128);
  HEP_DEVICE static void init(A& a, const CombineParams& p, std::byte* smem, int feed) {
    a.mbar_init(*barrier(p, smem, feed), 1, false);
  }
  // To be told of row after row, from the first of a group to `end`: at() and weights_at() have it then.
  HEP_DEVICE void reach(uint32_t row, uint32_t end) {
    if constexpr (!kInPlace)
      if (place(row) == 0) load(row, end - row < most() ? end - row : most());
  }
  // All has been read, and the memory may be written again.
  HEP_DEVICE void close() {
    if constexpr (!kInPlace) a.publish_shared();
  }
  HEP_DEVICE const unsigned char* at(uint32_t row) const {
    if constexpr (kInPlace) return p.plan.row_records + uint64_t(row) * p.record_bytes;
    return stage + place(row) * p.record_bytes;
  }
  HEP_DEVICE const float* weights_at(uint32_t row) const {
    if constexpr (kInPlace) return row_weights(row);
    return reinterpret_cast<const float*>(stage + first_weight()) + place(row) * p.plan.weight_stride;
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

  HEP_DEVICE static Mbarrier* barrier(const CombineParams& p, std::byte* smem, int feed) {
    return reinterpret_cast<Mbarrier*>(smem + p.group_barriers_at) + feed;
  }
  // Rows that are there at a time, and where one of them is among these.
  HEP_DEVICE uint32_t most() const { return p.multiply ? BufferLayout::kGroupRows / 2 : BufferLayout::kGroupRows; }
  HEP_DEVICE uint32_t place(uint32_t row) const { return row & (most() - 1); }
  HEP_DEVICE const float* row_weights(uint32_t row) const {
    return p.plan.row_weights + uint64_t(row) * p.plan.weight_stride;
  }
  HEP_DEVICE uint32_t first_weight() const { return most() * p.record_bytes; }

  HEP_DEVICE void load(uint32_t row, uint32_t rows) {
    const uint32_t records = rows * p.record_bytes, weights = p.multiply ? rows * 4 * p.plan.weight_stride : 0;
    a.publish_shared();  // the rows before have been read, and the async proxy writes next
    a.mbar_arrive_expect_tx(*loaded, records + weights);
    a.bulk_g2s(stage, p.plan.row_records + uint64_t(row) * p.record_bytes, records, *loaded);
    if (weights) a.bulk_g2s(stage + first_weight(), row_weights(row), weights, *loaded);
    if (!injected(Bug::kGroupRecordsUnawaited)) a.mbar_wait(*loaded, phase, {Site::kStageFull, -1, 0});
    phase ^= 1;
  }

  A& a;
  const CombineParams& p;
  unsigned char* const stage;
  Mbarrier* const loaded;
  uint32_t phase = 0;
};

}  // namespace hep
