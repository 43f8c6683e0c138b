// The door between hybrid_ep._core and the NVSHMEM library, a third library beside the CUDA one: it needs
// libnvshmem_host.so.3, so a machine without NVSHMEM must be able to do without it. Loaded only for a group whose nodes
// have no mapped path between them.
#pragma once
#include <cstdint>

#include "runtime/cuda_entry.h"
#include "transport/nvshmem/nvshmem_host.h"

namespace hep::nvshmem {

struct Entry {
  uint64_t abi = cuda::kAbi;
  const Calls* calls = nullptr;
  std::unique_ptr<Executor> (*make)(unsigned char* const* rail_segments, uint64_t seed) = nullptr;
  void (*set_device)(int ordinal) = nullptr;                 // of the calling thread
  void (*zero)(void* data, size_t bytes) = nullptr;          // and wait for it
  void (*on_stream)(void (*begin)(void* stream)) = nullptr;  // what begins on a stream, and wait for it
};

inline constexpr const char* kEntrySymbol = "hep_nvshmem_entry";
inline constexpr const char* kExecutor = "cuda_nvshmem";

}  // namespace hep::nvshmem
