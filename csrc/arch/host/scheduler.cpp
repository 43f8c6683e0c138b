// The fiber executor's scheduler: choosing the next lane, idling, deadlines, ending a failed launch.
#include "arch/host/scheduler.h"

#include <stdexcept>
#include <utility>

#include "arch/host/errors.h"

namespace hep::host {
namespace {

constexpr uint64_t kZero = 0;
constexpr WaitFor kRunnable{&kZero, 0};
constexpr WaitFor kFinished{&kZero, 1};  // never met
constexpr uint64_t kBusyRoundsPerClock = 1024;
constexpr uint64_t kRoundsHeldBack = 64;
constexpr int64_t kInterruptNs = 100'000'000;

bool is_finished(const WaitFor& w) {
  return w.word == &kZero && w.value == 1;
}

}  // namespace

Scheduler& Scheduler::of_this_thread() {
  static thread_local Scheduler scheduler;
  return scheduler;
}

void Scheduler::run(const LaunchPlan& plan) {
  if (plan_ != nullptr) throw std::logic_error("launch() called from inside a kernel");
  num_lanes_ = num_alive_ = static_cast<uint32_t>(plan.lanes.size());
  if (num_lanes_ == 0) return;
  while (fibers_.size() < num_lanes_) fibers_.push_back(std::make_unique<Fiber>());
  waits_.assign(num_lanes_, kRunnable);
  ready_.reserve(num_lanes_);
  for (uint32_t i = 0; i < num_lanes_; ++i) {
    plan.lanes[i]->index = i;
    plan.lanes[i]->scheduler = this;
    fibers_[i]->assign(&Scheduler::lane_entry, plan.lanes[i]);
  }
  has_progress_ = false;
  for (const LaunchConfig* config : plan.configs) has_progress_ |= static_cast<bool>(config->progress);
  plan_ = &plan;
  turn_ = 1;
  busy_ = true;
  aborting_ = false;
  fruitless_ = 0;
  held_back_ = 0;
  asked_interrupted_ns_ = 0;
  rng_ = Rng(plan.seed);
  idle_.reset();
  running_ = asking_ = nullptr;
  FiberContext* next = &fibers_[pick(num_lanes_ - 1)]->context();
  for (;;) {
    fiber_switch(launcher_, *next);
    if (asking_ == nullptr) break;
    ask_interrupted();
    next = std::exchange(asking_, nullptr);
  }
  plan_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

FiberContext& Scheduler::lane_entry(void* arg) {
  LaneBase& me = *static_cast<LaneBase*>(arg);
  Scheduler& s = *me.scheduler;
  std::exception_ptr error;
  try {
    if (!s.aborting_) s.plan_->lane_main(me);
  } catch (const Abandoned&) {
  } catch (...) {
    error = std::current_exception();
  }
  s.waits_[me.index] = kFinished;
  if (error) s.fail(std::move(error));
  if (--s.num_alive_ == 0) return s.launcher_;
  s.running_ = &s.fibers_[me.index]->context();
  return s.fibers_[s.pick(me.index)]->context();
}

void Scheduler::fail(std::exception_ptr error) {
  if (aborting_) return;  // what follows the first failure is its consequence
  error_ = std::move(error);
  aborting_ = true;
  for (uint32_t i = 0; i < num_lanes_; ++i) {
    if (is_finished(waits_[i])) continue;
    plan_->lanes[i]->verdict = Verdict::kAbandoned;
    waits_[i] = kRunnable;
  }
}

void Scheduler::wait(LaneBase& me, const WaitFor& condition, const WaitInfo& info) {
  if (aborting_) throw Abandoned{};
  me.info = info;
  me.wait_since_ns = 0;
  suspend(me, condition);
  if (me.verdict != Verdict::kGo) [[unlikely]] {
    waits_[me.index] = condition;
    raise(me);
  }
}

void Scheduler::poll(LaneBase& me, const WaitInfo& info, uint64_t expected, uint64_t seen) {
  if (aborting_) throw Abandoned{};
  me.info = info;
  me.poll_expected = expected;
  me.poll_seen = seen;
  const WaitFor condition{&turn_, turn_ + 1, false, true};
  suspend(me, condition);
  if (me.verdict != Verdict::kGo) [[unlikely]] {
    waits_[me.index] = condition;
    raise(me);
  }
}

void Scheduler::step(LaneBase& me) {
  if (aborting_) throw Abandoned{};
  if (!rng_.one_in(4)) return;
  suspend(me, kRunnable);
  if (me.verdict != Verdict::kGo) raise(me);
}

void Scheduler::suspend(LaneBase& me, const WaitFor& condition) {
  waits_[me.index] = condition;
  running_ = &fibers_[me.index]->context();
  const uint32_t next = pick(me.index);
  if (next != me.index) fiber_switch(fibers_[me.index]->context(), fibers_[next]->context());
}

void Scheduler::raise(LaneBase& me) {
  if (me.verdict == Verdict::kAbandoned) throw Abandoned{};
  me.verdict = Verdict::kGo;
  const WaitFor& w = waits_[me.index];
  const int64_t since = w.poll ? me.poll_since_ns : me.wait_since_ns;
  const double waited_s = static_cast<double>(now_ns() - since) * 1e-9;
  const uint64_t word = load_word(w.word, std::memory_order_relaxed);
  uint64_t expected = w.value, seen = word;
  if (w.poll) {
    expected = me.poll_expected;
    seen = me.poll_seen;
  }
  // the phase bit it waited to see
  if (w.phase) {
    expected = w.value ^ 1;
    seen = word & 1;
  }
  throw_deadline(me, me.info, expected, seen, waited_s);
}

uint32_t Scheduler::pick(uint32_t after) {
  return plan_->seeded ? pick_seeded() : pick_in_turn(after);
}

uint32_t Scheduler::pick_in_turn(uint32_t i) {
  for (;;) {
    if (++i >= num_lanes_) {
      i = 0;
      end_round();
    }
    const WaitFor& w = waits_[i];
    if (w.met()) {
      busy_ |= !w.poll;
      return i;
    }
  }
}

// Every choice is a round: one load may land, the transport may move, then any ready lane may go. For a
// while at a time one lane is held back, or no lane would ever fall far behind the others by chance.
uint32_t Scheduler::pick_seeded() {
  for (;;) {
    if (rng_.one_in(3)) run_engine();
    if (rng_.one_in(kRoundsHeldBack)) held_back_ = static_cast<uint32_t>(rng_.below(num_lanes_));
    ready_.clear();
    bool working = false, others_work = false;
    for (uint32_t i = 0; i < num_lanes_; ++i) {
      if (!waits_[i].met()) continue;
      ready_.push_back(i);
      working |= !waits_[i].poll;
      others_work |= !waits_[i].poll && i != held_back_;
    }
    // Pollers alone are no sign of life: let the asynchronous world move before they look again.
    if (!working) run_engine();
    end_round();
    if (others_work) std::erase(ready_, held_back_);
    if (ready_.empty()) continue;
    const uint32_t next = ready_[rng_.below(ready_.size())];
    busy_ |= !waits_[next].poll;
    return next;
  }
}

void Scheduler::end_round() {
  if (has_progress_ && !aborting_) run_progress();
  ++turn_;
  if (busy_) {
    busy_ = false;
    fruitless_ = 0;
    idle_.reset();
    if (turn_ % kBusyRoundsPerClock == 0) look_at_clock();
  } else if (!plan_->seeded || ++fruitless_ > 4 * num_lanes_) {  // seeded: pollers are drawn one at a time
    if (idle_.round()) look_at_clock();
  }
}

// These callbacks run on whichever lane's stack is choosing, so what they throw fails the launch here.
void Scheduler::run_progress() {
  try {
    for (const LaunchConfig* config : plan_->configs) {
      if (config->progress) busy_ |= config->progress();
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

void Scheduler::run_engine() {
  if (plan_->engine == nullptr || aborting_) return;
  try {
    busy_ |= plan_->engine->complete_one(rng_);
  } catch (...) {
    fail(std::current_exception());
  }
}

void Scheduler::look_at_clock() {
  if (aborting_) return;
  const int64_t now = now_ns();
  if (asked_interrupted_ns_ == 0) asked_interrupted_ns_ = now;
  if (now - asked_interrupted_ns_ >= kInterruptNs) {
    asked_interrupted_ns_ = now;
    if (running_ == nullptr) {
      ask_interrupted();
    } else {
      asking_ = running_;
      fiber_switch(*asking_, launcher_);
    }
    if (aborting_) return;
  }
  check_deadlines(now);
}

// On the launcher's stack: an interpreter's signal handlers may run here, which want more of it than a lane has, and
// Python 3.14 ends a process whose stack is another than its thread's.
void Scheduler::ask_interrupted() {
  try {
    for (const LaunchConfig* config : plan_->configs) {
      if (config->interrupted && config->interrupted()) throw Interrupted{};
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

// Ends at most one wait, when some wait has expired: the most telling one, then the oldest. Waits that began a little
// later and would expire next take part: a role that waits for the whole operation began before the one that waits
// for the rank that is missing.
void Scheduler::check_deadlines(int64_t now) {
  LaneBase* chosen = nullptr;
  int64_t chosen_since = 0;
  bool any_expired = false;
  for (uint32_t i = 0; i < num_lanes_; ++i) {
    const WaitFor& w = waits_[i];
    LaneBase& lane = *plan_->lanes[i];
    if (w.word == &kZero) continue;  // runs, or has ended
    int64_t& since = w.poll ? lane.poll_since_ns : lane.wait_since_ns;
    if (since == 0) since = now;
    const double share = static_cast<double>(now - since) * 1e-9 / lane.block->config->timeout_s;
    if (share < 0.5 || (!w.poll && w.met())) continue;
    any_expired |= share >= 1;
    const auto telling = [](const LaneBase& l) { return how_telling(l.info, l.block->config->rank); };
    const int more_telling = chosen == nullptr ? 1 : telling(lane) - telling(*chosen);
    if (more_telling > 0 || (more_telling == 0 && since < chosen_since)) {
      chosen = &lane;
      chosen_since = since;
    }
  }
  if (!any_expired) return;
  chosen->verdict = Verdict::kExpired;
  waits_[chosen->index] = kRunnable;
}

}  // namespace hep::host
