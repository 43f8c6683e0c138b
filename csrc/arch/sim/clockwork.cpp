// Events of a timed world.
#include "arch/sim/clockwork.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hep::sim {

namespace mbar = host::mbar;

// ---------------------------------------------------------------- the heap

uint32_t Clockwork::take(const Item& item) {
  if (free_.empty()) {
    if (items_.size() >> kItemBits) throw std::length_error("simulator: more copies in flight than it can number");
    items_.push_back(item);
    return uint32_t(items_.size()) - 1;
  }
  const uint32_t i = free_.back();
  free_.pop_back();
  items_[i] = item;
  return i;
}

void Clockwork::post(uint32_t item, Ps at) {
  due_.push_back({at, ++posted_ << kItemBits | item});
  std::push_heap(due_.begin(), due_.end(), Later{});
}

bool Clockwork::advance() {
  if (due_.empty()) return false;
  std::pop_heap(due_.begin(), due_.end(), Later{});
  const Due due = due_.back();
  due_.pop_back();
  m_.clock_ = std::max(m_.clock_, due.at);
  process(uint32_t(due.key & ((1u << kItemBits) - 1)));
  return true;
}

void Clockwork::sync(Lane& me) {
  flush(me);
  if (me.now > m_.clock_) settle(me);
}

// Returns when all that the lane has posted up to its time has happened.
void Clockwork::settle(Lane& me) {
  flush(me);
  Item item;
  item.kind = Item::kResume;
  item.lane = &me;
  post(take(item), std::max(me.now, m_.clock_));
  me.wait.kind = Wait::kClock;
  me.wait.since = me.now;
  m_.suspend(me);
}

void Clockwork::resume(Lane& lane, Ps cost) {
  go_on(lane, std::max(lane.now, m_.clock_) + cost);
}

void Clockwork::found(Lane& lane, Ps look) {
  go_on(lane, std::max(lane.now, m_.clock_ + look));
}

void Clockwork::go_on(Lane& lane, Ps at) {
  lane.now = at;
  if (lane.time) lane.time->waited[int(lane.wait.info.site)] += lane.now - lane.wait.since;
}

// ---------------------------------------------------------------- copies

void Clockwork::add_hop(Item& item, Server& server, uint64_t mbps, const char* link, Ps least) {
  item.hops[item.num_hops++] = {&server, std::max(least, duration(item.bytes, mbps)), link};
}

Clockwork::Item Clockwork::of_lane(Lane& me, Item::Kind kind, uint64_t bytes) const {
  Item item;
  item.kind = kind;
  item.bytes = bytes;
  item.lane = &me;
  item.block = me.block;
  item.role = me.role;
  item.rank = me.rank;
  return item;
}

void Clockwork::process(uint32_t i) {
  for (;;) {
    Item& item = items_[i];
    if (item.hop == item.num_hops) {
      if (item.landed || item.num_hops == 0) return complete(i);
      item.landed = true;
      return post(i, item.end + item.latency);
    }
    Hop& hop = item.hops[item.hop++];
    const Ps now = m_.clock_, start = std::max(now, hop.server->free_at);
    hop.server->free_at = start + hop.time;
    hop.server->busy += hop.time;
    hop.server->bytes += item.bytes;
    ++hop.server->served;
    item.end = std::max(item.end, start + hop.time);
    if (m_.timeline_.keep_spans && hop.time) {
      static constexpr const char* kNames[] = {"bulk_g2s", "bulk_s2g", "put",   "flag",
                                               "arrive",   "resume",   "lines", "rows"};
      m_.timeline_.spans.push_back({kNames[item.kind], item.role, item.rank, item.block ? item.block->idx : -1,
                                    hop.link, start, start + hop.time, item.bytes});
    }
    if (item.kind == Item::kStore && item.hop == 1) {  // shared memory has been read when the engine is through
      StoreGroup& group = item.lane->groups[item.group - item.lane->first_group];
      group.read_at = std::max(group.read_at, start + hop.time);
      if (--group.reads_pending == 0 && item.lane->wait.kind == Wait::kGroups) m_.wake(*item.lane);
    }
    if (start > now) return post(i, start);
  }
}

void Clockwork::land(Mbarrier& bar, Block& block, uint64_t bytes, bool arrival) {
  const uint64_t before = bar.word;
  bar.word = mbar::settle(mbar::land(arrival ? mbar::arrive(before) : before, uint32_t(bytes)));
  if (mbar::phase(before) != mbar::phase(bar.word)) m_.wake_phase_waiters(block, bar);
}

