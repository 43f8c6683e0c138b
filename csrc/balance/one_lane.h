// A machine of one lane, for roles that only compute: the planner's, when a host process plans for itself.
#pragma once
#include <type_traits>

#include "arch/concept.h"

namespace hep::balance {

struct OneLane {
  static constexpr int kLanes = 1;
  static constexpr int lane() { return 0; }
  static constexpr int warp_idx() { return 0; }
  static constexpr int num_warps() { return 1; }
  static void warp_sync() {}
  static void block_sync() {}
  template <class T>
  static T ld_shared(const T* p) {
    return *p;
  }
  template <class T>
  static void st_shared(T* p, const std::type_identity_t<T>& v) {
    *p = v;
  }
  template <class T>
  static T ld_global(const T* p) {
    return *p;
  }
  template <class T>
  static void st_global(T* p, const std::type_identity_t<T>& v) {
    *p = v;
  }
};

static_assert(Lanes<OneLane>);

}  // namespace hep::balance

namespace hep {
template <>
struct KeyMath<balance::OneLane> {
  static constexpr bool kOffered = true;
  static int64_t largest_below(const int64_t* key, int n, int64_t limit, int64_t flip);
};
}  // namespace hep
