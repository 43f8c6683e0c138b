// An executor with a stream, as a GPU has: its launches end after the call that made them has returned.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>

#include "arch/host/errors.h"
#include "arch/host/idle.h"
#include "kernels/instances/executor.h"
#include "layout/count_notification.h"

namespace hep::test {

// Runs the launches of another executor on a thread of its own, one after another.
class StreamedExecutor final : public Executor {
 public:
  explicit StreamedExecutor(std::unique_ptr<Executor> machine)
      : machine_(std::move(machine)), worker_([this] { work(); }) {}
  ~StreamedExecutor() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    worker_.join();
  }
  void exchange(const ExchangeParams& p, const LaunchSettings& s) override {
    ++launches_;
    push([this, p, kernel = of_a_kernel(s)] {
      ExchangeParams held = p;
      if (late) held.notification_ticket = 0;
      machine_->exchange(held, kernel);
      if (late) notify(p);
    });
  }
  void dispatch(DispatchParams& p, const LaunchSettings& s) override {
    ++launches_;
    push([this, p, kernel = of_a_kernel(s)]() mutable { machine_->dispatch(p, kernel); });
  }
  void combine(CombineParams& p, const LaunchSettings& s) override {
    ++launches_;
    push([this, p, kernel = of_a_kernel(s)]() mutable { machine_->combine(p, kernel); });
  }
  int most_blocks() const override { return blocks; }
  void require_shared_memory(const ExchangeParams&) const override { require_shared_memory(); }
  void require_shared_memory(const DispatchParams&) const override { require_shared_memory(); }
  void require_shared_memory(const CombineParams&) const override { require_shared_memory(); }
  void drain() noexcept override {
    std::unique_lock lock(mutex_);
    ++drains;
    changed_.wait(lock, [&] { return !busy_ && stream_.empty(); });
  }
  void read(void* to, const void* from, uint64_t bytes) override {
    drain();
    std::memcpy(to, from, bytes);
  }
  std::optional<TimeoutReport> timeout_report() override {
    std::lock_guard lock(mutex_);
    return died_;
  }
  void abort() noexcept override {
    aborted = true;
    machine_->abort();
  }

  // Other work of the caller's on the same stream.
  void push(std::function<void()> job) {
    {
      std::lock_guard lock(mutex_);
      stream_.push_back(std::move(job));
    }
    changed_.notify_all();
  }
  int drains = 0;
  std::atomic<bool> aborted{false};
  bool late = false;          // the counts come when whoever waits for them has done so for long
  int blocks = 1000;          // that a launch may have
  bool shared_memory = true;  // whether there is enough of it

 private:
  // A kernel cannot ask the host's user whether to go on: only the host does that, while it waits.
  static LaunchSettings of_a_kernel(LaunchSettings s) {
    s.interrupted = nullptr;
    return s;
  }
  void require_shared_memory() const {
    if (!shared_memory) throw std::invalid_argument("too little shared memory");
  }
  void notify(const ExchangeParams& p) {
    std::this_thread::sleep_for(std::chrono::milliseconds(8));
    std::atomic_ref(*CountNotification::ticket(p.notification)).store(p.notification_ticket, std::memory_order_release);
  }
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return closing_ || !stream_.empty(); });
      if (stream_.empty()) return;
      const auto job = std::move(stream_.front());
      stream_.pop_front();
      busy_ = true;
      lock.unlock();
      std::optional<TimeoutReport> died;
      try {
        job();
      } catch (const host::DeadlineError& e) {
        died = e.timeout_report();
        abort();
      }
      lock.lock();
      if (died) died_ = died;
      busy_ = false;
      changed_.notify_all();
    }
  }
  std::unique_ptr<Executor> machine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> stream_;
  std::optional<TimeoutReport> died_;
  bool busy_ = false, closing_ = false;
  std::thread worker_;
};

}  // namespace hep::test