void Clockwork::complete(uint32_t i) {
  const Item item = items_[i];
  free_.push_back(i);
  switch (item.kind) {
    case Item::kLoad: return land(*item.bar, *item.block, item.bytes, false);
    case Item::kArrive: return land(*item.bar, *item.block, 0, true);
    case Item::kStore: {
      Lane& lane = *item.lane;
      StoreGroup& group = lane.groups[item.group - lane.first_group];
      group.written_at = m_.clock_;
      if (--group.writes_pending == 0 && lane.wait.kind == Wait::kGroups) m_.wake(lane);
      return;
    }
    case Item::kResume: return m_.wake(*item.lane);
    case Item::kLines: return land_lines(item);
    case Item::kRows:
      if (--item.lane->rows_in_flight == 0 && item.lane->wait.kind == Wait::kGroups) m_.wake(*item.lane);
      return;
    case Item::kPut:
      if (!item.flag) return;
      break;
    case Item::kFlag: break;
  }
  *item.flag = item.add ? *item.flag + item.value : std::max(*item.flag, item.value);
  m_.wake_flag_waiters(item.owner);
}

// ---------------------------------------------------------------- what lanes do

// Payload is not moved; records and counts are, or there would be no addresses. In registered memory they are the first
// moved_bytes of a message or of a metadata entry, kept tightly packed: rows there are never touched.
unsigned char* Clockwork::fact(const Lane& me, const Region& region, const void* p) {
  const Launch& launch = *me.launch;
  if (!region.payload) return static_cast<unsigned char*>(const_cast<void*>(p));
  if (!region.is_licensed() || launch.moved_bytes == 0) return nullptr;
  const BufferLayout& l = *m_.layout_;
  if (region.use == Region::Use::kArena || region.use == Region::Use::kSlabs) return nullptr;
  const bool entries = region.use == Region::Use::kRecvRows;
  const uint64_t stride = entries ? launch.entry_bytes : launch.row_bytes;
  uint64_t at = region.offset(p), row = 0;
  if (entries && (m_.rank(region.rank).received.empty() || at >= m_.rank(region.rank).received[0].end)) return nullptr;
  if (!entries) {
    row = at / l.slot_bytes * l.chunk_tokens;
    at %= l.slot_bytes;
  }
  if (at % stride) return nullptr;
  row += at / stride;
  const size_t which = size_t(region.rank) * 3 + size_t(region.use) - size_t(Region::Use::kSendRing);
  if (metadata_.size() <= which) metadata_.resize(which + 1);
  auto& metadata = metadata_[which];
  if (metadata.size() < (row + 1) * launch.moved_bytes) metadata.resize((row + 1) * launch.moved_bytes * 3 / 2);
  return &metadata[row * launch.moved_bytes];
}

void Clockwork::load(Lane& me, void* dst, const void* src, uint32_t bytes, Mbarrier& bar) {
  const Region& region = m_.memory_.require(me, src, bytes, "bulk_g2s");
  if (me.merged_bar != &bar) flush(me);
  if (!me.merged_bar || region.rank != me.rank) me.merged_from = region.rank;
  me.merged_bar = &bar;
  me.merged_bytes += bytes;
  ++me.merged_ops;
  const unsigned char* from = fact(me, region, src);
  if (!from) return;
  const Launch& launch = *me.launch;
  if (region.use != Region::Use::kRecvRows) {
    std::memcpy(dst, from, region.payload ? std::min(bytes, launch.moved_bytes) : bytes);
    return;
  }
  for (uint32_t at = 0; at < bytes; at += launch.entry_bytes, from += launch.moved_bytes)  // of one entry or of several
    std::memcpy(static_cast<unsigned char*>(dst) + at, from, std::min(bytes - at, launch.moved_bytes));
}

void Clockwork::flush(Lane& me) {
  if (!me.line_runs.empty()) {
    for (const LineRun& run : me.line_runs) post_run(me, run);
    me.line_runs.clear();
  }
  if (!me.merged_bar) return;
  const CostModel& c = m_.config_.costs;
  Item item = of_lane(me, Item::kLoad, me.merged_bytes);
  item.bar = me.merged_bar;
  item.latency = c.tma_latency_ps;
  Rank &mine = m_.rank(me.rank), &from = m_.rank(me.merged_from);
  add_hop(item, me.block->tma_read, c.tma_read_mbps, "tma_read", c.tma_op_ps * me.merged_ops);
  add_hop(item, from.hbm, c.hbm_mbps, "hbm");
  if (me.merged_from != me.rank) {
    add_hop(item, from.egress, c.nvlink_egress_mbps, "nvlink_egress");
    add_hop(item, mine.ingress, c.nvlink_ingress_mbps, "nvlink_ingress");
    item.latency += 2 * c.nvlink_latency_ps;
  }
  me.merged_bar = nullptr;
  me.merged_bytes = me.merged_ops = 0;
  post(take(item), std::max(me.now, m_.clock_));
}

void Clockwork::arrive(Lane& me, Mbarrier& bar, uint32_t bytes) {
  m_.spend(me, m_.config_.costs.barrier_ps);
  if (bytes) {  // the phase ends with the loads, which come later: nobody can see how early this is
    bar.word = mbar::settle(mbar::arrive(mbar::expect(bar.word, bytes)));
    return;
  }
  flush(me);
  Item item = of_lane(me, Item::kArrive, 0);
  item.bar = &bar;
  post(take(item), std::max(me.now, m_.clock_));
}

