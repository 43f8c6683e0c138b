// Placement on the host: the role's code with one lane.
#pragma once
#include "roles/place.h"

namespace hep {

struct OneLane {
  static constexpr int kLanes = 1;
  int lane() const { return 0; }
  int warp_idx() const { return 0; }
  int num_warps() const { return 1; }
  void block_sync() {}
};

inline void place_here(const PlaceParams& p) {
  OneLane here;
  PlaceRole<OneLane> role(here, p);
  role.count_rows();
  role.finish_records();
}

}  // namespace hep
