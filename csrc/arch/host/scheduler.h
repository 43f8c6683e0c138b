// The fiber executor: all lanes of a launch are fibers on the launching thread. A lane that waits leaves
// the condition here and hands the thread straight to the next lane whose condition holds, without a
// detour over a scheduler stack. In seeded mode the next lane is a seeded random choice.
#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "arch/host/fiber.h"
#include "arch/host/idle.h"
#include "arch/host/lane.h"
#include "arch/host/rng.h"

namespace hep::host {

// Work that goes on beside the lanes: bulk loads in flight.
class AsyncEngine {
 public:
  virtual ~AsyncEngine() = default;
  virtual bool complete_one(Rng& rng) = 0;  // false: nothing in flight
};

// What a launch consists of, for either executor.
struct LaunchPlan {
  std::span<LaneBase* const> lanes;
  std::function<void(LaneBase&)> lane_main;
  std::vector<const LaunchConfig*> configs;
  AsyncEngine* engine = nullptr;
  bool seeded = false;  // fibers: random choice of the next lane, drawn from `seed`
  uint64_t seed = 0;
};

class Scheduler {
 public:
  static Scheduler& of_this_thread();

  void run(const LaunchPlan& plan);

  // Called by lanes. Returns when `condition` holds; throws DeadlineError or Abandoned otherwise.
  void wait(LaneBase& me, const WaitFor& condition, const WaitInfo& info);
  void poll(LaneBase& me, const WaitInfo& info, uint64_t expected, uint64_t seen);
  void progressed(LaneBase& me) {
    me.poll_since_ns = 0;
    busy_ = true;
  }
  // Seeded mode: a point where another lane may go first.
  void step(LaneBase& me);

 private:
  static FiberContext& lane_entry(void* lane);
  void suspend(LaneBase& me, const WaitFor& condition);
  uint32_t pick(uint32_t after);
  uint32_t pick_in_turn(uint32_t after);
  uint32_t pick_seeded();
  void end_round();
  void run_progress();
  void run_engine();
  void look_at_clock();
  void ask_interrupted();
  void check_deadlines(int64_t now);
  void fail(std::exception_ptr error);
  [[noreturn]] void raise(LaneBase& me);

  std::vector<WaitFor> waits_;  // by lane index; all a scan touches
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<uint32_t> ready_;
  FiberContext launcher_;
  FiberContext* running_ = nullptr;  // the lane's that chooses the next one; null: the launcher's
  FiberContext* asking_ = nullptr;   // likewise, while the launcher asks whether to go on
  const LaunchPlan* plan_ = nullptr;
  uint32_t num_lanes_ = 0, num_alive_ = 0;
  uint64_t turn_ = 0;          // rounds so far; pollers run once per turn
  bool busy_ = false;          // something moved in this round
  bool has_progress_ = false;  // some config has a progress function
  bool aborting_ = false;
  uint32_t fruitless_ = 0;
  uint32_t held_back_ = 0;  // seeded mode: goes only when no other lane works
  Idle idle_;
  Rng rng_;
  int64_t asked_interrupted_ns_ = 0;
  std::exception_ptr error_;
};

// The executor as HostArch sees it. One thread runs everything, so block-local words need no atomics.
struct FiberExec {
  static constexpr bool kThreads = false;

  // Replaces `word` by next(word), which may be evaluated more than once; returns the old value.
  template <class F>
  static uint64_t swap_word(uint64_t& word, std::memory_order, F next) {
    const uint64_t old = word;
    word = next(old);
    return old;
  }
  static void wait(LaneBase& me, const WaitFor& condition, const WaitInfo& info,
                   std::memory_order = std::memory_order_acquire) {
    if (!condition.met()) me.scheduler->wait(me, condition, info);
  }
  static void poll_idle(LaneBase& me, const WaitInfo& info, uint64_t expected, uint64_t seen) {
    me.scheduler->poll(me, info, expected, seen);
  }
  static void poll_reset(LaneBase& me) { me.scheduler->progressed(me); }
  static void step(LaneBase& me) { me.scheduler->step(me); }
  static void run(const LaunchPlan& plan) { Scheduler::of_this_thread().run(plan); }
};

}  // namespace hep::host
