// The rail over a NIC: NVSHMEM's device verbs, whose IBGDA transport lets the calling lane ring the NIC itself. A
// segment lies in the symmetric heap, so an offset names the same place in every rank's, and a rank's PE is its rank in
// the group.
//
// Why the contract holds:
//   put_signal   NVSHMEM delivers the signal after its own data (one queue pair, a write and then the signal's atomic,
//                in order). What the NIC reads was written by this lane's bulk stores (complete since bulk_wait<0>) or,
//                for count vectors, by its block (block_sync), for rows of the latency path by warps that it has met
//                in a chain of add_acq_rel_sys: the system-scope fence in front makes it visible to the NIC, an
//                observer outside the GPU, before the doorbell rings.
//   signal       promises no order of puts; the fence makes it a release of this lane's own accesses, which the
//                counter of a consumed slot needs.
//   test, wait   an acquire at system scope of a word that the NIC wrote; the data it covers was written by the same
//                NIC through the same PCIe path before it, and the device keeps the order of such writes (checked when
//                NVSHMEM starts, runtime/nvshmem_entry.cu). The acquire's proxy fence orders the bulk loads.
// A kernel never asks NVSHMEM whether its verbs are complete: nvshmem_quiet walks the queue pairs of all PEs, one after
// the other, and ends the CUDA context where a link is broken. The host does once, before it frees (nvshmem_host.h).
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "arch/concept.h"
#include "common/world.h"
#include "layout/smem.h"
#include "transport/concept.h"

namespace hep {

class NvshmemDevice {
 public:
  static constexpr bool kOverNic = true;  // peers of a rail are not mapped

  NvshmemDevice(unsigned char* const* segments, const World& world) : segments_(segments), world_(world) {}

  template <class A>
  HEP_DEVICE void put(A&, int node, uint64_t offset, const void* src, uint64_t bytes) const {
    __threadfence_system();
    nvshmem_putmem_nbi(own() + offset, src, bytes, world_.rail_peer(node));
  }
  template <class A>
  HEP_DEVICE void put_signal(A&, int node, uint64_t offset, const void* src, uint64_t bytes, uint64_t flag,
                             uint64_t value) const {
    __threadfence_system();
    nvshmem_putmem_signal_nbi(own() + offset, src, bytes, word(flag), value, NVSHMEM_SIGNAL_SET,
                              world_.rail_peer(node));
  }
  template <class A>
  HEP_DEVICE void signal(A&, int node, uint64_t flag, uint64_t value) const {
    __threadfence_system();
    nvshmemx_signal_op(word(flag), value, NVSHMEM_SIGNAL_SET, world_.rail_peer(node));
  }
  template <class A>
  HEP_DEVICE bool test_signal(A& a, const uint64_t* flag, uint64_t value) const {
    return a.ld_acquire_sys(flag) >= value;
  }
  template <class A>
  HEP_DEVICE uint64_t read_signal(A& a, const uint64_t* flag, uint64_t) const {
    return a.ld_acquire_sys(flag);
  }
  template <class A>
  HEP_DEVICE void wait_signal(A& a, const uint64_t* flag, uint64_t value, const WaitInfo& info) const {
    a.wait_ge_sys(flag, value, info);
  }

 private:
  HEP_DEVICE unsigned char* own() const { return segments_[world_.node()]; }  // a symmetric address is one's own
  HEP_DEVICE uint64_t* word(uint64_t offset) const { return reinterpret_cast<uint64_t*>(own() + offset); }

  unsigned char* const* segments_;
  World world_;
};

}  // namespace hep
