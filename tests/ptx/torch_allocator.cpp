// The CUDA runtime, as far as PyTorch's caching allocator, streams and graphs ask it: memory is the host's, nothing is
// launched, and events come when LATE says so. It is preloaded, so that torch's own allocator runs without a GPU.
// Calls that are not here answer success (torch_allocator.py makes them) and leave their results alone.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t kPiece = size_t{2} << 20, kTotal = size_t{8} << 30;

struct Runtime {
  std::mutex mutex;
  std::map<void*, size_t> held;
  size_t bytes = 0;
  std::map<cudaStream_t, unsigned long long> capturing;
  unsigned long long captures = 0;
  std::atomic<bool> late{false};

  static Runtime& get() {
    static auto* runtime = new Runtime;
    return *runtime;
  }
};

thread_local int device = 0;

template <class Handle>
Handle some_handle() {
  static std::atomic<uintptr_t> last{0x1000};
  return reinterpret_cast<Handle>(last += 16);
}

cudaError_t capture_of(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  Runtime& r = Runtime::get();
  std::lock_guard lock(r.mutex);
  const auto found = r.capturing.find(stream);
  *status = found == r.capturing.end() ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (id && found != r.capturing.end()) *id = found->second;
  return cudaSuccess;
}

cudaError_t begin_capture(cudaStream_t stream) {
  Runtime& r = Runtime::get();
  std::lock_guard lock(r.mutex);
  r.capturing[stream] = ++r.captures;
  return cudaSuccess;
}

}  // namespace

#define HEP_SHIM extern "C" __attribute__((visibility("default")))

// For the tests: what cudaMalloc holds, and whether events have yet to come.
HEP_SHIM unsigned long long hep_shim_bytes() {
  std::lock_guard lock(Runtime::get().mutex);
  return Runtime::get().bytes;
}
HEP_SHIM void hep_shim_late(int late) {
  Runtime::get().late = late != 0;
}

HEP_SHIM cudaError_t cudaMalloc(void** p, size_t bytes) {
  Runtime& r = Runtime::get();
  std::lock_guard lock(r.mutex);
  const size_t whole = (bytes + kPiece - 1) / kPiece * kPiece;
  *p = r.bytes + whole > kTotal ? nullptr : std::aligned_alloc(kPiece, whole);
  if (!*p) return cudaErrorMemoryAllocation;
  r.held[*p] = whole;
  r.bytes += whole;
  return cudaSuccess;
}
HEP_SHIM cudaError_t cudaFree(void* p) {
  Runtime& r = Runtime::get();
  std::lock_guard lock(r.mutex);
  if (const auto found = r.held.find(p); found != r.held.end()) {
    r.bytes -= found->second;
    r.held.erase(found);
    std::free(p);
  }
  return cudaSuccess;
}
HEP_SHIM cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = kTotal;
  *free_bytes = kTotal - hep_shim_bytes();
  return cudaSuccess;
}

HEP_SHIM cudaError_t cudaGetDeviceCount(int* count) {
  return *count = 1, cudaSuccess;
}
HEP_SHIM cudaError_t cudaGetDevice(int* ordinal) {
  return *ordinal = device, cudaSuccess;
}
HEP_SHIM cudaError_t cudaSetDevice(int ordinal) {
  return device = ordinal, cudaSuccess;
}
HEP_SHIM cudaError_t cudaDriverGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
HEP_SHIM cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  return *can = 0, cudaSuccess;
}
HEP_SHIM cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
HEP_SHIM cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  std::strcpy(p->name, "memory of a CPU");
  p->totalGlobalMem = kTotal;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}
HEP_SHIM cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  return *value = what == cudaDevAttrComputeCapabilityMajor ? 9 : 0, cudaSuccess;
}
HEP_SHIM cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  return *a = {}, cudaSuccess;
}

HEP_SHIM cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = some_handle<cudaStream_t>(), cudaSuccess;
}
HEP_SHIM cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = some_handle<cudaEvent_t>(), cudaSuccess;
}
HEP_SHIM cudaError_t cudaEventQuery(cudaEvent_t) {
  return Runtime::get().late ? cudaErrorNotReady : cudaSuccess;
}

HEP_SHIM cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return capture_of(stream, status, nullptr);
}
HEP_SHIM cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t**,
                                              const cudaGraphEdgeData**, size_t* count) {
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(16);
  if (count) *count = 0;
  return capture_of(stream, status, id);
}
HEP_SHIM cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return begin_capture(stream);
}
HEP_SHIM cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                                   const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode) {
  return begin_capture(stream);
}
HEP_SHIM cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Runtime& r = Runtime::get();
  std::lock_guard lock(r.mutex);
  r.capturing.erase(stream);
  return *graph = some_handle<cudaGraph_t>(), cudaSuccess;
}
HEP_SHIM cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  return *count = 1, cudaSuccess;
}
