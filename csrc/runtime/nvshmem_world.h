// NVSHMEM in this process: loaded by dlopen when asked for, started and stopped once for all buffers, and its calls
// with errors that say which call of which PE failed. Every collective here may wait for other PEs without a deadline
// of its own; the caller (hybrid_ep/runtime/nvshmem.py) puts one around it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/nvshmem_entry.h"
#include "runtime/segment.h"

namespace hep::nvshmem {

class World {
 public:
  // host_library: libnvshmem_host.so.3; kernels: our library over it. Throws std::runtime_error: not there, of another
  // build, or a host library that our kernels cannot be served by. Neither is ever unloaded.
  World(const std::string& host_library, const std::string& kernels);

  Version running() const { return entry_->calls->running(); }
  Version built_with() const { return entry_->calls->built_with(); }
  bool started() const { return entry_->calls->started(); }
  std::string unique_id() const;
  // device: ordinal of the GPU that the calling thread and every later call here is to use.
  void start(const std::string& unique_id, int pe, int num_pes, int device);
  void stop();

  // The address of zeroed symmetric memory.
  uint64_t allocate(size_t bytes);
  // Until every put and signal of this PE's kernels so far is complete at its target.
  void quiet();
  void free(uint64_t address);  // collective, after all PEs' quiet
  // `pe`'s twin of own memory, or null where only the NIC reaches it.
  std::shared_ptr<Segment> peer(uint64_t address, size_t bytes, int pe) const;
  std::shared_ptr<Segment> own(uint64_t address, size_t bytes) const;

 private:
  void enter() const;  // the calling thread uses our device
  std::string who() const;

  const Entry* entry_ = nullptr;
  int pe_ = -1, num_pes_ = 0, device_ = -1;
};

}  // namespace hep::nvshmem
