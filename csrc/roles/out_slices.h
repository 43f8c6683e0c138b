// Where a reduce warp rounds its slices into, and their bulk stores.
#pragma once
#include "arch/concept.h"
#include "common/bugs.h"
#include "common/macros.h"

namespace hep {

// Two slices in shared memory, which tiles take in turn: a store may still read the other. They are one warp's alone,
// whatever the tiles' types and sizes, so that it has nobody to wait for but itself.
template <Arch A>
struct OutSlices {
  A& a;
  const bool elected;  // this lane stores, hence waits for the stores
  unsigned char* const slices;
  const uint32_t bytes;  // of one
  uint32_t parity = 0;

  HEP_DEVICE OutSlices(A& arch, unsigned char* all_warps, uint32_t slice_bytes, int warp, bool is_elected)
      : a(arch), elected(is_elected), slices(all_warps + uint32_t(warp) * 2 * slice_bytes), bytes(slice_bytes) {}

  HEP_DEVICE unsigned char* data() const { return slices + parity * bytes; }
  // Before data() is written: its last store has been read out. Only the lane that committed it can know.
  HEP_DEVICE void await() {
    if (elected && !injected(Bug::kTileOverwrittenWhileStoring)) a.template bulk_wait_read<1>();
    a.warp_sync();
  }
  HEP_DEVICE void store(uint64_t dst, uint32_t filled) {
    if (!injected(Bug::kTileUnpublished)) a.publish_shared();
    if (!injected(Bug::kSliceBeforeItsWarp)) a.warp_sync();
    if (elected) {
      a.bulk_s2g(reinterpret_cast<unsigned char*>(dst), data(), filled);
      a.bulk_commit();
    }
    parity ^= 1;
  }
};

}  // namespace hep
