// Vector clocks that share what they have in common.
//
// A component is a place in a group of 32 (the lanes of a warp, say); a clock is a table of groups. Copies share the
// whole table, clocks that differ in a few components share all other groups: after a barrier every thread of a block
// has the same table, and joining it costs a comparison of two pointers.
#pragma once
#include <utility>
#include <vector>

#include "program.h"

namespace hep::ptxm {

// Counted within one thread.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* p) : p_(p) { ++p_->refs; }
  Ref(const Ref& o) : p_(o.p_) {
    if (p_) ++p_->refs;
  }
  Ref(Ref&& o) noexcept : p_(std::exchange(o.p_, nullptr)) {}
  Ref& operator=(Ref o) noexcept { return std::swap(p_, o.p_), *this; }
  ~Ref() {
    if (p_ && --p_->refs == 0) delete p_;
  }
  T* operator->() const { return p_; }
  T* get() const { return p_; }
  explicit operator bool() const { return p_; }
  bool operator==(const Ref& o) const { return p_ == o.p_; }
  bool alone() const { return p_->refs == 1; }

 private:
  T* p_ = nullptr;
};

class Clock {
 public:
  u32 at(u32 component) const {
    const u32 group = component / kLanes;
    if (!table_ || group >= table_->groups.size() || !table_->groups[group]) return 0;
    return table_->groups[group]->ticks[component % kLanes];
  }
  void raise(u32 component, u32 tick);  // to at least `tick`
  void join(const Clock& other);
  bool operator==(const Clock& other) const { return table_ == other.table_; }

 private:
  struct Group {
    u32 refs = 0;
    u32 ticks[kLanes] = {};
  };
  struct Table {
    u32 refs = 0;
    std::vector<Ref<Group>> groups;
  };
  Ref<Table> table_;
};

// What a thread knows: hb, what happened before; shared and global, what of it the async proxy sees in either space.
struct Clocks {
  Clock hb, shared, global;
  void join(const Clocks& o) {
    hb.join(o.hb);
    shared.join(o.shared);
    global.join(o.global);
  }
  void raise(u32 component, u32 tick) {
    hb.raise(component, tick);
    shared.raise(component, tick);
    global.raise(component, tick);
  }
};

}  // namespace hep::ptxm
