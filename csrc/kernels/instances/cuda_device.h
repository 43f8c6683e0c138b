// A device as an executor of any rail has it: the stream of its launches, the deadline, the report of a wait that
// expired, and the end of launches.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/instances/cuda_kernels.h"
#include "kernels/instances/cuda_memory.h"
#include "kernels/instances/executor.h"

namespace hep::cuda {

class Device {
 public:
  Device() {
    const OutsideCaptures outside;
    check(cudaGetDevice(&ordinal_), "current device");
    check(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, ordinal_), "number of SMs");
    check(cudaDeviceGetAttribute(&max_shared_, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal_), "shared memory");
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, sizeof(DeviceTimeoutReport), cudaHostAllocMapped), "mapped memory");
    timeout_report_.reset(static_cast<DeviceTimeoutReport*>(memory));
    std::memset(memory, 0, sizeof(DeviceTimeoutReport));
    check(cudaMalloc(&memory, sizeof(CudaControl)), "device memory");
    control_.reset(static_cast<CudaControl*>(memory));
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    switched_.reset(event);
  }
  ~Device() { drain(); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cudaStream_t stream() const { return stream_; }
  int num_sms() const { return num_sms_; }
  int max_shared() const { return max_shared_; }
  int ordinal() const { return ordinal_; }

  void use(cudaStream_t stream) {
    if (stream == stream_) return;
    // A capture may not depend on work outside it; whoever captures has drained the device before (torch.cuda.graph
    // does).
    if (capturing(stream) == capturing(stream_)) {
      check(cudaEventRecord(switched_.get(), stream_), "event");
      check(cudaStreamWaitEvent(stream, switched_.get(), 0), "event");
    }
    stream_ = stream;
  }
  static bool capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t said = cudaStreamIsCapturing(stream, &status);
    if (said == cudaErrorStreamCaptureImplicit) {  // the legacy stream, while another captures: it never does itself
      (void)cudaGetLastError();
      return false;
    }
    check(said, "capture status");
    return status != cudaStreamCaptureStatusNone;
  }
  CudaControl* control(const LaunchSettings& s) {
    if (s.timeout_s != timeout_s_) {
      DeviceTimeoutReport* seen_by_device = nullptr;
      check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&seen_by_device), timeout_report_.get(), 0),
            "mapped memory");
      const CudaControl c{uint64_t(s.timeout_s * 1e9), seen_by_device, s.world.rank, 0};
      check(cudaMemcpyAsync(control_.get(), &c, sizeof c, cudaMemcpyHostToDevice, stream_), "upload");
      timeout_s_ = s.timeout_s;
    }
    world_ = s.world;
    return control_.get();
  }
  // Whether all launches so far have ended. Throws when one of them failed.
  bool idle() const {
    const OutsideCaptures outside;
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status == cudaErrorNotReady) return false;
    check(status, "a kernel of this buffer or one before it");
    return true;
  }
  // Until they have. Every one of them ends, by itself or by its deadline.
  void wait() const {
    for (int rounds = 0; !idle(); ++rounds)
      if (rounds > 2000) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  void drain() const noexcept {
    const OutsideCaptures outside;
    (void)cudaStreamSynchronize(stream_);
  }
  // All lanes leave in their next wait, and those of launches to come at once. By a store: a copy would need an engine
  // and a hardware queue, either of which others may hold for as long as the kernel runs. What is before them on the
  // stream is not ours, and may never end: a second of patience, no more.
  void abort() {
    std::atomic_ref(timeout_report_->raised_by_host).store(1, std::memory_order_release);
    for (int ms = 0; ms < 1000 && !idle(); ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::optional<TimeoutReport> timeout_report() const {
    const volatile DeviceTimeoutReport& d = *timeout_report_;
    if (!d.written) return std::nullopt;
    std::atomic_thread_fence(std::memory_order_acquire);
    TimeoutReport o;
    o.site = Site(d.site);
    o.rank = world_.rank;
    o.node = world_.node();
    o.peer = d.peer;
    o.peer_node = d.peer >= 0 ? d.peer / world_.num_local_ranks : -1;
    o.block = d.block;
    o.warp = d.warp;
    o.chunk = d.chunk;
    o.expected = d.expected;
    o.seen = d.seen;
    o.waited_s = double(d.waited_ns) * 1e-9;
    o.role = role_name(Role(d.role));
    return o;
  }

 private:
  int ordinal_ = 0, num_sms_ = 0, max_shared_ = 0;
  double timeout_s_ = -1;
  World world_;
  LentStream own_;
  cudaStream_t stream_ = own_.stream;
  std::unique_ptr<CUevent_st, Freed<cudaEventDestroy>> switched_;
  std::unique_ptr<DeviceTimeoutReport, Freed<cudaFreeHost>> timeout_report_;  // mapped
  std::unique_ptr<CudaControl, Freed<cudaFree>> control_;                     // the device's
};

}  // namespace hep::cuda
