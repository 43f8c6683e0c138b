// Capture of streams into graphs: what is recorded, and what must not be called meanwhile.
#pragma once
#include <set>

#include "device.h"

namespace hep::ptxr {

using Lock = std::unique_lock<FairMutex>;

struct Node {
  Op op;
  cudaStream_t branch = nullptr;  // the captured stream
  std::vector<size_t> after;      // nodes of other branches
};

struct Capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  cudaStream_t origin = nullptr;
  std::vector<Node> nodes;
  std::map<cudaStream_t, std::vector<size_t>> tails;  // of each branch: what its next node comes after
  cudaError_t spoilt = cudaSuccess;
};

// The status, and the capture is lost: it ends with cudaErrorStreamCaptureInvalidated.
cudaError_t spoil(Capture* capture, cudaError_t status);
// For calls that no stream orders, such as cudaMalloc: refused while a capture forbids them in this thread.
cudaError_t refuse_while_capturing();
// Enqueues on a stream, or records where it is being captured. stream: as the API's caller names it.
cudaError_t submit(cudaStream_t stream, Op op);

// What calls of the runtime begin with: the lock, and a device that is not lost. The status of f, which has the lock.
template <class F>
cudaError_t on_device(F&& f) {
  Devices& d = Devices::get();
  Lock lock(d.mutex);
  d.contexts.insert(current_device);
  return said(d.lost != cudaSuccess ? d.lost : f(d, lock));
}
// Those that name a stream, which f is given.
template <class F>
cudaError_t on_stream(cudaStream_t named, F&& f) {
  return on_device([&](Devices& d, Lock& lock) {
    cudaStream_t s = d.resolve(named);
    return s ? f(d, lock, s) : cudaErrorInvalidResourceHandle;
  });
}
// Those that spoil the stream's capture.
template <class F>
cudaError_t outside_capture(cudaStream_t named, F&& f) {
  return on_stream(named, [&](Devices& d, Lock& lock, cudaStream_t s) {
    return s->capture ? spoil(s->capture, cudaErrorStreamCaptureUnsupported) : f(d, lock, s);
  });
}

}  // namespace hep::ptxr
