// Records of tokens, for a lane that reads one after the other: blocks of them come through shared memory, the next
// one on its way while one is read. In global memory every word of a record that decides what is read next would be a
// wait of its own. A machine that reads rows where they lie reads records there as well.
#pragma once
#include "common/bugs.h"
#include "pipeline/stage_fifo.h"
#include "roles/params.h"

namespace hep {

template <Arch A>
class RecordWindow {
 public:
  static constexpr uint32_t kRecords = 8, kStages = 2;
  using Fifo = StageFifo<A, Vec16>;

  static FifoLayout layout(uint64_t start, const CombineParams& p) {
    return Fifo::layout(start, kStages, kInPlace ? 16 : kRecords * uint64_t(p.record_bytes));
  }
  HEP_DEVICE RecordWindow(A& arch, const Fifo& fifo, uint32_t bytes)
      : a(arch), in(fifo), out(fifo, 0, 1), record_bytes(bytes) {}

  // at() reads the next `number` records from `records` on, one behind the other; all of those before have been read.
  HEP_DEVICE void open(const unsigned char* records, uint32_t number) {
    list = records;
    left = number;
    fresh = true;
  }
  // What was opened, before the first call of at(): where its records lie, and how many.
  HEP_DEVICE const unsigned char* next() const { return list; }
  HEP_DEVICE uint32_t to_come() const { return left; }
  // The j-th record, until the next call. Every one is asked for, in its turn: then nothing is on its way in the end.
  HEP_DEVICE const unsigned char* at(uint32_t j) {
    if constexpr (kInPlace) return list + uint64_t(j) * record_bytes;
    while (fresh || j / kRecords >= got) turn();
    return out.data() + j % kRecords * record_bytes;
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

  // To the next block. It is long code, and there is one place for each of its waits.
  HEP_DEVICE void turn() {
    if (got) {
      out.advance();
      out.release(a);
    }
    if (fresh) got = asked = 0;
    fresh = false;
    for (; asked < got + kStages && left != 0; ++asked) {
      const uint32_t n = left < kRecords ? left : kRecords, bytes = n * record_bytes;
      in.acquire(a);
      in.commit(a, Vec16{}, bytes);
      in.load(a, 0, list, bytes);
      in.advance();
      list += bytes;
      left -= n;
    }
    if (!injected(Bug::kRecordsUnawaited)) await_stage(a, out.fifo, out.at);
    ++got;
  }

  A& a;
  StageProducer<A, Vec16> in;
  StageConsumer<A, Vec16> out;
  const unsigned char* list = nullptr;
  const uint32_t record_bytes;
  uint32_t left = 0;            // records that are still to be loaded
  uint32_t asked = 0, got = 0;  // blocks loaded and waited for; the last of these is the one that is read
  bool fresh = false;           // what is held is of the list before
};

}  // namespace hep
