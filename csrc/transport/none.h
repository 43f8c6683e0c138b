// The rail of a world of one node: there is nobody on it. What a kernel would do along a rail is left out of the code
// that is compiled for it.
#pragma once
#include "transport/concept.h"

namespace hep {

struct NoRail {
  static constexpr bool kNobody = true;

  template <class A>
  HEP_DEVICE void put(A&, int, uint64_t, const void*, uint64_t) const {}
  template <class A>
  HEP_DEVICE void put_signal(A&, int, uint64_t, const void*, uint64_t, uint64_t, uint64_t) const {}
  template <class A>
  HEP_DEVICE void signal(A&, int, uint64_t, uint64_t) const {}
  template <class A>
  HEP_DEVICE bool test_signal(A&, const uint64_t*, uint64_t) const {
    return true;
  }
  template <class A>
  HEP_DEVICE uint64_t read_signal(A&, const uint64_t*, uint64_t value) const {
    return value;
  }
  template <class A>
  HEP_DEVICE void wait_signal(A&, const uint64_t*, uint64_t, const WaitInfo&) const {}
};

}  // namespace hep
