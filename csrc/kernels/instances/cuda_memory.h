// The host's side of device memory for the CUDA executor: errors with a name, stream-ordered blocks, and an image that
// gathers many host arrays into one upload.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/world.h"

namespace hep::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // not sticky: the next call starts clean
  throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

// For calls that no stream orders, the end of memory among them. While any thread captures, CUDA forbids them in every
// thread, and spoils the capture, unless the thread that makes them says that it knows: what ours ask, make or give
// back is never part of a graph.
class OutsideCaptures {
 public:
  OutsideCaptures() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }  // fails for no mode that there is
  ~OutsideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then what it was
};

// The pool of a device's Blocks. It never makes one stream wait for another to reuse memory: two virtual ranks whose
// kernels wait for each other would then wait for ever. It keeps what it has, since giving back waits for the device.
inline cudaMemPool_t memory_pool() {
  static std::mutex mutex;
  static std::map<int, cudaMemPool_t> pools;
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  std::lock_guard lock(mutex);
  cudaMemPool_t& pool = pools[device];
  if (pool) return pool;
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device;
  check(cudaMemPoolCreate(&pool, &props), "memory pool");
  int no = 0;
  uint64_t everything = ~0ull;
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &no), "memory pool");
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything), "memory pool");
  return pool;
}

// Device memory, stream-ordered on both ends: neither waits for the device, where another rank's kernel may be waiting
// for us. `stream` is where it was used last, and is freed.
struct Block {
  Block(uint64_t bytes, cudaStream_t s) : stream(s) {
    check(cudaMallocFromPoolAsync(&data, bytes ? bytes : 16, memory_pool(), stream), "device memory");
  }
  ~Block() {
    const OutsideCaptures outside;
    (void)cudaFreeAsync(data, stream);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data = nullptr;
  cudaStream_t stream;
};

// A stream of the current device. Streams are lent and never destroyed: memory may be freed on one whose user is gone.
struct LentStream {
  LentStream() {
    check(cudaGetDevice(&device), "current device");
    {
      std::lock_guard lock(mutex());
      auto& free = idle()[device];
      if (!free.empty()) {
        stream = free.back();
        free.pop_back();
        return;
      }
    }
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  ~LentStream() {
    std::lock_guard lock(mutex());
    idle()[device].push_back(stream);
  }
  LentStream(const LentStream&) = delete;
  LentStream& operator=(const LentStream&) = delete;

  int device = 0;
  cudaStream_t stream = nullptr;

 private:
  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }
  static std::map<int, std::vector<cudaStream_t>>& idle() {
    static std::map<int, std::vector<cudaStream_t>> by_device;
    return by_device;
  }
};

// For what CUDA gives and takes back; freed, too, when the constructor of its holder throws.
template <auto kFree>
struct Freed {
  template <class T>
  void operator()(T* p) const {
    const OutsideCaptures outside;
    (void)kFree(p);
  }
};

// Arrays of the host side by side, in one upload. Offsets are known at once, addresses when the block is there.
class Image {
 public:
  uint64_t add(const void* data, uint64_t bytes) {
    const uint64_t at = align_up(bytes_.size(), 128);
    bytes_.resize(at + bytes);
    if (bytes) std::memcpy(&bytes_[at], data, bytes);
    return at;
  }
  void upload(cudaStream_t stream) {
    block_ = std::make_shared<Block>(bytes_.size(), stream);
    // From pageable memory: copied out of bytes_ before the call returns.
    check(cudaMemcpyAsync(block_->data, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice, stream), "upload");
    std::vector<unsigned char>().swap(bytes_);
  }
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(block_->data) + offset);
  }

 private:
  std::vector<unsigned char> bytes_;
  std::shared_ptr<Block> block_;
};

}  // namespace hep::cuda
