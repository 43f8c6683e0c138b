// Copies and counters by the runtime's copies and the driver's stream-ordered store.
#include "runtime/cuda_copies.h"

#include <chrono>
#include <thread>

#include "kernels/instances/cuda_driver.h"
#include "runtime/cuda_entry.h"

namespace hep::cuda {
namespace {

class Copies final : public CopyStream {
 public:
  void* stream() const override { return lent_.stream; }
  void copy(unsigned char* to, const unsigned char* from, size_t bytes) override {
    const OnDevice on(lent_.device);  // of this thread, which may be a new one
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, lent_.stream), "a copy out of registered memory");
  }

 private:
  LentStream lent_;
};

class Reader final : public CounterReader {
 public:
  Reader() {
    const OutsideCaptures outside;
    void* cell = nullptr;
    check(cudaHostAlloc(&cell, sizeof(uint64_t), cudaHostAllocPortable), "pinned memory");
    cell_.reset(static_cast<uint64_t*>(cell));
  }
  std::optional<uint64_t> read(const unsigned char* from, double patience_s) override {
    using Clock = std::chrono::steady_clock;
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(patience_s));
    const std::lock_guard lock(mutex_);
    const OutsideCaptures outside;
    const OnDevice on(lent_.device);
    for (;;) {
      if (!under_way_) {
        check(cudaMemcpyAsync(cell_.get(), from, sizeof(uint64_t), cudaMemcpyDeviceToHost, lent_.stream),
              "reading a counter");
        under_way_ = from;
      }
      for (int rounds = 0; !is_there(); ++rounds) {
        if (Clock::now() > end) return std::nullopt;
        if (rounds > kSpins) std::this_thread::sleep_for(std::chrono::microseconds(5));
      }
      const bool asked_for = under_way_ == from;  // not what a call wanted that lost its patience
      under_way_ = nullptr;
      if (asked_for) return *static_cast<const volatile uint64_t*>(cell_.get());
    }
  }

 private:
  static constexpr int kSpins = 64;
  bool is_there() const {
    const cudaError_t status = cudaStreamQuery(lent_.stream);
    if (status == cudaErrorNotReady) return false;
    check(status, "reading a counter");
    return true;
  }

  std::mutex mutex_;
  LentStream lent_;
  std::unique_ptr<uint64_t, Freed<cudaFreeHost>> cell_;  // pinned; its end waits for the copy into it
  const unsigned char* under_way_ = nullptr;
};

}  // namespace

void write_counter(unsigned char* to, uint64_t value, void* stream) {
  static const auto write = [] {
    decltype(&cuStreamWriteValue64) f = nullptr;
    find_driver("cuStreamWriteValue64", f);
    return f;
  }();
  check_driver(
      write(static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(to), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "storing a counter (cuStreamWriteValue64)");
}

std::unique_ptr<CopyStream> make_copy_stream() {
  return std::make_unique<Copies>();
}
std::unique_ptr<CounterReader> make_counter_reader() {
  return std::make_unique<Reader>();
}

}  // namespace hep::cuda
