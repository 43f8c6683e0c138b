// A rail between virtual ranks of one device that is as unhelpful as one lane can make it while it copies itself:
// bytes land in a scattered order, puts and signals come late by pseudo-random times. What it cannot do is break an
// order that the contract leaves open: a plain put is this lane's own stores, so its later signal carries them. Roles
// use put_signal and signal alone, so nothing is lost by it; the host's LoopbackTransport does hold plain puts back.
// For tests; what works here does not lean on a rail that is quick and tidy.
#pragma once
#include "arch/concept.h"
#include "transport/concept.h"

namespace hep {

class LoopbackDevice {
 public:
  LoopbackDevice(unsigned char* const* segments, uint64_t seed) : segments_(segments), state_(uint32_t(seed) | 1) {}

  template <class A>
  HEP_DEVICE void put(A&, int node, uint64_t offset, const void* src, uint64_t bytes) {
    dawdle();
    copy(segments_[node] + offset, static_cast<const unsigned char*>(src), bytes);
  }
  template <class A>
  HEP_DEVICE void put_signal(A& a, int node, uint64_t offset, const void* src, uint64_t bytes, uint64_t flag,
                             uint64_t value) {
    put(a, node, offset, src, bytes);
    dawdle();
    // The one order that the verb promises: own bytes, then flag (same lane, release at system scope).
    a.st_release_sys(reinterpret_cast<uint64_t*>(segments_[node] + flag), value);
  }
  template <class A>
  HEP_DEVICE void signal(A& a, int node, uint64_t flag, uint64_t value) {
    dawdle();
    a.st_release_sys(reinterpret_cast<uint64_t*>(segments_[node] + flag), value);
  }
  template <class A>
  HEP_DEVICE bool test_signal(A& a, const uint64_t* flag, uint64_t value) {
    return a.ld_acquire_sys(flag) >= value;
  }
  template <class A>
  HEP_DEVICE uint64_t read_signal(A& a, const uint64_t* flag, uint64_t) {
    return a.ld_acquire_sys(flag);
  }
  template <class A>
  HEP_DEVICE void wait_signal(A& a, const uint64_t* flag, uint64_t value, const WaitInfo& info) {
    a.wait_ge_sys(flag, value, info);
  }

 private:
  // Up to 16 microseconds, by a xorshift of this lane's own.
  HEP_DEVICE void dawdle() {
    if (!mixed_) {
      state_ += 2654435762u * (blockIdx.x * blockDim.x + threadIdx.x);
      mixed_ = true;
    }
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    if (state_ % 4 == 0) __nanosleep(state_ >> 18);
  }
  // Word i of the copy is word (i * 7 + n / 2) mod n when 7 does not divide n, else from the end: a stale word anywhere
  // shows.
  HEP_DEVICE static void copy(unsigned char* dst, const unsigned char* src, uint64_t bytes) {
    auto* to = reinterpret_cast<uint4*>(dst);
    const auto* from = reinterpret_cast<const uint4*>(src);
    const uint64_t n = bytes / 16;
    uint64_t at = n / 2;
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t word = n % 7 ? at : n - 1 - i;
      to[word] = __ldcg(from + word);
      at += 7;
      if (at >= n) at %= n;
    }
  }

  unsigned char* const* segments_;
  uint32_t state_;
  bool mixed_ = false;  // the lane's own number is in state_
};

}  // namespace hep
