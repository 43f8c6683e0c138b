// A run of bytes by way of a warp's stages: one lane is both ends of the small stage FIFO, loads running ahead of
// stores.
#pragma once
#include "roles/spare_stores.h"

namespace hep {

// By one lane. store(from, offset, bytes) puts a stage where it goes.
template <Arch A>
class StagedCopy {
 public:
  HEP_DEVICE StagedCopy(A& arch, const StageFifo<A, SpareHead>& fifo) : a(arch), in_(fifo), out_(fifo, 0, 1) {}

  // Complete when it returns.
  template <class Store>
  HEP_DEVICE void run(const unsigned char* from, uint32_t bytes, const Store& store) {
    const uint32_t most = in_.fifo.stage_bytes, n = (bytes + most - 1) / most, lag = in_.fifo.num_stages - 2;
    const auto size = [=](uint32_t i) { return bytes - i * most < most ? bytes - i * most : most; };
    for (uint32_t i = 0; i < n + lag; ++i) {
      if (i < n) {
        in_.acquire(a);
        in_.commit(a, SpareHead{}, size(i));
        in_.load(a, 0, from + uint64_t(i) * most, size(i));
        in_.advance();
      }
      if (i < lag) continue;
      const uint32_t k = i - lag;
      out_.wait(a);
      store(out_.data(), k * most, size(k));
      a.bulk_commit();
      out_.advance();
      if (k == 0) continue;
      a.template bulk_wait_read<1>();
      out_.release(a);
    }
    a.template bulk_wait_read<0>();
    out_.release(a);
    if (!injected(Bug::kChunkToldBeforeStores)) a.template bulk_wait<0>();
  }

 private:
  A& a;
  StageProducer<A, SpareHead> in_;
  StageConsumer<A, SpareHead> out_;
};

}  // namespace hep
