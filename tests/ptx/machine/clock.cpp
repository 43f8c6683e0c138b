#include "clock.h"

namespace hep::ptxm {

void Clock::raise(u32 component, u32 tick) {
  if (at(component) >= tick) return;
  if (!table_)
    table_ = Ref<Table>(new Table);
  else if (!table_.alone()) {
    Table* copy = new Table;
    copy->groups = table_->groups;
    table_ = Ref<Table>(copy);
  }
  std::vector<Ref<Group>>& groups = table_->groups;
  const u32 n = component / kLanes;
  if (groups.size() <= n) groups.resize(n + 1);
  if (!groups[n] || !groups[n].alone()) {
    Group* copy = groups[n] ? new Group(*groups[n].get()) : new Group;
    copy->refs = 0;
    groups[n] = Ref<Group>(copy);
  }
  groups[n]->ticks[component % kLanes] = tick;
}

void Clock::join(const Clock& other) {
  if (table_ == other.table_ || !other.table_) return;
  if (!table_) {
    table_ = other.table_;
    return;
  }
  const auto &mine = table_->groups, &theirs = other.table_->groups;
  const size_t n = std::max(mine.size(), theirs.size());
  const auto ticks = [](const std::vector<Ref<Group>>& groups, size_t k) {
    return k < groups.size() ? groups[k].get() : nullptr;
  };
  const auto below = [](const Group* a, const Group* b) {  // in any component
    if (a == b || !b) return false;
    if (!a) return true;
    bool less = false;
    for (u32 l = 0; l < kLanes; ++l) less |= a->ticks[l] < b->ticks[l];
    return less;
  };
  // Most joins bring nothing, or are with somebody who knows all of it: no table is made for them.
  bool mine_only = true, theirs_only = true;
  for (size_t k = 0; k < n && (mine_only || theirs_only); ++k) {
    const Group *a = ticks(mine, k), *b = ticks(theirs, k);
    if (mine_only) mine_only = !below(a, b);
    if (theirs_only) theirs_only = !below(b, a);
  }
  if (mine_only) return;
  if (theirs_only) {
    table_ = other.table_;
    return;
  }
  Table* t = new Table;
  t->groups.resize(n);
  for (size_t k = 0; k < n; ++k) {
    const Group *a = ticks(mine, k), *b = ticks(theirs, k);
    if (!below(a, b)) {
      if (a) t->groups[k] = mine[k];
    } else if (!below(b, a)) {
      t->groups[k] = theirs[k];
    } else {
      Group* g = new Group;
      for (u32 l = 0; l < kLanes; ++l) g->ticks[l] = std::max(a->ticks[l], b->ticks[l]);
      t->groups[k] = Ref<Group>(g);
    }
  }
  table_ = Ref<Table>(t);
}

}  // namespace hep::ptxm
