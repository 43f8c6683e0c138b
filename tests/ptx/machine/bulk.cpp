// Bulk copies. Each takes its source at one moment and writes its destination at a later one, both drawn by the seed:
// they complete late and in any order.
#include <cstring>

#include "impl.h"

namespace hep::ptxm {
namespace {

std::string check(Context& c, const BulkCopy& k, u32 shared_address) {
  const SharedMemory& s = c.warp->block->shared;
  if (k.bytes % 16) return "a bulk copy of " + std::to_string(k.bytes) + " bytes, which is no multiple of 16";
  if (k.global % 16 || shared_address % 16)
    return "a bulk copy whose ends are not aligned to 16: global " + hex(k.global) + ", shared " + hex(shared_address);
  if (shared_address < kSharedBase || u64(k.shared) + k.bytes > s.bytes.size())
    return "a bulk copy of " + std::to_string(k.bytes) + " bytes at shared " + hex(shared_address) +
           ", outside the block's " + std::to_string(s.bytes.size());
  if (k.bytes && !c.machine->memory.holds(k.global, k.bytes, !k.load))
    return "a bulk copy of " + std::to_string(k.bytes) + " bytes at global " + c.machine->memory.describe(k.global);
  return {};
}

Flow bulk_copy(Context& c, const Ins& i, u32 mask, bool load) {
  MachineImpl& m = *c.machine;
  Warp& w = *c.warp;
  SharedMemory& s = w.block->shared;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest)), address = c.row<u32>(i.o[1])[lane];
    BulkCopy k;
    k.load = load;
    k.warp = &w;
    k.lane = lane;
    k.ins = &i;
    k.global = c.row<u64>(i.o[2])[lane];
    k.shared = address - kSharedBase;
    k.bytes = c.row<u32>(i.o[3])[lane];
    if (const std::string wrong = check(c, k, address); !wrong.empty()) return m.fault(c, i, lane, wrong);
    if (k.bytes == 0) m.report("bulk", {w, lane}, &i, "a bulk copy of nothing");
    for (u32 a = k.shared; a < k.shared + k.bytes; a += 8)
      if (s.mbars[a >> 3]) m.report("mbarrier", {w, lane}, &i, "a bulk copy over a live mbarrier");
    if (load) {
      Mbar* bar = m.find_mbar(c, i, lane, c.row<u32>(i.o[4])[lane]);
      if (!bar) return Flow::kStop;
      k.phase = bar->phase;
      k.mbar = s.mbars[(bar->at - kSharedBase) >> 3] - 1u;
    } else {
      for (u32 a = k.shared; a < k.shared + k.bytes; a += 16)
        if (s.written_bits(a, 16) != 0xffff) {
          m.report("uninitialised", {w, lane}, &i,
                   "a bulk store reads byte " + std::to_string(a - k.shared) + " of " + std::to_string(k.bytes) +
                       " at shared " + hex(address) + ", which was never written");
          break;
        }
      if (!w.copies) w.copies = std::make_unique<LaneCopies[]>(kLanes);
      BulkGroup& open = w.copies[lane].open;
      k.group = open.number;
      ++open.unread;
      ++open.unwritten;
    }
    m.issue(c, std::move(k));
  }
  return Flow::kYield;
}

// Whether all but the newest `pending` groups are that far.
bool arrived(const LaneCopies& l, s64 pending, bool read) {
  for (s64 k = 0; k < s64(l.committed.size()) - pending; ++k)
    if (read ? l.committed[size_t(k)].unread : l.committed[size_t(k)].unwritten) return false;
  return true;
}
bool all_arrived(const Warp& w, const Fragment& f, const Ins& i) {
  if (!w.copies) return true;
  for (u32 rest = f.mask; rest; rest &= rest - 1)
    if (!arrived(w.copies[std::countr_zero(rest)], i.offset, i.sign)) return false;
  return true;
}
void note_arrived(MachineImpl& m, Warp& w, u32 mask, const Ins& i) {
  for (u32 rest = mask; w.copies && rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest));
    LaneCopies& l = w.copies[lane];
    const s64 n = s64(l.committed.size()) - i.offset;
    if (n <= 0) continue;
    if (m.races) m.races->waited({w, lane}, l.committed[size_t(n - 1)].number, i.sign);
    if (!i.sign) l.committed.erase(l.committed.begin(), l.committed.begin() + n);
  }
}

}  // namespace