void Clockwork::store(Lane& me, void* dst, const void* src, uint32_t bytes) {
  Region& region = m_.memory_.require(me, dst, bytes, "bulk_s2g");
  me.open.push_back({&region, static_cast<unsigned char*>(dst), 0, bytes});
  if (unsigned char* to = fact(me, region, dst))
    std::memcpy(to, src, region.payload ? std::min(bytes, me.launch->moved_bytes) : bytes);
}

void Clockwork::commit(Lane& me) {
  flush(me);
  const CostModel& c = m_.config_.costs;
  StoreGroup& group = me.groups.back();
  group.reads_pending = group.writes_pending = uint32_t(group.stores.size());
  group.read_at = group.written_at = me.now;
  for (const Store& store : group.stores) {
    Item item = of_lane(me, Item::kStore, store.bytes);
    item.group = me.first_group + me.groups.size() - 1;
    item.latency = c.tma_latency_ps;
    Rank &mine = m_.rank(me.rank), &to = m_.rank(store.region->rank);
    add_hop(item, me.block->tma_write, c.tma_write_mbps, "tma_write", c.tma_op_ps);
    if (store.region->rank != me.rank) {
      add_hop(item, mine.egress, c.nvlink_egress_mbps, "nvlink_egress");
      add_hop(item, to.ingress, c.nvlink_ingress_mbps, "nvlink_ingress");
      item.latency += 2 * c.nvlink_latency_ps;
    }
    add_hop(item, to.hbm, c.hbm_mbps, "hbm");
    post(take(item), std::max(me.now, m_.clock_));
  }
}

bool Clockwork::done(const Lane& me, int newest, bool written) const {
  for (size_t i = 0; i + size_t(newest) < me.groups.size(); ++i)
    if (me.groups[i].reads_pending || (written && me.groups[i].writes_pending)) return false;
  return true;
}

void Clockwork::wait_stores(Lane& me, int newest, bool written) {
  flush(me);
  const Ps since = me.now;
  while (!done(me, newest, written)) {
    me.wait = {Wait::kGroups, nullptr, 0, {Site::kStageEmpty}};
    m_.block(me);
  }
  for (size_t i = 0; i + size_t(newest) < me.groups.size(); ++i)
    me.now = std::max(me.now, written ? me.groups[i].written_at : me.groups[i].read_at);
  if (me.time) me.time->waited[int(Site::kStageEmpty)] += me.now - since;
  while (!me.groups.empty() && !me.groups.front().writes_pending && !me.groups.front().reads_pending) {
    me.groups.pop_front();
    ++me.first_group;
  }
}

void Clockwork::set_flag(Lane& me, uint64_t* flag, uint64_t value, bool add, int owner) {
  flush(me);
  const CostModel& c = m_.config_.costs;
  Item item = of_lane(me, Item::kFlag, 0);
  item.flag = flag;
  item.value = value;
  item.add = add;
  item.owner = owner;
  post(take(item), std::max(me.now, m_.clock_) + c.flag_ps + (owner != me.rank ? c.nvlink_latency_ps : 0));
}

void Clockwork::put(Lane& me, int peer, unsigned char* dst, const unsigned char* src, uint64_t bytes, uint64_t* flag,
                    uint64_t value) {
  const CostModel& c = m_.config_.costs;
  m_.spend(me, c.nic_post_ps);
  flush(me);
  Item item = of_lane(me, Item::kPut, bytes);
  item.flag = flag;
  item.value = value;
  item.owner = peer;
  item.latency = c.nic_latency_ps;
  Rank &mine = m_.rank(me.rank), &to = m_.rank(peer);
  add_hop(item, mine.hbm, c.hbm_mbps, "hbm");
  add_hop(item, mine.nic_out, c.nic_mbps, "nic_egress", c.nic_message_ps);
  add_hop(item, to.nic_in, c.nic_mbps, "nic_ingress", c.nic_message_ps);
  add_hop(item, to.hbm, c.hbm_mbps, "hbm");
  post(take(item), std::max(me.now, m_.clock_));
  if (!bytes) return;
  const Region &from = m_.memory_.require(me, src, bytes, "put"), &into = m_.memory_.require(me, dst, bytes, "put");
  if (!from.payload) {
    std::memcpy(dst, src, bytes);
    return;
  }
  if (from.use == Region::Use::kRail) {  // a header, or one message
    std::memcpy(dst, src, std::min(bytes, rail_facts(me, from.offset(src))));
    return;
  }
  const uint32_t row = me.launch->row_bytes;
  for (uint64_t at = 0; row && at < bytes; at += row)
    if (const unsigned char* f = fact(me, from, src + at))
      if (unsigned char* t = fact(me, into, dst + at)) std::memcpy(t, f, me.launch->moved_bytes);
}

}  // namespace hep::sim
