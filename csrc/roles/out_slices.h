// Where a reduce warp rounds its slices into, and their bulk stores.
#pragma once
#include "arch/concept.h"
#include "common/bugs.h"
#include "common/macros.h"

namespace hep {

// Two slices in shared memory, which tiles take in turn: a store may still read the other. They are one warp's alone,
// whatever the tiles' types and sizes, so that it has nobody to wait for but itself.
template <Arch A, uint32_t kBytes>
struct OutSlices {
  A& a;
  const bool elected;  // this lane stores, hence waits for the stores
  unsigned char* const slices;
  uint32_t parity = 0;

  HEP_DEVICE OutSlices(A& arch, unsigned char* all_warps, int warp, bool is_elected)
      : a(arch), elected(is_elected), slices(all_warps + uint32_t(warp) * 2 * kBytes) {}

  HEP_DEVICE unsigned char* data() const { return slices + parity * kBytes; }
  // Before data() is written: its last store has been read out. Only the lane that committed it can know.
  HEP_DEVICE void await() {
    if (elected && !injected(Bug::kTileOverwrittenWhileStoring)) a.template bulk_wait_read<1>();
    a.warp_sync();
  }
  HEP_DEVICE void store(uint64_t dst, uint32_t bytes) {
    if (!injected(Bug::kTileUnpublished)) a.publish_shared();
    if (!injected(Bug::kSliceBeforeItsWarp)) a.warp_sync();
    if (elected) {
      a.bulk_s2g(reinterpret_cast<unsigned char*>(dst), data(), bytes);
      a.bulk_commit();
    }
    parity ^= 1;
  }
};

}  // namespace hep
