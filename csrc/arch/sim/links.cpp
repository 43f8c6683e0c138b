// Flags, meetings and the rail: what crosses between lanes and ranks.
#include <algorithm>
#include <cstring>

#include "arch/sim/clockwork.h"
#include "arch/sim/machine.h"

namespace hep::sim {

namespace mbar = host::mbar;

// ---------------------------------------------------------------- waits

void Machine::wait_phase(Lane& me, const Mbarrier& bar, uint32_t parity, const WaitInfo& info) {
  if (timed()) {
    clockwork_->flush(me);
    spend(me, config_.costs.barrier_ps);
  } else {
    step(me);
    require_barrier(me, bar, "mbar_wait");
  }
  me.wait.info = info;
  if ((bar.word ^ parity) & 1) return;
  me.wait = {Wait::kPhase, &bar.word, parity, info};
  block(me);
}

void Machine::wake_phase_waiters(Block& block, const Mbarrier& bar) {
  for (Lane* lane : block.lanes)
    if (lane->alive && lane->wait.kind == Wait::kPhase && lane->wait.word == &bar.word &&
        ((bar.word ^ lane->wait.value) & 1)) {
      if (timed()) clockwork_->resume(*lane, config_.costs.wake_ps);
      wake(*lane);
    }
}

void Machine::wait_word(Lane& me, const uint64_t* word, uint64_t value, const WaitInfo& info, Ps cost) {
  if (timed())
    spend(me, cost);
  else
    step(me);
  if (*word >= value) return;
  me.wait = {Wait::kWord, word, value, info};
  rank(me.rank).waiting.push_back(&me);
  block(me);
}

// A poller has found nothing: it goes on when some flag of its rank has changed since its round began.
void Machine::poll(Lane& me, const WaitInfo& info, uint64_t expected, uint64_t seen) {
  Rank& r = rank(me.rank);
  if (r.changes != me.seen_changes) {
    me.seen_changes = r.changes;
    if (timed())
      clockwork_->sync(me);
    else
      yield(me);
    me.seen_changes = r.changes;
    return;
  }
  me.wait = {Wait::kPoll, nullptr, 0, info, expected, seen};
  r.waiting.push_back(&me);
  block(me);
  me.seen_changes = r.changes;
}

void Machine::poll_reset(Lane& me) {
  me.seen_changes = rank(me.rank).changes;
}

void Machine::wake_flag_waiters(int r) {
  Rank& owner = rank(r);
  ++owner.changes;
  std::erase_if(owner.waiting, [&](Lane* lane) {
    const Wait& w = lane->wait;
    const bool met = w.kind == Wait::kPoll || (w.kind == Wait::kWord && *w.word >= w.value);
    if (met) {
      if (timed()) clockwork_->found(*lane, config_.costs.poll_ps);
      wake(*lane);
    }
    return met;
  });
}

void Machine::meet(Lane& me, uint64_t& arrived, uint64_t participants) {
  if (timed()) {
    clockwork_->flush(me);
    spend(me, config_.costs.barrier_ps);
  } else {
    step(me);
  }
  Block& b = *me.block;
  const uint64_t target = (arrived / participants + 1) * participants;
  b.meet_at = arrived % participants == 0 ? me.now : std::max(b.meet_at, me.now);
  if (++arrived < target) {
    me.wait = {Wait::kMeet, &arrived, target};
    block(me);
    return;
  }
  me.now = b.meet_at;
  for (Lane* lane : b.lanes)
    if (lane->alive && lane->wait.kind == Wait::kMeet && lane->wait.word == &arrived) {
      lane->now = b.meet_at;
      wake(*lane);
    }
}

// ---------------------------------------------------------------- flags

int Machine::segment_of(const Lane& me, const void* flag) const {
  const auto* p = static_cast<const unsigned char*>(flag);
  for (int r = 0; r < num_ranks(); ++r)
    if (const unsigned char* base = rank(r).segment; base && p >= base && p < base + layout_->total) return r;
  throw_rule(me, "outside_memory", "a flag outside every rank's registered memory");
}

// Of system scope, in front of a release: the lane's own stores have arrived when it goes on.
void Machine::fence_sys(Lane& me) {
  if (timed()) spend(me, config_.costs.fence_ps);
}

void Machine::set_flag(Lane& me, uint64_t* flag, uint64_t value, bool add) {
  if (const Region* notification = memory_.find(flag, sizeof *flag);
      notification && notification->use == Region::Use::kNotification) {
    if (timed()) spend(me, config_.costs.flag_ps);
    *flag = value;  // for the host, which has no clock here: it sees the notification at once
    return;
  }
  const int owner = segment_of(me, flag);
  if (timed()) return clockwork_->set_flag(me, flag, value, add, owner);
  step(me);
  *flag = add ? *flag + value : value;
  if (config_.log) note(me, "sets a flag of rank " + std::to_string(owner) + " to " + std::to_string(*flag));
  wake_flag_waiters(owner);
}

uint64_t Machine::add_rank(Lane& me, uint64_t* word, uint64_t value, Ps cost) {
  if (timed()) {
    spend(me, cost);
    clockwork_->sync(me);
  } else {
    step(me);
  }
  const uint64_t old = *word;
  *word = old + value;
  wake_flag_waiters(me.rank);
  return old;
}

uint64_t Machine::look(Lane& me, const uint64_t* flag, uint64_t wanted, Ps cost) {
  if (timed()) {
    spend(me, cost);
    if (*flag < wanted) clockwork_->sync(me);
  } else {
    step(me);
  }
  return *flag;
}

// ---------------------------------------------------------------- the rail

void Machine::put(Lane& me, int node, uint64_t offset, const void* src, uint64_t bytes, const uint64_t* flag_offset,
                  uint64_t value) {
  const int peer = world_.rank_of(node, me.rank % config_.num_local_ranks);
  unsigned char* base = rank(peer).segment;
  Put put;
  put.flag = flag_offset ? reinterpret_cast<uint64_t*>(base + *flag_offset) : nullptr;
  put.value = value;
  put.bytes = bytes;
  if (bytes) {
    put.dst = base + offset;
    put.src = static_cast<const unsigned char*>(src);
  }
  if (timed()) return clockwork_->put(me, peer, put.dst, put.src, bytes, put.flag, value);
  step(me);
  if (bytes) {
    put.from = &memory_.require(me, src, bytes, "put");
    put.to = &memory_.require(me, put.dst, bytes, "put");
    if (put.to->use != Region::Use::kRecvRing && put.to->use != Region::Use::kCounts &&
        put.to->use != Region::Use::kRail)
      throw_rule(me, "outside_rows", std::string("a put into the peer's ") + put.to->name);
    memory_.check_read(me, *put.from, src, bytes, "put");
    memory_.check_write(me, *put.to, put.dst, bytes, "put");
    const GranuleSpan from(put.from->offset(src), bytes), to(put.to->offset(put.dst), bytes);
    hep::sim::add(put.from->reading, from.at, from.n, 1);
    hep::sim::add(put.to->writing, to.at, to.n, 1);
    if (put.to->use == Region::Use::kRecvRing)
      put.slot = uint32_t(put.to->offset(put.dst) / layout_->slot_bytes % layout_->rail_slots);
  } else if (flag_offset) {
    give_back(me, *flag_offset, node);
  }
  const uint32_t at = uint32_t(num_ranks() + me.rank * config_.num_nodes + node);
  Wire& wire = wires_[at];
  if (config_.log)
    note(me, (bytes ? "puts " + std::to_string(bytes) + " bytes to rank " : std::string("signals rank ")) +
                 std::to_string(peer) + (put.flag ? ", flag = " + std::to_string(value) : ""));
  const Fault& fault = config_.fault;
  const bool hit = fault.rank == me.rank && fault.peer_node == node && wire.posted++ >= fault.at;
  if (hit && fault.kind == Fault::kPutLost && wire.posted == fault.at + 1) return;  // never completes
  if (hit && fault.kind == Fault::kRailStops) wire.stopped = true;
  wire.puts.push_back(put);
  if (!wire.stopped) set_ready(at, wire.ready);
}

// A credit: the slot of our receive ring that it names is dead from here on.
void Machine::give_back(const Lane& me, uint64_t flag_offset, int node) {
  const BufferLayout& l = *layout_;
  const uint64_t ring = uint64_t(l.num_nodes - 1) * l.rail_slots * BufferLayout::kFlagStride;
  if (flag_offset < l.rail_free || flag_offset >= l.rail_free + ring) return;
  const uint64_t slot = (flag_offset - l.rail_free) / BufferLayout::kFlagStride % l.rail_slots;
  const int own = me.rank / config_.num_local_ranks;
  Region& r = *memory_.registered(me.rank, Region::Use::kRecvRing);
  const uint64_t at = l.rail_recv_slot(own, node, slot) - l.rail_recv;
  const GranuleSpan s(at, l.slot_bytes);
  if (any(r.reading, s.at, s.n))
    throw_rule(me, "outside_licence",
               "a credit for slot " + std::to_string(slot) + " of the rail from node " + std::to_string(node) +
                   " while a copy still reads the slot");
  memory_.free(r, at, l.slot_bytes);
}

bool Machine::only_chunk(uint32_t actor, uint32_t chunk) const {
  if (is_lane(actor) || wires_[actor].puts.empty()) return false;
  return std::all_of(wires_[actor].puts.begin(), wires_[actor].puts.end(),
                     [&](const Put& p) { return p.slot == chunk; });
}

void Machine::run_wire(Wire& wire) {
  host::Rng& rng = strategy_.rng();
  if (wire.node < 0) {
    const size_t which = wire.lines.empty() ? 0 : rng.below(wire.loads.size() + wire.lines.size());
    if (which >= wire.loads.size() && !wire.lines.empty()) return land_line(wire, which - wire.loads.size());
    if (wire.loads.empty()) return;
    std::swap(wire.loads[rng.below(wire.loads.size())], wire.loads.back());
    const Load load = wire.loads.back();
    wire.loads.pop_back();
    return land_load(load);
  }
  if (wire.puts.empty()) return;
  size_t at = rng.below(wire.puts.size());
  for (size_t i = 0; i < wire.puts.size() && strategy_.starves_chunk(wire.puts[at].slot); ++i)
    at = (at + 1) % wire.puts.size();
  // Nobody waits for a put without a signal: it may take its time.
  if (wire.puts[at].bytes && !wire.puts[at].flag && !rng.one_in(16)) return;
  std::swap(wire.puts[at], wire.puts.back());
  const Put put = wire.puts.back();
  wire.puts.pop_back();
  land_put(put, wire);
}

void Machine::land_put(const Put& put, Wire& wire) {
  const int peer = world_.rank_of(wire.node, wire.src % config_.num_local_ranks);
  if (put.bytes) {
    std::memcpy(put.dst, put.src, put.bytes);
    const GranuleSpan from(put.from->offset(put.src), put.bytes), to(put.to->offset(put.dst), put.bytes);
    hep::sim::add(put.from->reading, from.at, from.n, 0xff);
    if (put.from->is_licensed()) set(put.from->written, from.at, from.n, 0);
    hep::sim::add(put.to->writing, to.at, to.n, 0xff);
    set(put.to->written, to.at, to.n, 0xff);
  }
  if (config_.log)
    log_.push_back(std::to_string(steps_) + " rail " + std::to_string(wire.src) + " -> " + std::to_string(peer) + ": " +
                   (put.bytes ? std::to_string(put.bytes) + " bytes land" : std::string("a signal lands")) +
                   (put.flag ? ", flag = " + std::to_string(put.value) : ""));
  if (put.flag && *put.flag < put.value) {  // a location's signals may overtake one another; its value never falls
    *put.flag = put.value;
    wake_flag_waiters(peer);
  }
}

}  // namespace hep::sim
