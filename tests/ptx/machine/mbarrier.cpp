// mbarriers: arrivals, transaction counts, phases.
#include "impl.h"

namespace hep::ptxm {
namespace {
constexpr s64 kMostArrivals = (1 << 20) - 1, kMostBytes = (1 << 20) - 1;  // of the ISA
}

Mbar* MachineImpl::find_mbar(Context& c, const Ins& i, u32 lane, u32 address) {
  Block& b = *c.warp->block;
  const u32 off = address - kSharedBase;
  if (address % 8 || address < kSharedBase || off + 8 > b.shared.bytes.size()) {
    fault(c, i, lane, "an mbarrier at shared " + hex(address) + ", which is misaligned or outside");
    return nullptr;
  }
  const u16 number = b.shared.mbars[off >> 3];
  if (!number) {
    fault(c, i, lane, "no mbarrier was initialised at shared " + hex(address));
    return nullptr;
  }
  Mbar& m = b.mbars[number - 1u];
  if (races) races->use({*c.warp, lane}, m, i);
  return &m;
}

void MachineImpl::end_phase_if_complete(Block& b, Mbar& m) {
  if (m.pending != 0 || m.bytes != 0) return;
  ++m.phase;
  m.pending = m.expected;
  if (races) races->complete(m);
  for (Warp& w : b.warps)
    for (Fragment& f : w.parts)
      if (f.state == Fragment::kSleep && f.mbar == m.at) wake(w, f);
}

Flow mbar_init(Context& c, const Ins& i, u32 mask) {
  Block& b = *c.warp->block;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest)), at = u32(c.row<u32>(i.o[4])[lane] + u64(i.offset)),
              off = at - kSharedBase;
    const s64 count = c.row<u32>(i.o[1])[lane];
    if (at % 8 || at < kSharedBase || off + 8 > b.shared.bytes.size())
      return c.machine->fault(c, i, lane, "mbarrier.init at shared " + hex(at) + ", which is misaligned or outside");
    if (count < 1 || count > kMostArrivals)
      return c.machine->fault(c, i, lane, "mbarrier.init for " + std::to_string(count) + " arrivals");
    u16& number = b.shared.mbars[off >> 3];
    if (number) c.machine->report("mbarrier", {*c.warp, lane}, &i, "init of a live mbarrier at shared " + hex(at));
    if (!number) {
      b.mbars.emplace_back();
      number = u16(b.mbars.size());
    }
    Mbar& m = b.mbars[number - 1u];
    m = Mbar{};
    m.at = at;
    m.live = true;
    m.expected = m.pending = count;
    b.shared.set_initialised(off, 8);
    if (c.machine->races) c.machine->races->init({*c.warp, lane}, m, i);
  }
  return Flow::kGo;
}

Flow mbar_arrive(Context& c, const Ins& i, u32 mask) {
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest)), at = u32(c.row<u32>(i.o[4])[lane] + u64(i.offset));
    Mbar* m = c.machine->find_mbar(c, i, lane, at);
    if (!m) return Flow::kStop;
    if (i.o[1] != kNone) {
      m->bytes += c.row<u32>(i.o[1])[lane];
      if (m->bytes > kMostBytes)
        return c.machine->fault(
            c, i, lane,
            "the tx-count of the mbarrier at shared " + hex(at) + " overflows: " + std::to_string(m->bytes));
    }
    if (m->pending <= 0)
      return c.machine->fault(c, i, lane,
                              "more arrivals than the mbarrier at shared " + hex(at) + " expects (" +
                                  std::to_string(m->expected) + "); its tx-count is " + std::to_string(m->bytes));
    --m->pending;
    if (c.machine->races) c.machine->races->arrive({*c.warp, lane}, *m);
    c.machine->end_phase_if_complete(*c.warp->block, *m);
  }
  return Flow::kYield;
}

Flow mbar_wait(Context& c, const Ins& i, u32 mask) {
  u32 done = 0, address = 0;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest));
    address = u32(c.row<u32>(i.o[4])[lane] + u64(i.offset));
    Mbar* m = c.machine->find_mbar(c, i, lane, address);
    if (!m) return Flow::kStop;
    if ((m->phase & 1) == (c.row<u32>(i.o[1])[lane] & 1)) continue;
    done |= 1u << lane;
    if (c.machine->races) c.machine->races->observe({*c.warp, lane}, *m);
  }
  u32& p = c.predicate(i.o[0]);
  p = (p & ~mask) | done;
  if (done == mask) return Flow::kGo;
  if (done || !i.sign) return Flow::kYield;
  c.fragment->at = &i;
  c.machine->sleep(*c.warp, *c.fragment, c.machine->now() + c.machine->random.below(1000), address);
  return Flow::kStop;
}

}  // namespace hep::ptxm
