// Where threads wait for one another: warp-wide instructions, block barriers, exits.
#include "impl.h"

namespace hep::ptxm {

Flow do_exit(Context& c, const Ins&, u32 mask) {
  c.machine->exit_lanes(c, mask);
  return Flow::kStop;
}
Flow do_return(Context& c, const Ins& i, u32 mask) {
  Fragment& f = *c.fragment;
  if (f.depth == 0) return do_exit(c, i, mask);
  f.pc = f.returns[--f.depth];
  return Flow::kGo;
}
Flow do_call(Context& c, const Ins& i, u32) {
  Fragment& f = *c.fragment;
  if (f.depth == std::size(f.returns)) return c.machine->fault(c, i, u32(std::countr_zero(f.mask)), "calls too deep");
  f.returns[f.depth++] = f.pc;
  f.pc = i.target;
  return Flow::kGo;
}
Flow do_special(Context& c, const Ins& i, u32 mask) {
  const Block& b = *c.warp->block;
  u64 v = 0;
  switch (i.offset) {
    case kBlockSize: v = b.run->launch.block; break;
    case kBlockIndex: v = b.index; break;
    case kGridSize: v = b.run->launch.grid; break;
    case kTimer: v = c.machine->timer(); break;
    case kOne: v = 1; break;
    default: break;
  }
  each_lane(mask, [&](u32 lane) {
    const u64 mine = i.offset == kThread ? c.warp->index * kLanes + lane : i.offset == kLaneIndex ? lane : v;
    c.set(i.o[0], i.bytes, lane, mine);
  });
  return Flow::kGo;
}
Flow do_nanosleep(Context& c, const Ins& i, u32 mask) {
  const u32 ns = c.row<u32>(i.o[1])[std::countr_zero(mask)];
  if (ns > 1'000'000)
    return c.machine->fault(c, i, u32(std::countr_zero(mask)), "nanosleep of more than a millisecond");
  c.machine->sleep(*c.warp, *c.fragment, c.machine->now() + c.machine->random.below(2 * u64(ns) + 1));
  return Flow::kStop;
}

// ---- The warp's
Flow warp_meeting(Context& c, const Ins& i, u32 mask) {
  Warp& w = *c.warp;
  Fragment& f = *c.fragment;
  const u32* members = c.row<u32>(i.o[1]);
  const u32 first = u32(std::countr_zero(mask));
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest));
    if (!(members[lane] >> lane & 1)) return c.machine->fault(c, i, lane, "a lane that its own member mask leaves out");
    if (members[lane] != members[first])
      return c.machine->fault(c, i, lane, "lanes that run together name different members");
  }
  for (const Fragment& o : w.parts)
    if (&o != &f && o.state == Fragment::kMeeting && (o.members & mask) &&
        (o.at->offset != i.offset || (i.offset != kWarpSync && o.at != &i)))
      c.machine->report("convergence", {w, first}, &i,
                        std::string("lanes of one warp wait at different warp-wide instructions: the other is ") +
                            o.at->name + " of PTX line " + std::to_string(o.at->line));
  f.state = Fragment::kMeeting;
  f.at = &i;
  f.members = members[first];
  c.machine->check_warp(w);
  // On the way to a line its parts are joined first, which is done between turns.
  const bool apart = w.parts.size() > 1 && w.block->run->program->code[f.pc].to_line;
  return f.state == Fragment::kRun && !apart ? Flow::kGo : Flow::kStop;
}

