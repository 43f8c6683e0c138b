// What planners of clones are told, and what a source learns: pointers and numbers.
#pragma once
#include <cstdint>

#include "common/macros.h"

namespace hep {

// Owners of experts, which change seldom, in the rank's memory: owner [E], experts by owner, ascending [E], and where
// those of a rank begin [R + 1].
struct CloneOwners {
  const int32_t *owner, *by_owner, *first;
};

// The same said by `columns` [E] of a map over physical slots: of a rank, `owners` for its experts, then spare slots.
struct CloneColumns {
  const int64_t* columns;
  int owners, spare_slots;

  HEP_HOST_DEVICE int width() const { return owners + spare_slots; }
  HEP_HOST_DEVICE int64_t of_slot(int slot) const {  // a spare one, of all ranks'
    const int rank = spare_slots == 1 ? slot : slot / spare_slots;
    return int64_t(rank) * width() + owners + (slot - rank * spare_slots);
  }
};

// What one source gives, of its tokens for a clone's expert in their order: `take` [R][S] of them from number `first`
// on.
struct CloneShare {
  int64_t *take, *first;
};

}  // namespace hep
