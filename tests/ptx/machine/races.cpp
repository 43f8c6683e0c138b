// Synchronisation: what threads learn, from whom.
#include "races.h"

#include "impl.h"

namespace hep::ptxm {

void Order::join(const Order& other) {
  if (!other.known || known == other.known) return;
  if (!known || known->generation < other.known->generation) {
    known = other.known;
    return;
  }
  if (known->generation > other.known->generation) return;
  Knowledge k = *known;
  k.clock.join(other.known->clock);
  known = std::make_shared<const Knowledge>(std::move(k));
}

u32 Races::new_group(const Block& b) {
  owners_.push_back({b.serial, b.run->launch.device, b.run->launch.gpu});
  return u32(owners_.size() - 1);
}
LaneClocks& Races::lane(const Who& w) {
  return w.warp.clocks.lanes[w.lane];
}
u32 Races::component(const Who& w) const {
  return w.warp.clocks.group * kLanes + w.lane;
}
const Clocks& Races::publish(const Who& w) {
  LaneClocks& l = lane(w);
  l.known.hb.raise(component(w), l.own++);
  return l.known;
}
bool Races::includes(Scope scope, u32 a, u32 b) const {
  const Owner &x = owners_[a / kLanes], &y = owners_[b / kLanes];
  return scope == Scope::kSys || (scope == Scope::kGpu && x.device == y.device && x.gpu == y.gpu) ||
         (scope == Scope::kCta && x.block == y.block);
}
bool Races::synchronises(const Sync& s, u32 by, Scope scope) const {
  return includes(s.scope, s.component, by) && includes(scope, s.component, by);
}

// ---- Launches
void Races::start(Run&) {}
void Races::start(Block& b) {
  b.cells.cells.resize(b.shared.bytes.size() / 4 + 1);
  Clocks first;
  const auto& known = b.run->launch.after.known;
  if (known && known->generation == generation_) first.hb = first.shared = first.global = known->clock;
  for (Warp& w : b.warps) {
    w.clocks.group = new_group(b);
    w.clocks.lanes = std::make_unique<LaneClocks[]>(kLanes);
    for (u32 l = 0; l < kLanes; ++l) w.clocks.lanes[l].known = first;
  }
}
void Races::exit(const Who& w) {
  w.block().run->clocks.end.join(publish(w).hb);
}
Order Races::order_of(const Run& r) {
  Knowledge k{r.clocks.end, generation_};
  if (const auto& before = r.launch.after.known; before && before->generation == generation_)
    k.clock.join(before->clock);
  return {std::make_shared<const Knowledge>(std::move(k))};
}
void Races::quiesce() {
  owners_.clear();
  readers_.clear();
  pages_.clear();
  syncs_.clear();
  near_page_ = ~0ull;
  ++generation_;
}

// ---- Meetings
void Races::meet(Warp& w, u32 lanes) {
  Clocks all;
  for (u32 rest = lanes; rest; rest &= rest - 1) all.join(w.clocks.lanes[std::countr_zero(rest)].known);
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const u32 l = u32(std::countr_zero(rest));
    all.hb.raise(w.clocks.group * kLanes + l, w.clocks.lanes[l].own++);
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) w.clocks.lanes[std::countr_zero(rest)].known = all;
}
void Races::meet(Block& b, u32 barrier) {
  Clocks all;
  const auto each = [&](auto&& f) {
    for (Warp& w : b.warps)
      for (const Fragment& p : w.parts)
        if (p.state == Fragment::kBarrier && p.barrier == barrier)
          for (u32 rest = p.mask; rest; rest &= rest - 1) f(w, u32(std::countr_zero(rest)));
  };
  each([&](Warp& w, u32 l) { all.join(w.clocks.lanes[l].known); });
  each([&](Warp& w, u32 l) { all.hb.raise(w.clocks.group * kLanes + l, w.clocks.lanes[l].own++); });
  each([&](Warp& w, u32 l) { w.clocks.lanes[l].known = all; });
}

// ---- mbarriers
void Races::init(const Who& w, Mbar& m, const Ins& i) {
  BlockCells& cells = w.block().cells;
  if (cells.mbars++ % kLanes == 0) cells.mbar_group = new_group(w.block());
  m.clocks = {};
  m.clocks.component = cells.mbar_group * kLanes + (cells.mbars - 1) % kLanes;
  shared(w, m.at - kSharedBase, 8, true, i);
}
void Races::use(const Who& w, Mbar& m, const Ins& i) {
  const Cell& c = w.block().cells.cells[(m.at - kSharedBase) >> 2];
  if (c.writer != component(w) && lane(w).known.hb.at(c.writer) < c.write_tick)
    machine_.report("race", w, &i,
                    "the mbarrier at shared " + hex(m.at) + " is used before its init is known to this thread");
}
void Races::arrive(const Who& w, Mbar& m) {
  m.clocks.now.join(publish(w));
}
void Races::complete(Mbar& m) {
  m.clocks.now.raise(m.clocks.component, u32(m.phase));
  m.clocks.done = std::move(m.clocks.now);
  m.clocks.now = {};
}
void Races::observe(const Who& w, Mbar& m) {
  lane(w).known.join(m.clocks.done);
}

// ---- Words that carry a release
void Races::saw(const Who& w, u64 at, const Ins& i) {
  const auto it = syncs_.find(at);
  if (it == syncs_.end()) return;
  LaneClocks& l = lane(w);
  if (i.acquire) {
    if (synchronises(it->second, component(w), i.scope)) l.known.join(it->second.clocks);
  } else if (synchronises(it->second, component(w), i.scope)) {
    Scope least = Scope::kCta;
    while (!includes(least, it->second.component, component(w))) least = Scope(u8(least) + 1);
    l.pending[u8(least)].join(it->second.clocks);  // a fence of this scope makes it an acquire
  }
}
void Races::published(const Who& w, u64 at, const Ins& i, bool rmw) {
  LaneClocks& l = lane(w);
  const bool by_fence = !i.release && l.fence != Scope::kNone;
  if (!i.release && !by_fence) {
    if (!rmw) syncs_.erase(at);  // an atomic goes on with the release that it found
    return;
  }
  Sync& s = syncs_[at];
  if (!rmw) s = {};
  if (i.release)
    s.clocks.join(publish(w));
  else
    s.clocks.join(l.fenced);
  s.scope = i.release ? i.scope : std::min(i.scope, l.fence);
  s.component = component(w);
}
void Races::fence(const Who& w, Scope scope) {
  LaneClocks& l = lane(w);
  for (u8 s = 1; s <= u8(scope); ++s) {
    l.known.join(l.pending[s]);
    l.pending[s] = {};
  }
  l.fenced = publish(w);
  l.fence = scope;
}
void Races::proxy_fence(const Who& w, u32 spaces) {
  publish(w);
  LaneClocks& l = lane(w);
  if (spaces & 1) l.known.shared = l.known.hb;
  if (spaces & 2) l.known.global = l.known.hb;
}

// ---- Bulk stores
void Races::waited(const Who& w, u32 group, bool read) {
  const WarpClocks& c = w.warp.clocks;
  if (c.reads == kNone) return;
  lane(w).known.raise(c.reads * kLanes + w.lane, group + 1);
  if (!read) lane(w).known.raise(c.writes * kLanes + w.lane, group + 1);
}

}  // namespace hep::ptxm