void MachineImpl::check_warp(Warp& w) {
  u32 looked = 0;
  for (size_t k = 0; k < w.parts.size(); ++k) {
    if (w.parts[k].state != Fragment::kMeeting || (looked & w.parts[k].mask)) continue;
    const Fragment& first = w.parts[k];
    const Ins& i = *first.at;
    // Those that name the same members at the same instruction; two bar.warp.sync are one.
    const auto meets = [&](const Fragment& f) {
      return f.state == Fragment::kMeeting && f.members == first.members &&
             (f.at == &i || (i.offset == kWarpSync && f.at->offset == kWarpSync));
    };
    u32 here = 0, ballot = 0;
    for (const Fragment& f : w.parts)
      if (meets(f)) here |= f.mask;
    looked |= here;
    if ((here & first.members & w.live) != (first.members & w.live)) continue;
    Context c{{w.rows, const_cast<u8*>(w.block->run->program->constant_rows())}, this, &w, nullptr};
    if (i.offset == kBallot) ballot = c.predicate(i.o[2]) & here;
    u32 largest = 0;
    const u32 sign =
        i.offset == kLargestSigned ? 1u << 31 : 0;  // flipped, signed values are in the order of the others
    if (i.offset == kLargest || sign)
      each_lane(here, [&](u32 lane) { largest = std::max(largest, c.row<u32>(i.o[2])[lane] ^ sign); });
    const u32 leader = here & -here;
    if (races && i.offset == kWarpSync) races->meet(w, here);
    const u32 members = first.members;
    const Ins* at = &i;
    for (Fragment& f : w.parts)
      if (f.state == Fragment::kMeeting && f.members == members &&
          (f.at == at || (at->offset == kWarpSync && f.at->offset == kWarpSync))) {
        if (at->offset == kBallot) each_lane(f.mask, [&](u32 lane) { c.row<u32>(at->o[0])[lane] = ballot; });
        if (at->offset == kLargest || at->offset == kLargestSigned)
          each_lane(f.mask, [&](u32 lane) { c.row<u32>(at->o[0])[lane] = largest ^ sign; });
        if (at->offset == kElect) {
          u32& p = c.predicate(at->o[0]);
          p = (p & ~f.mask) | (leader & f.mask);
        }
        wake(w, f);
      }
  }
}

// ---- The block's
Flow block_barrier(Context& c, const Ins& i, u32 mask) {
  Warp& w = *c.warp;
  Block& b = *w.block;
  Fragment& f = *c.fragment;
  const u32 lane = u32(std::countr_zero(mask)), id = c.row<u32>(i.o[1])[lane];
  if (id >= 16) return c.machine->fault(c, i, lane, "barrier " + std::to_string(id) + ", of 16");
  BlockBarrier& bar = b.barriers[id];
  if (bar.kind && (bar.kind->o[0] == kNone) != (i.o[0] == kNone))
    c.machine->report("barrier", {w, lane}, &i, "bar.sync meets bar.red at barrier " + std::to_string(id));
  for (const Fragment& o : w.parts)
    if (&o != &f && o.state == Fragment::kBarrier && o.at != &i)
      c.machine->report(
          "barrier", {w, lane}, &i,
          "lanes of one warp wait at different barriers: the other is at PTX line " + std::to_string(o.at->line));
  bar.kind = &i;
  bar.arrived += u32(std::popcount(mask));
  if (i.o[2] != kNone) bar.predicates += u32(std::popcount(c.predicate(i.o[2]) & mask));
  f.state = Fragment::kBarrier;
  f.at = &i;
  f.barrier = id;
  c.machine->check_barrier(b, id);
  return f.state == Fragment::kRun ? Flow::kGo : Flow::kStop;
}
void MachineImpl::check_barrier(Block& b, u32 id) {
  BlockBarrier& bar = b.barriers[id];
  if (!bar.arrived || bar.arrived < b.live) return;
  const u32 count = bar.predicates;
  bar = BlockBarrier{};
  if (races) races->meet(b, id);
  for (Warp& w : b.warps)
    for (Fragment& f : w.parts)
      if (f.state == Fragment::kBarrier && f.barrier == id) {
        Context c{{w.rows, nullptr}, this, &w, &f};
        if (f.at->o[0] != kNone) each_lane(f.mask, [&](u32 lane) { c.row<u32>(f.at->o[0])[lane] = count; });
        wake(w, f);
      }
}

// ---- Exits: whoever has gone counts as come
void MachineImpl::exit_lanes(Context& c, u32 mask) {
  Warp& w = *c.warp;
  Block& b = *w.block;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest));
    if (w.copies && w.copies[lane].open.unwritten)
      report("exit", {w, lane}, nullptr, "a thread ends with bulk stores that it has not committed");
    if (races) races->exit({w, lane});
  }
  w.live &= ~mask;
  c.fragment->mask &= ~mask;
  b.live -= u32(std::popcount(mask));
  check_warp(w);
  for (u32 id = 0; id < 16; ++id)
    if (b.barriers[id].arrived) check_barrier(b, id);
}

}  // namespace hep::ptxm
