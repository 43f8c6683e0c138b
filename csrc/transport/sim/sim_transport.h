// The rail of the simulated machine. Orders and delays are the machine's business (it holds what is in flight);
// here the verbs get their names.
#pragma once
#include <source_location>

#include "transport/concept.h"

namespace hep {

class SimTransport {
 public:
  using Where = std::source_location;  // the line of the role that called

  template <class A>
  void put(A& a, int node, uint64_t offset, const void* src, uint64_t bytes, Where at = Where::current()) {
    a.rail_put(at, node, offset, src, bytes, nullptr, 0);
  }
  template <class A>
  void put_signal(A& a, int node, uint64_t offset, const void* src, uint64_t bytes, uint64_t flag, uint64_t value,
                  Where at = Where::current()) {
    a.rail_put(at, node, offset, src, bytes, &flag, value);
  }
  template <class A>
  void signal(A& a, int node, uint64_t flag, uint64_t value, Where at = Where::current()) {
    a.rail_put(at, node, 0, nullptr, 0, &flag, value);
  }
  template <class A>
  bool test_signal(A& a, const uint64_t* flag, uint64_t value, Where at = Where::current()) {
    return a.rail_signal(at, flag, value) >= value;
  }
  template <class A>
  uint64_t read_signal(A& a, const uint64_t* flag, uint64_t value, Where at = Where::current()) {
    return a.rail_signal(at, flag, value);
  }
  template <class A>
  void wait_signal(A& a, const uint64_t* flag, uint64_t value, WaitInfo info, Where at = Where::current()) {
    a.wait_ge_sys(flag, value, info, at);
  }
};

}  // namespace hep
