// A rail that is as unhelpful as the contract allows: a put reads its source at once or late, puts land in any order,
// signals overtake everything that does not order them. For tests; what works here does not lean on luck.
#pragma once
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "transport/concept.h"

namespace hep {

class LoopbackTransport {
 public:
  LoopbackTransport(unsigned char* const* segments, uint64_t seed) : segments_(segments), rng_(seed) {}

  template <class A>
  void put(A&, int node, uint64_t offset, const void* src, uint64_t bytes) {
    post({segments_[node] + offset, src, bytes, nullptr, 0, {}});
  }
  template <class A>
  void put_signal(A&, int node, uint64_t offset, const void* src, uint64_t bytes, uint64_t flag, uint64_t value) {
    post({segments_[node] + offset, src, bytes, reinterpret_cast<uint64_t*>(segments_[node] + flag), value, {}});
  }
  template <class A>
  void signal(A&, int node, uint64_t flag, uint64_t value) {
    post({nullptr, nullptr, 0, reinterpret_cast<uint64_t*>(segments_[node] + flag), value, {}});
  }
  template <class A>
  bool test_signal(A& a, const uint64_t* flag, uint64_t value) {
    return a.ld_acquire_sys(flag) >= value;
  }
  template <class A>
  uint64_t read_signal(A& a, const uint64_t* flag, uint64_t) {
    return a.ld_acquire_sys(flag);
  }
  template <class A>
  void wait_signal(A& a, const uint64_t* flag, uint64_t value, WaitInfo info) {
    a.wait_ge_sys(flag, value, info);
  }
  // Completes one pending operation, chosen at random, most of the time. True while any was pending, so that the
  // executor, which calls it whenever it looks for work, keeps coming back.
  bool progress() {
    std::lock_guard lock(mutex_);
    if (ops_.empty()) return false;
    if (rng_() % 4 == 0) return true;
    const size_t i = rng_() % ops_.size();
    const Op& op = ops_[i];
    if (!op.flag && rng_() % 8 != 0) return false;  // nobody waits for a plain put: it may take its time
    if (op.bytes) std::memcpy(op.dst, op.taken.empty() ? op.src : op.taken.data(), op.bytes);
    if (op.flag) raise(op.flag, op.value);
    std::swap(ops_[i], ops_.back());
    ops_.pop_back();
    return true;
  }
  // Completes whatever is pending. A NIC goes on when the kernel has ended; here nobody else would.
  void settle() {
    while (pending()) (void)progress();
  }

 private:
  struct Op {
    unsigned char* dst;
    const void* src;
    uint64_t bytes;
    uint64_t* flag;
    uint64_t value;
    std::vector<unsigned char> taken;  // the source, where it is read at once
  };
  // A signal is written, whatever is there: who sends two to one location must know that the first has come.
  static void raise(uint64_t* flag, uint64_t value) {
    std::atomic_ref<uint64_t>(*flag).store(value, std::memory_order_release);
  }
  void post(Op op) {
    std::lock_guard lock(mutex_);
    const auto* src = static_cast<const unsigned char*>(op.src);
    if (op.bytes && rng_() % 2 != 0) op.taken.assign(src, src + op.bytes);
    ops_.push_back(std::move(op));
  }
  size_t pending() {
    std::lock_guard lock(mutex_);
    return ops_.size();
  }

  unsigned char* const* segments_;
  std::mutex mutex_;
  std::mt19937_64 rng_;
  std::vector<Op> ops_;
};

}  // namespace hep
