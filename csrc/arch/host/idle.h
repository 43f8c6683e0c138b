// What to do when nothing can run. Ranks are processes that share cores (Idle): spin for as long as a peer on another
// core needs to answer, then offer the core, then sleep in growing steps. A GPU shares none (EagerIdle).
#pragma once
#include <sched.h>

#include <chrono>
#include <cstdint>
#include <thread>

namespace hep::host {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Idle {
 public:
  void reset() { rounds_ = 0; }
  // One fruitless round. Returns true when it is worth reading the clock (the spin is over).
  bool round() {
    ++rounds_;
    if (rounds_ <= kSpinRounds) {
      cpu_relax();
      return false;
    }
    if (rounds_ <= kSpinRounds + kYieldRounds) {
      sched_yield();
    } else {
      const int step = (rounds_ - kSpinRounds - kYieldRounds) / kRoundsPerSleep;
      const int64_t us = step > 3 ? kMaxSleepUs : int64_t{kMinSleepUs} << step;
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    return true;
  }

 private:
  static constexpr int kSpinRounds = 64;   // a few microseconds
  static constexpr int kYieldRounds = 64;  // 0.3 us each on a free core, a time slice on a busy one
  static constexpr int kRoundsPerSleep = 8;
  static constexpr int kMinSleepUs = 20, kMaxSleepUs = 200;
  int rounds_ = 0;
};

// For one who waits for a device that is idle until he has seen its answer: he spins, and offers the core when he looks
// after other things.
class EagerIdle {
 public:
  // One fruitless round. Returns true about once a millisecond.
  bool round() {
    cpu_relax();
    if (++rounds_ % kRoundsPerLook) return false;
    const int64_t now = now_ns();
    if (now < next_) return false;
    next_ = now + kPeriodNs;
    sched_yield();
    return true;
  }

 private:
  static constexpr uint32_t kRoundsPerLook = 32;  // at the clock: a microsecond or so
  static constexpr int64_t kPeriodNs = 1'000'000;
  uint32_t rounds_ = 0;
  int64_t next_ = now_ns() + kPeriodNs;
};

}  // namespace hep::host
