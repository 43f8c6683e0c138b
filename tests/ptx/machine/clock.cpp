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
  bool mine_only = theirs.size() <= mine.size(), theirs_only = mine.size() <= theirs.size();
  std::vector<Ref<Group>> joined(n);
  for (size_t k = 0; k < n; ++k) {
    const Ref<Group> a = k < mine.size() ? mine[k] : Ref<Group>(), b = k < theirs.size() ? theirs[k] : Ref<Group>();
    if (a == b || !b) {
      joined[k] = a, theirs_only &= a == b;
      continue;
    }
    if (!a) {
      joined[k] = b, mine_only = false;
      continue;
    }
    bool less = false, more = false;
    for (u32 l = 0; l < kLanes; ++l) less |= a->ticks[l]<b->ticks[l], more |= a->ticks[l]> b->ticks[l];
    mine_only &= !less, theirs_only &= !more;
    if (!less)
      joined[k] = a;
    else if (!more)
      joined[k] = b;
    else {
      Group* g = new Group;
      for (u32 l = 0; l < kLanes; ++l) g->ticks[l] = std::max(a->ticks[l], b->ticks[l]);
      joined[k] = Ref<Group>(g);
    }
  }
  if (mine_only) return;
  if (theirs_only) {
    table_ = other.table_;
    return;
  }
  Table* t = new Table;
  t->groups = std::move(joined);
  table_ = Ref<Table>(t);
}

}  // namespace hep::ptxm
