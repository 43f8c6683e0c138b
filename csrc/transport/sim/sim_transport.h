// The rail of the simulated machine. Orders and delays are the machine's business (it holds what is in flight);
// here the verbs get their names.
#pragma once
#include "transport/concept.h"

namespace hep {

class SimTransport {
 public:
  template <class A>
  void put(A& a, int node, uint64_t offset, const void* src, uint64_t bytes) {
    a.rail_put(node, offset, src, bytes, nullptr, 0);
  }
  template <class A>
  void put_signal(A& a, int node, uint64_t offset, const void* src, uint64_t bytes, uint64_t flag, uint64_t value) {
    a.rail_put(node, offset, src, bytes, &flag, value);
  }
  template <class A>
  void signal(A& a, int node, uint64_t flag, uint64_t value) {
    a.rail_put(node, 0, nullptr, 0, &flag, value);
  }
  template <class A>
  bool test_signal(A& a, const uint64_t* flag, uint64_t value) {
    return a.flag_reached(flag, value);
  }
  template <class A>
  void wait_signal(A& a, const uint64_t* flag, uint64_t value, WaitInfo info) {
    a.wait_ge_sys(flag, value, info);
  }
  template <class A>
  void quiet(A& a) {
    a.rail_quiet();
  }
};

}  // namespace hep
