// How a CUDA kernel ends when a wait expires: the first lane to notice writes the timeout report into mapped host
// memory and raises the rank's abort word; every other lane meets that word in its own wait and leaves too. No trap is
// raised, so the CUDA context survives and the next host call raises what the report says. The host has a word of its
// own in mapped memory, raised by a store: a copy to the device might wait behind work that waits for the kernel.
#pragma once
#include <cstdint>

#include "arch/sm90/ptx.h"
#include "common/role.h"
#include "common/timeout_report.h"

namespace hep {

// In mapped host memory; plain data. What the device writes, the host reads once `written` is 1.
struct DeviceTimeoutReport {
  uint32_t written;
  int32_t site, peer, block, warp;
  uint32_t raised_by_host;  // the only word here that the device reads: as CudaControl::abort
  int64_t chunk;
  uint64_t expected, seen, waited_ns;
  int32_t role;
};

// In device memory, one per executor (a rank's buffer); constant during a launch but for `abort`.
struct CudaControl {
  uint64_t timeout_ns;
  DeviceTimeoutReport* timeout_report;
  int32_t rank;
  uint32_t abort;  // 0 = run; once set it stays: the ranks are out of step and the buffer is lost
};

namespace death {

// Ends the calling lane. Its stores are drained, and its loads are given time to land: shared memory must not be handed
// to another block while a copy may still write it. A load that was issued lands within microseconds; nobody is in a
// hurry after a deadline of seconds.
__device__ __noinline__ inline void leave() {
  ptx::bulk_commit_group();
  ptx::bulk_wait_group<0>();
  const uint64_t since = ptx::globaltimer();
  while (ptx::globaltimer() - since < 2'000'000) __nanosleep(20'000);
  ptx::exit();
}

__device__ __noinline__ inline void expire(CudaControl* control, Role role, WaitInfo info, uint64_t expected,
                                           uint64_t seen, uint64_t waited_ns) {
  if (atomicCAS(&control->abort, 0u, 1u) == 0) {
    volatile DeviceTimeoutReport* o = control->timeout_report;
    o->site = int32_t(info.site);
    o->peer = info.peer;
    o->chunk = info.chunk;
    o->block = int32_t(blockIdx.x);
    o->warp = int32_t(threadIdx.x / 32);
    o->expected = expected;
    o->seen = seen;
    o->waited_ns = waited_ns;
    o->role = int32_t(role);
    __threadfence_system();  // the words above before the one that says they are there
    o->written = 1;
    __threadfence_system();
  }
  leave();
}

}  // namespace death
}  // namespace hep
