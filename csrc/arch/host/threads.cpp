// One OS thread per lane: waiting, deadlines, and the launching thread's work beside them.
#include "arch/host/threads.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "arch/host/errors.h"
#include "arch/host/idle.h"

namespace hep::host {
namespace {

constexpr int64_t kInterruptNs = 100'000'000;
constexpr int64_t kYieldNs = 20'000, kMinSleepNs = 20'000, kMaxSleepNs = 5'000'000;
constexpr int kCause = 3;  // not a wait: tells more than any timeout report

bool expired(const LaneBase& lane, int64_t since) {
  return static_cast<double>(now_ns() - since) * 1e-9 >= lane.block->config->timeout_s;
}

// Of a lane that has found nothing for so long: there are dozens of lanes a core. It first offers the core, then sleeps
// an eighth of what it has waited already, so that who waits long asks seldom.
void rest(int64_t waited_ns) {
  if (waited_ns < kYieldNs) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp(waited_ns / 8, kMinSleepNs, kMaxSleepNs)));
}

}  // namespace

void ThreadTeam::run(const LaunchPlan& plan) {
  if (plan.lanes.empty()) return;
  ThreadTeam team;
  team.plan_ = &plan;
  team.num_alive_ = plan.lanes.size();
  std::vector<std::thread> threads;
  threads.reserve(plan.lanes.size());
  uint32_t index = 0;
  for (LaneBase* lane : plan.lanes) {
    lane->index = index++;
    lane->team = &team;
  }
  for (LaneBase* lane : plan.lanes) {
    try {
      threads.emplace_back([&team, lane] { team.lane_entry(*lane); });
    } catch (...) {  // the system has no more threads: end those that run
      team.fail(std::current_exception(), kCause);
      team.num_alive_ -= plan.lanes.size() - threads.size();
      break;
    }
  }
  team.drive();
  for (std::thread& thread : threads) thread.join();
  if (team.error_) std::rethrow_exception(std::exchange(team.error_, nullptr));
}

void ThreadTeam::lane_entry(LaneBase& me) {
  try {
    check_abandoned();
    plan_->lane_main(me);
  } catch (const Abandoned&) {
  } catch (const DeadlineError& e) {
    fail(std::current_exception(),
         how_telling({e.timeout_report().site, e.timeout_report().peer}, e.timeout_report().rank));
  } catch (...) {
    fail(std::current_exception(), kCause);
  }
  num_alive_.fetch_sub(1, std::memory_order_release);
}

// Keeps the first error, unless a later one tells more.
void ThreadTeam::fail(std::exception_ptr error, int telling) {
  std::lock_guard lock(error_mutex_);
  if (!error_ || telling > error_telling_) {
    error_ = std::move(error);
    error_telling_ = telling;
  }
  aborting_.store(true, std::memory_order_relaxed);
}

void ThreadTeam::drive() {
  Rng rng(plan_->seed);
  Idle idle;
  int64_t asked_ns = now_ns();
  while (num_alive_.load(std::memory_order_acquire) > 0) {
    bool busy = false;
    try {
      if (plan_->engine != nullptr) busy |= plan_->engine->complete_one(rng);
      if (!aborting_.load(std::memory_order_relaxed)) {
        for (const LaunchConfig* config : plan_->configs) {
          if (config->progress) busy |= config->progress();
        }
        if (!busy && now_ns() - asked_ns >= kInterruptNs) {
          asked_ns = now_ns();
          for (const LaunchConfig* config : plan_->configs) {
            if (config->interrupted && config->interrupted()) throw Interrupted{};
          }
        }
      }
    } catch (...) {
      fail(std::current_exception(), kCause);
    }
    if (busy) idle.reset();
    if (!busy) idle.round();
  }
}

void ThreadTeam::wait(LaneBase& me, const WaitFor& condition, const WaitInfo& info, std::memory_order order) {
  const int64_t since = now_ns();
  while (!condition.met(order)) {
    check_abandoned();
    rest(now_ns() - since);
    if (!expired(me, since)) continue;
    const uint64_t word = load_word(condition.word, std::memory_order_relaxed);
    const double waited_s = static_cast<double>(now_ns() - since) * 1e-9;
    if (condition.phase) throw_deadline(me, info, condition.value ^ 1, word & 1, waited_s);
    throw_deadline(me, info, condition.value, word, waited_s);
  }
}

void ThreadTeam::poll(LaneBase& me, const WaitInfo& info, uint64_t expected, uint64_t seen) {
  check_abandoned();
  if (me.poll_since_ns == 0) me.poll_since_ns = now_ns();
  if (expired(me, me.poll_since_ns)) {
    throw_deadline(me, info, expected, seen, static_cast<double>(now_ns() - me.poll_since_ns) * 1e-9);
  }
  rest(now_ns() - me.poll_since_ns);
}

void ThreadTeam::step(LaneBase& me) {
  check_abandoned();
  // Cheap per-lane pseudo-randomness: lanes must not share state that would order them.
  if ((++me.steps * 0x9e3779b9u + me.index) % 13 == 0) std::this_thread::yield();
}

}  // namespace hep::host
