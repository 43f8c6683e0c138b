// Capture of streams into graphs: what is recorded, and what must not be called meanwhile.
#pragma once
#include <set>

#include "device.h"

namespace hep::ptxr {

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
// Graphs with memory nodes are not modelled; a recorded address would be one.
inline bool recorded_allocation(const void*) { return false; }

}  // namespace hep::ptxr