void MachineImpl::issue(Context& c, BulkCopy k) {
  if (races) races->issue({*c.warp, k.lane}, k, *k.ins);
  ++c.warp->block->copies_in_flight;
  u32 slot = u32(copies.size());
  if (free_copies.empty())
    copies.emplace_back();
  else {
    slot = free_copies.back();
    free_copies.pop_back();
  }
  copies[slot] = std::move(k);
  const u64 most = options.copy_delay_ns;  // mostly soon, sometimes very late
  events.push({now() + random.below(random.below(4) ? most / 8 + 1 : most + 1), nullptr, 0, slot});
}

void MachineImpl::step_copy(u32 slot) {
  BulkCopy& k = copies[slot];
  if (k.dropped) {
    k = BulkCopy{};
    free_copies.push_back(slot);
    return;
  }
  Warp& w = *k.warp;
  Block& b = *w.block;
  u8 *shared = &b.shared.bytes[k.shared], *global = reinterpret_cast<u8*>(k.global);
  const auto group = [&](u32 BulkGroup::* left) {
    LaneCopies& l = w.copies[k.lane];
    if (l.open.number == k.group) --(l.open.*left);
    for (BulkGroup& g : l.committed)
      if (g.number == k.group) --(g.*left);
  };
  if (!k.read) {
    k.data.assign(k.load ? global : shared, (k.load ? global : shared) + k.bytes);
    k.read = true;
    if (!k.load) group(&BulkGroup::unread);
    events.push({now() + random.below(options.copy_delay_ns / 4 + 1), nullptr, 0, slot});
  } else {
    std::memcpy(k.load ? shared : global, k.data.data(), k.bytes);
    --b.copies_in_flight;
    if (k.load) {
      b.shared.set_initialised(k.shared, k.bytes);
      Mbar& m = b.mbars[k.mbar];
      if (m.phase != k.phase)
        report("mbarrier", {w, k.lane}, k.ins,
               "the bytes of this bulk load arrive in a later phase of the mbarrier at shared " + hex(m.at) +
                   " than it was issued in");
      m.bytes -= k.bytes;
      if (m.bytes < -((1 << 20) - 1))
        report("mbarrier", {w, k.lane}, k.ins, "the tx-count of the mbarrier at shared " + hex(m.at) + " underflows");
      end_phase_if_complete(b, m);
    } else {
      group(&BulkGroup::unwritten);
    }
    const u32 lane = k.lane;
    const bool load = k.load;
    k = BulkCopy{};
    free_copies.push_back(slot);
    if (b.live == 0) return end_block_if_over(b);
    if (!load) wake_waiter(w, lane);
    return;
  }
  if (!k.load) wake_waiter(w, k.lane);
}
void MachineImpl::wake_waiter(Warp& w, u32 lane) {
  for (Fragment& f : w.parts)
    if (f.state == Fragment::kBulk && (f.mask >> lane & 1) && all_arrived(w, f, *f.at)) {
      note_arrived(*this, w, f.mask, *f.at);
      wake(w, f);
    }
}

Flow bulk_load(Context& c, const Ins& i, u32 mask) {
  return bulk_copy(c, i, mask, true);
}
Flow bulk_store(Context& c, const Ins& i, u32 mask) {
  return bulk_copy(c, i, mask, false);
}
Flow bulk_commit(Context& c, const Ins&, u32 mask) {
  Warp& w = *c.warp;
  if (!w.copies) w.copies = std::make_unique<LaneCopies[]>(kLanes);
  for (u32 rest = mask; rest; rest &= rest - 1) {
    LaneCopies& l = w.copies[std::countr_zero(rest)];
    l.committed.push_back(l.open);
    l.open = {l.open.number + 1, 0, 0};
  }
  return Flow::kGo;
}
Flow bulk_wait(Context& c, const Ins& i, u32 mask) {
  if (all_arrived(*c.warp, *c.fragment, i)) {
    note_arrived(*c.machine, *c.warp, mask, i);
    return Flow::kGo;
  }
  c.fragment->state = Fragment::kBulk;
  c.fragment->at = &i;
  return Flow::kStop;
}
Flow proxy_fence(Context& c, const Ins& i, u32 mask) {
  if (c.machine->races)
    for (u32 rest = mask; rest; rest &= rest - 1)
      c.machine->races->proxy_fence({*c.warp, u32(std::countr_zero(rest))}, u32(i.offset));
  return Flow::kGo;
}

}  // namespace hep::ptxm
