// The rail between processes of one machine: every rank has mapped its rail peers' segments. A put is a copy,
// a signal a release store; everything is complete when the verb returns.
#pragma once
#include <cstring>

#include "transport/concept.h"

namespace hep {

class ShmTransport {
 public:
  // segments[node]: start of the rail peer's segment as mapped here.
  explicit ShmTransport(unsigned char* const* segments) : segments_(segments) {}

  unsigned char* mapped(int node) const { return segments_[node]; }
  template <class A>
  void put(A&, int node, uint64_t offset, const void* src, uint64_t bytes) {
    std::memcpy(segments_[node] + offset, src, bytes);
  }
  template <class A>
  void put_signal(A& a, int node, uint64_t offset, const void* src, uint64_t bytes, uint64_t flag, uint64_t value) {
    put(a, node, offset, src, bytes);
    signal(a, node, flag, value);
  }
  template <class A>
  void signal(A& a, int node, uint64_t flag, uint64_t value) {
    a.st_release_sys(reinterpret_cast<uint64_t*>(segments_[node] + flag), value);
  }
  template <class A>
  bool test_signal(A& a, const uint64_t* flag, uint64_t value) {
    return a.ld_acquire_sys(flag) >= value;
  }
  template <class A>
  uint64_t read_signal(A& a, const uint64_t* flag, uint64_t) {
    return a.ld_acquire_sys(flag);
  }
  template <class A>
  void wait_signal(A& a, const uint64_t* flag, uint64_t value, WaitInfo info) {
    a.wait_ge_sys(flag, value, info);
  }
  bool progress() { return false; }
  void settle() {}

 private:
  unsigned char* const* segments_;
};

}  // namespace hep
