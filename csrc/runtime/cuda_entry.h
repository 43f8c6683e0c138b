// The one door between hybrid_ep._core and the CUDA library, which is loaded at run time: a machine without a GPU, a
// driver or the library itself runs everything else. Both are built from one tree; `abi` refuses a mixture.
#pragma once
#include <string>
#include <vector>

#include "kernels/instances/executor.h"
#include "runtime/cuda_copies.h"
#include "runtime/cuda_memory.h"

namespace hep::cuda {

// Whoever changes Entry, or a class that it makes other than executors, counts it here.
inline constexpr uint64_t kEntryVersion = 3;

// Of all that crosses the table of executors: sizes, and its own version; and that of the door itself.
inline constexpr uint64_t kAbi = [] {
  uint64_t abi = 1000003ull * kEntryVersion + kExecutorVersion;
  for (const uint64_t bytes : {sizeof(ExchangeParams), sizeof(DispatchParams), sizeof(CombineParams),
                               sizeof(LatencyDispatchParams), sizeof(LatencyCombineParams), sizeof(BalanceParams),
                               sizeof(SpareParams), sizeof(SpareRailParams), sizeof(LaunchSettings)})
    abi = 1000003ull * abi + bytes;
  return abi;
}();

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0, num_sms = 0;
  bool supported = false;  // this library has kernels for it
  int rdma_order = 0;      // cudaDevAttrGPUDirectRDMAWritesOrdering
};

struct Entry {
  uint64_t abi = kAbi;
  std::vector<DeviceInfo> (*devices)(std::string& why_none);
  void (*set_device)(int ordinal);  // of the calling thread
  std::unique_ptr<Executor> (*make_p2p)(unsigned char* const*, uint64_t);
  std::unique_ptr<Executor> (*make_loopback)(unsigned char* const*, uint64_t);
  std::shared_ptr<DeviceMemory> (*create)(Share, size_t);
  std::shared_ptr<DeviceMemory> (*attach)(Share, size_t, const ShareHandle&);
  bool (*run_at_once)(const std::vector<void*>& streams, double patience_s);
  std::unique_ptr<CopyStream> (*make_copy_stream)();  // of the current device, as the next
  std::unique_ptr<CounterReader> (*make_counter_reader)();
  void (*write_counter)(unsigned char* to, uint64_t value, void* stream);
};

std::unique_ptr<CopyStream> make_copy_stream();
std::unique_ptr<CounterReader> make_counter_reader();

inline constexpr const char* kEntrySymbol = "hep_cuda_entry";

// Loads the library at `path` and adds its executors to the table ("cuda", "cuda_loopback"). A second call returns what
// the first one loaded. Throws std::runtime_error saying what is wrong.
const Entry& load(const std::string& path);

}  // namespace hep::cuda
