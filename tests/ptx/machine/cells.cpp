// Accesses: each is compared with what is known of its bytes.
#include "impl.h"
#include "races.h"

namespace hep::ptxm {
namespace {

constexpr u64 kPage = 4096;

u8 bytes_of(u64 cell, u64 begin, u64 end) {  // of four, those in [begin, end)
  const u64 from = std::max(cell, begin) - cell, to = std::min(cell + 4, end) - cell;
  return u8(((1u << to) - 1) & ~((1u << from) - 1));
}
std::string line_of(const Ins* i) {
  return i ? std::string(i->name) + " of PTX line " + std::to_string(i->line) : "another";
}

}  // namespace

Cell& Races::global_cell(u64 at) {
  if (at / kPage != near_page_) {
    std::unique_ptr<Cell[]>& cells = pages_[at / kPage];
    if (!cells) cells = std::make_unique<Cell[]>(kPage / 4);
    near_page_ = at / kPage;
    near_cells_ = cells.get();
  }
  return near_cells_[at % kPage / 4];
}

void Races::check_write(const Cell& c, bool write, const Access& a, u64 at) {
  if (c.writer == a.component && !a.proxy) return;
  if (a.strong != Scope::kNone && c.strong != Scope::kNone && includes(a.strong, c.writer, a.component) &&
      includes(c.strong, c.writer, a.component))
    return;
  const auto where = [&] {
    return std::string(write ? "a write" : "a read") + (a.proxy ? " by a bulk copy" : "") + " of " +
           (a.shared ? "shared " : "global ") + (a.shared ? hex(at) : machine_.memory.describe(at));
  };
  const auto other = [&] { return (c.write_async ? "the bulk copy " : "the write ") + line_of(c.write); };
  if (a.known.at(c.writer) < c.write_tick) {
    const bool narrow = a.strong != Scope::kNone && c.strong != Scope::kNone;
    machine_.report(narrow ? "scope" : "race", a.who, &a.ins,
                    where() + (narrow ? " and " : " is not ordered behind ") + other() +
                        (narrow ? " are strong in scopes that do not hold both" : ""));
  } else if (a.proxy && !c.write_async && a.proxy->at(c.writer) < c.write_tick) {
    machine_.report("proxy", a.who, &a.ins,
                    where() + " goes through the async proxy; no fence.proxy.async stands between it and " + other());
  }
}
void Races::check_reads(const Cell& c, const Access& a, u64 at) {
  const auto one = [&](u32 component, u32 tick) {
    if ((component == a.component && !a.proxy) || a.known.at(component) >= tick) return;
    machine_.report("race", a.who, &a.ins,
                    std::string("a write") + (a.proxy ? " by a bulk copy" : "") + " of " +
                        (a.shared ? "shared " + hex(at) : "global " + machine_.memory.describe(at)) +
                        " is not ordered behind " + (c.read_async ? "the bulk copy " : "the read ") + line_of(c.read));
  };
  if (c.reader == kNone)
    for (const Reader& r : readers_[c.read_tick]) one(r.component, r.tick);
  else if (c.read_tick)
    one(c.reader, c.read_tick);
}
void Races::note_read(Cell& c, const Access& a, u8 bytes) {
  c.read_bytes |= bytes;
  c.read_async |= a.proxy != nullptr;
  c.read = &a.ins;
  if (c.reader == kNone) {
    for (Reader& r : readers_[c.read_tick])
      if (r.component == a.component) {
        r.tick = std::max(r.tick, a.tick);
        return;
      }
    readers_[c.read_tick].push_back({a.component, a.tick});
  } else if (!c.read_tick || c.reader == a.component || a.known.at(c.reader) >= c.read_tick) {
    c.reader = a.component;
    c.read_tick = a.tick;
  } else {
    readers_.push_back({{c.reader, c.read_tick}, {a.component, a.tick}});
    c.reader = kNone;
    c.read_tick = u32(readers_.size() - 1);
  }
}
void Races::touch(Cell& c, bool write, const Access& a, u8 bytes, u64 at) {
  if (c.write_tick && (c.write_bytes & bytes)) check_write(c, write, a, at);
  if (!write) {
    if (a.strong == Scope::kNone) note_read(c, a, bytes);
    return;
  }
  if (c.read_bytes & bytes) check_reads(c, a, at);
  if (c.sync) {
    syncs_.erase(at);
    c.sync = false;
  }
  c.writer = a.component;
  c.write_tick = a.tick;
  c.write_bytes = bytes;
  c.write_async = a.proxy != nullptr;
  c.strong = a.strong;
  c.write = &a.ins;
  c.reader = c.read_tick = 0;
  c.read_bytes = 0;
  c.read_async = false;
}
void Races::touch_global(bool write, const Access& a, u64 at, u32 n) {
  for (u64 k = at & ~3ull; k < at + n; k += 4) touch(global_cell(k), write, a, bytes_of(k, at, at + n), k);
}
void Races::touch_shared(bool write, const Access& a, u32 at, u32 n) {
  std::vector<Cell>& cells = a.who.block().cells.cells;
  for (u32 k = at & ~3u; k < at + n; k += 4) touch(cells[k >> 2], write, a, bytes_of(k, at, at + n), k + kSharedBase);
}

void Races::global(const Who& w, u64 at, u32 n, bool write, const Ins& i) {
  LaneClocks& l = lane(w);
  const Access a{w, i, component(w), l.own, l.known.hb, nullptr, i.strong ? i.scope : Scope::kNone, false};
  if (i.acquire && !write) saw(w, at, i);  // what it acquires orders nothing before itself, but the word's own write
  touch_global(write, a, at, n);
  if (!i.strong) return;
  if (write) {
    published(w, at, i, false);
    global_cell(at).sync = true;
  } else if (!i.acquire) {
    saw(w, at, i);
  }
}
void Races::atomic(const Who& w, u64 at, u32 n, const Ins& i) {
  LaneClocks& l = lane(w);
  const Access a{w, i, component(w), l.own, l.known.hb, nullptr, i.scope, false};
  Cell& c = global_cell(at);
  saw(w, at, i);
  c.sync = false;  // the release that it found goes on in it
  touch_global(true, a, at, n);
  published(w, at, i, true);
  c.sync = true;
}
void Races::shared(const Who& w, u32 at, u32 n, bool write, const Ins& i) {
  LaneClocks& l = lane(w);
  touch_shared(write, {w, i, component(w), l.own, l.known.hb, nullptr, i.strong ? i.scope : Scope::kNone, true}, at, n);
}

// At its issue, which is when its thread's knowledge counts.
void Races::issue(const Who& w, BulkCopy& k, const Ins& i) {
  publish(w);  // its own generic accesses are another's to the proxy
  LaneClocks& l = lane(w);
  WarpClocks& warp = w.warp.clocks;
  if (k.load) {
    const Mbar& m = w.block().mbars[k.mbar];
    const Cell& c = w.block().cells.cells[(m.at - kSharedBase) >> 2];
    if (l.known.shared.at(c.writer) < c.write_tick)
      machine_.report("proxy", w, &i,
                      "the init of the mbarrier at shared " + hex(m.at) + " is not fenced for the async proxy");
    const u32 component = m.clocks.component, tick = u32(k.phase + 1);
    touch_global(false, {w, i, component, tick, l.known.hb, &l.known.global, Scope::kNone, false}, k.global, k.bytes);
    touch_shared(true, {w, i, component, tick, l.known.hb, &l.known.shared, Scope::kNone, true}, k.shared, k.bytes);
    return;
  }
  if (warp.reads == kNone) {
    warp.reads = new_group(w.block());
    warp.writes = new_group(w.block());
  }
  touch_shared(false,
               {w, i, warp.reads * kLanes + w.lane, k.group + 1, l.known.hb, &l.known.shared, Scope::kNone, true},
               k.shared, k.bytes);
  touch_global(true,
               {w, i, warp.writes * kLanes + w.lane, k.group + 1, l.known.hb, &l.known.global, Scope::kNone, false},
               k.global, k.bytes);
}

void Races::forget(u64 base, u64 bytes) {
  for (u64 at = base & ~3ull; at < base + bytes;) {
    const u64 end = std::min((at / kPage + 1) * kPage, base + bytes);
    if (const auto it = pages_.find(at / kPage); it != pages_.end())
      for (; at < end; at += 4) it->second[at % kPage / 4] = {};
    at = end;
  }
}

}  // namespace hep::ptxm
