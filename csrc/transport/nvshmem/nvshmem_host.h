// What the host asks of NVSHMEM: a table of plain functions that return NVSHMEM's own statuses and neither throw nor
// exit. hybrid_ep._core sees this header alone; nvshmem_host.cu, in the library that links NVSHMEM, fills the table.
#pragma once
#include <cstddef>

namespace hep::nvshmem {

inline constexpr size_t kUniqueIdBytes = 128;
inline constexpr int kNoDevice = -1;  // of start: the PEs have met, but this thread has no CUDA context

struct Version {
  int major = 0, minor = 0, patch = 0;
};

struct Calls {
  Version (*built_with)();  // whose headers and device library our kernels were built with
  Version (*running)();     // the host library of this process
  bool (*started)();        // by whomever
  int (*unique_id)(unsigned char* id);
  // Collective over the n PEs. Also hands NVSHMEM's device state to the kernels of this library.
  int (*start)(const unsigned char* id, int pe, int n);
  int (*pe)();
  int (*num_pes)();
  // Collective, the same bytes on all PEs and in the same order; null where memory is out.
  void* (*allocate)(size_t bytes);
  // On a CUDA stream: until all verbs of this PE's kernels so far are complete at their targets.
  void (*quiet)(void* stream);
  void (*free)(void* data);  // collective; no PE's verbs may be under way to or from it
  // Where this process reaches `pe`'s twin of own memory by loads and stores; null where only the NIC does.
  void* (*peer)(const void* own, int pe);
  void (*stop)();  // collective
};

const Calls& calls();

}  // namespace hep::nvshmem
