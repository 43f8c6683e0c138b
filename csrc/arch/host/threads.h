// The thread executor: one OS thread per lane, so that ThreadSanitizer sees every ordering the code relies
// on. The launching thread plays the asynchronous world: bulk loads, the transport's progress, Ctrl-C.
#pragma once
#include <atomic>
#include <exception>
#include <mutex>

#include "arch/host/lane.h"
#include "arch/host/scheduler.h"

namespace hep::host {

class ThreadTeam {
 public:
  static void run(const LaunchPlan& plan);

  void wait(LaneBase& me, const WaitFor& condition, const WaitInfo& info, std::memory_order order);
  void poll(LaneBase& me, const WaitInfo& info, uint64_t expected, uint64_t seen);
  // A point where the lane may lose the processor.
  void step(LaneBase& me);

 private:
  void lane_entry(LaneBase& me);
  void drive();
  void fail(std::exception_ptr error, int telling);
  void check_abandoned() const {
    if (aborting_.load(std::memory_order_relaxed)) throw Abandoned{};
  }

  const LaunchPlan* plan_ = nullptr;
  std::atomic<bool> aborting_ = false;
  std::atomic<size_t> num_alive_ = 0;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  int error_telling_ = 0;  // see how_telling
};

struct ThreadExec {
  static constexpr bool kThreads = true;

  template <class F>
  static uint64_t swap_word(uint64_t& word, std::memory_order order, F next) {
    std::atomic_ref<uint64_t> ref(word);
    // Acquire: `next` may look at what was written before the arrivals that it finds in the word.
    uint64_t old = ref.load(std::memory_order_acquire);
    while (!ref.compare_exchange_weak(old, next(old), order, std::memory_order_relaxed))
      old = ref.load(std::memory_order_acquire);
    return old;
  }
  static void wait(LaneBase& me, const WaitFor& condition, const WaitInfo& info,
                   std::memory_order order = std::memory_order_acquire) {
    if (!condition.met(order)) me.team->wait(me, condition, info, order);
  }
  static void poll_idle(LaneBase& me, const WaitInfo& info, uint64_t expected, uint64_t seen) {
    me.team->poll(me, info, expected, seen);
  }
  static void poll_reset(LaneBase& me) { me.poll_since_ns = 0; }
  static void step(LaneBase& me) { me.team->step(me); }
  static void run(const LaunchPlan& plan) { ThreadTeam::run(plan); }
};

}  // namespace hep::host
