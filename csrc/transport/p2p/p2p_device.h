// The rail over mapped memory, for rail peers that this GPU can address (NVLink between nodes of one machine, or
// virtual ranks of one device). Rows go into a peer's slots by roles' own stores (`mapped`), bulk ones, or, on the
// latency path, generic ones; a put, of count vectors, is the calling lane's copy, a signal its
// release store.
//
// Why the contract holds: put_signal's stores and its st.release.sys are the same lane's, in that order, so whoever
// acquires the flag at system scope sees the bytes. Its source was written by this lane's block, which has met. A
// signal behind bulk stores carries them when they are complete (bulk_wait<0>) and this lane's observations: they are
// its own, or those of lanes that it has met since; generic stores are its observations in the same way. The acquire's
// proxy fence (CudaArch) orders bulk loads of either.
#pragma once
#include "arch/concept.h"
#include "transport/concept.h"

namespace hep {

class P2PDevice {
 public:
  // segments[node]: the rail peer's segment as mapped here; the table is in device memory.
  explicit P2PDevice(unsigned char* const* segments) : segments_(segments) {}

  HEP_DEVICE unsigned char* mapped(int node) const { return segments_[node]; }
  template <class A>
  HEP_DEVICE void put(A&, int node, uint64_t offset, const void* src, uint64_t bytes) const {
    copy(segments_[node] + offset, static_cast<const unsigned char*>(src), bytes);
  }
  template <class A>
  HEP_DEVICE void put_signal(A& a, int node, uint64_t offset, const void* src, uint64_t bytes, uint64_t flag,
                             uint64_t value) const {
    put(a, node, offset, src, bytes);
    signal(a, node, flag, value);
  }
  template <class A>
  HEP_DEVICE void signal(A& a, int node, uint64_t flag, uint64_t value) const {
    a.st_release_sys(reinterpret_cast<uint64_t*>(segments_[node] + flag), value);
  }
  template <class A>
  HEP_DEVICE bool test_signal(A& a, const uint64_t* flag, uint64_t value) const {
    return a.ld_acquire_sys(flag) >= value;
  }
  template <class A>
  HEP_DEVICE uint64_t read_signal(A& a, const uint64_t* flag, uint64_t) const {
    return a.ld_acquire_sys(flag);
  }
  template <class A>
  HEP_DEVICE void wait_signal(A& a, const uint64_t* flag, uint64_t value, const WaitInfo& info) const {
    a.wait_ge_sys(flag, value, info);
  }

 private:
  // Bytes and addresses are multiples of 16. Eight loads in flight hide some of the latency of a lone lane.
  HEP_DEVICE static void copy(unsigned char* dst, const unsigned char* src, uint64_t bytes) {
    constexpr int kBatch = 8;
    auto* to = reinterpret_cast<uint4*>(dst);
    const auto* from = reinterpret_cast<const uint4*>(src);
    const uint64_t n = bytes / 16;
    uint64_t i = 0;
    for (; i + kBatch <= n; i += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) v[k] = __ldcg(from + i + k);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) to[i + k] = v[k];
    }
    for (; i < n; ++i) to[i] = __ldcg(from + i);
  }

  unsigned char* const* segments_;
};

}  // namespace hep
