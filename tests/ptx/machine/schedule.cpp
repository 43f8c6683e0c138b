// Who runs next, and for how long: everything by the seed.
#include <unistd.h>

#include <algorithm>
#include <ctime>

#include "impl.h"

namespace hep::ptxm {
namespace {
u64 ns_of(clockid_t clock) {
  timespec t;
  ::clock_gettime(clock, &t);
  return u64(t.tv_sec) * 1'000'000'000 + u64(t.tv_nsec);
}
constexpr u64 kNapNs = 50'000, kLongestNapNs = 200'000;
}  // namespace

MachineImpl::MachineImpl(const Options& o) : options(o), random(o.seed) {
  if (o.races) races = std::make_unique<Races>(*this);
}

// Deadlines must pass where others wait for them, and not because this process got no CPU: the clock is what the
// machine's thread has run and napped. Copies and sleeps go by now(), so that the seed alone says what comes before
// what.
u64 MachineImpl::clock() const {
  return kStart + (ns_of(CLOCK_THREAD_CPUTIME_ID) + napped) * options.clock_speed;
}
u64 MachineImpl::timer() const {
  return options.outsiders ? std::max(now(), clock()) : now();
}
void MachineImpl::nap() {
  const u64 since = ns_of(CLOCK_MONOTONIC);
  ::usleep(kNapNs / 1000);
  napped += std::min(ns_of(CLOCK_MONOTONIC) - since, kLongestNapNs);  // the rest it waited for a core
}

void MachineImpl::make_ready(Warp& w) {
  if (w.ready_at >= 0) return;
  w.ready_at = s32(ready.size());
  ready.push_back(&w);
}
void MachineImpl::make_unready(Warp& w) {
  if (w.ready_at < 0) return;
  Warp* last = ready.back();
  ready[size_t(w.ready_at)] = last;
  last->ready_at = w.ready_at;
  ready.pop_back();
  w.ready_at = -1;
}
void MachineImpl::wake(Warp& w, Fragment& f) {
  f.state = Fragment::kRun;
  f.mbar = 0;
  make_ready(w);
}
void MachineImpl::sleep(Warp& w, Fragment& f, u64 until, u32 mbar) {
  f.state = Fragment::kSleep;
  f.wake = until;
  f.mbar = mbar;
  events.push({until, &w, w.block->serial, 0});
}

// Lanes that are at the same place go on together; now and then they are parted for some turns, which they must bear
// anywhere but on their way from a meeting to a line.
void MachineImpl::join_parts(Warp& w) {
  const Ins* code = w.block->run->program->code.data();
  if (w.parts.size() > 1)
    for (size_t k = 0; k < w.parts.size(); ++k)
      for (size_t n = w.parts.size(); n-- > k + 1;)
        if ((!w.apart || code[w.parts[k].pc].to_line) && w.parts[k].together(w.parts[n])) {
          w.parts[k].mask |= w.parts[n].mask;
          w.parts.erase(w.parts.begin() + s64(n));
        }
  if (w.apart) --w.apart;
  if (options.split_percent && random.below(100) < options.split_percent) {
    Fragment& f = w.parts[random.below(w.parts.size())];
    const u32 part = f.mask & u32(random());
    if (f.state != Fragment::kRun || code[f.pc].to_line || !part || part == f.mask) return;
    Fragment other = f;
    f.mask &= ~part;
    other.mask = part;
    w.parts.push_back(other);
    w.apart = 1 + u32(random.below(16));
  }
}
// Mostly the part that is furthest behind, so that parts meet; sometimes any, so that none starves another.
u32 MachineImpl::choose(Warp& w) {
  u32 can = 0, best = kNone, any = kNone;
  for (u32 k = 0; k < w.parts.size(); ++k) {
    if (w.parts[k].state != Fragment::kRun) continue;
    if (random.below(++can) == 0) any = k;
    if (best == kNone || w.parts[k].pc < w.parts[best].pc) best = k;
  }
  return can > 1 && random.below(8) == 0 ? any : best;
}

u32 MachineImpl::run_fragment(Warp& w, u32 index, u32 burst) {
  const Program& program = *w.block->run->program;
  const Ins* code = program.code.data();
  Counts* count = counts[&program].data();
  Context c{{w.rows, const_cast<u8*>(program.constant_rows())}, this, &w, &w.parts[index]};
  Fragment* f = c.fragment;
  const auto stop_place = [&] {  // where another part waits to go on together
    u32 place = kNone;
    if (!w.apart)
      for (const Fragment& o : w.parts)
        if (&o != f && o.state == Fragment::kRun && o.pc > f->pc) place = std::min(place, o.pc);
    return place;
  };
  u32 stop = stop_place(), n = 0, lanes = u32(std::popcount(f->mask));
  while (n < burst) {
    const Ins& i = code[f->pc];
    u32 mask = f->mask;
    if (i.guard != kNone) {
      const u32 p = c.predicate(i.guard);
      mask &= i.guard_not ? ~p : p;
    }
    ++n;
    ++count[f->pc].warps;
    count[f->pc].threads += lanes;
    thread_steps += lanes;
    if (i.kind == Kind::kPlain) [[likely]] {
      ++f->pc;
      if (mask) {
        const Flow flow = i.run(c, i, mask);
        if (flow != Flow::kGo) [[unlikely]] {
          if (flow == Flow::kStop) break;
          if (random() & 1) break;
        }
      }
    } else if (i.kind == Kind::kBranch) {
      if (mask != f->mask && mask) {
        Fragment other = *f;
        other.mask = mask;
        other.pc = i.target;
        f->mask &= ~mask;
        w.parts.push_back(other);  // reserved: no more parts than lanes
      }
      if (mask == f->mask)
        f->pc = i.target;
      else {
        ++f->pc;
        lanes = u32(std::popcount(f->mask));
      }
      stop = stop_place();
    } else {
      ++f->pc;
      if (!mask) continue;
      if (mask != f->mask) {
        Fragment other = *f;
        other.mask &= ~mask;
        f->mask = mask;
        w.parts.push_back(other);
      }
      if (i.run(c, i, mask) != Flow::kGo) break;
      stop = stop_place();
      lanes = u32(std::popcount(f->mask));
    }
    if (f->pc == stop) break;
  }
  w.steps += n;
  longest_warp = std::max(longest_warp, w.steps);
  return n;
}

void MachineImpl::take_event(const Event& e) {
  if (!e.warp) return step_copy(e.copy);
  const auto b = blocks.find(e.serial);
  if (b == blocks.end()) return;
  for (Fragment& f : e.warp->parts)
    if (f.state == Fragment::kSleep && f.wake <= now()) wake(*e.warp, f);
}

void MachineImpl::end_failed() {
  run_failed = false;
  for (auto& r : runs)
    if (r->failed && !r->done) kill(*r);
}

Progress MachineImpl::run(u32 quanta) {
  if (!running) return ended.empty() ? Progress::kIdle : Progress::kEnded;
  for (u32 q = 0; q < quanta; ++q) {
    while (!events.empty() && events.top().when <= now()) {
      const Event e = events.top();
      events.pop();
      take_event(e);
    }
    if (run_failed) end_failed();
    if (!ended.empty()) return Progress::kEnded;
    if (ready.empty()) {
      if (events.empty()) return report_deadlock(), Progress::kStuck;
      const u64 next = events.top().when;
      if (options.outsiders && next > clock()) {
        nap();  // others may do meanwhile what is waited for
        return Progress::kSome;
      }
      if (next > now()) jumped += next - now();
      continue;
    }
    Warp& w = *ready[random.below(ready.size())];
    join_parts(w);
    const u32 part = choose(w);
    if (part == kNone) {
      make_unready(w);
      continue;
    }
    warp_steps += run_fragment(w, part, 1 + u32(random.below(options.burst)));
    std::erase_if(w.parts, [](const Fragment& f) { return f.mask == 0; });
    if (w.parts.empty()) {
      make_unready(w);
      if (w.block->live == 0) end_block_if_over(*w.block);
    }
  }
  return Progress::kSome;
}

}  // namespace hep::ptxm
