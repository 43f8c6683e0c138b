// Exploration: what an operation of a lane requires, what it puts in flight, and what its completion changes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "arch/sim/clockwork.h"
#include "arch/sim/machine.h"

namespace hep::sim {

namespace mbar = host::mbar;

// ---------------------------------------------------------------- shared memory

uint64_t Machine::locate(const Lane& me, const void* p, uint64_t bytes, uint64_t alignment,
                         const char* operation) const {
  const Block& b = *me.block;
  const auto* at = static_cast<const std::byte*>(p);
  if (at < b.smem || at + bytes > b.smem + b.launch->smem_bytes)
    throw_rule(me, "outside_shared",
               std::string(operation) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(at - b.smem) +
                   " of " + std::to_string(b.launch->smem_bytes));
  const uint64_t offset = uint64_t(at - b.smem);
  if (offset % alignment) throw_rule(me, "alignment", std::string(operation) + " at " + std::to_string(offset));
  const GranuleSpan s(offset, bytes);
  if (any(b.shadow.barrier, s.at, s.n)) throw_rule(me, "barrier_state", std::string(operation) + " over an mbarrier");
  return offset;
}

void Machine::require_barrier(const Lane& me, const Mbarrier& bar, const char* operation) const {
  const Block& b = *me.block;
  const auto* at = reinterpret_cast<const std::byte*>(&bar);
  if (at < b.smem || at + sizeof bar > b.smem + b.launch->smem_bytes ||
      !b.shadow.barrier[uint64_t(at - b.smem) / kGranule])
    throw_rule(me, "barrier_state", std::string(operation) + " on an mbarrier that was not initialised");
}

void Machine::init_barrier(Lane& me, Mbarrier& bar, uint32_t arrivals, bool guards_refill) {
  bar.word = mbar::fresh(arrivals, guards_refill);
  if (!timed()) me.block->shadow.barrier[uint64_t(reinterpret_cast<std::byte*>(&bar) - me.block->smem) / kGranule] = 1;
}

void Machine::read_shared(Lane& me, const void* p, uint64_t bytes, uint64_t alignment) {
  if (timed()) return;
  const GranuleSpan s(locate(me, p, bytes, alignment, "ld_shared"), bytes);
  SharedShadow& shadow = me.block->shadow;
  if (any(shadow.loading, s.at, s.n))
    throw_rule(me, "load_in_flight", "ld_shared of shared memory that a bulk load may still write");
  if (!every(shadow.valid, s.at, s.n)) throw_rule(me, "never_written", "ld_shared of shared memory without data");
  for (uint64_t g = s.at; g < s.at + s.n; ++g) {
    if (shadow.unpublished[g] >> me.warp & 1) continue;
    shadow.unpublished[g] |= uint8_t(1u << me.warp);
    me.touched.push_back(uint32_t(g));
  }
}

void Machine::write_shared(Lane& me, void* p, uint64_t bytes, uint64_t alignment) {
  if (timed()) return;
  const GranuleSpan s(locate(me, p, bytes, alignment, "st_shared"), bytes);
  SharedShadow& shadow = me.block->shadow;
  if (any(shadow.loading, s.at, s.n))
    throw_rule(me, "load_in_flight", "st_shared to shared memory that a bulk load may still write");
  if (any(shadow.storing, s.at, s.n))
    throw_rule(me, "store_in_flight", "st_shared to shared memory that a bulk store may still read");
  for (uint64_t g = s.at; g < s.at + s.n; ++g) {
    shadow.valid[g] = 0xff;
    shadow.writer[g] = uint8_t(me.warp + 1);
    if (shadow.unpublished[g] >> me.warp & 1) continue;
    shadow.unpublished[g] |= uint8_t(1u << me.warp);
    me.touched.push_back(uint32_t(g));
  }
}

void Machine::publish(Lane& me) {
  if (timed()) return;
  SharedShadow& shadow = me.block->shadow;
  for (const uint32_t g : me.touched) {
    shadow.unpublished[g] &= uint8_t(~(1u << me.warp));
    if (shadow.writer[g] == me.warp + 1) shadow.writer[g] = 0;
  }
  me.touched.clear();
}

// ---------------------------------------------------------------- global memory

void Machine::read_global(Lane& me, const void* p, uint64_t bytes) {
  if (timed()) return clockwork_->load_rail(me, p, bytes);
  memory_.check_read(me, memory_.require(me, p, bytes, "ld_global"), p, bytes, "ld_global");
}

// Visible at once here. That is legal, and how late it could be is the business of whoever reads it: they must
// have acquired a release, and data read before that is found unwritten.
bool Machine::write_global(Lane& me, void* p, uint64_t bytes) {
  if (timed()) {
    if (has_payload(me, p)) return clockwork_->stream(me, bytes), false;
    const Region* r = memory_.find(p, bytes);
    if (r && r->use == Region::Use::kRail) return clockwork_->store_rail(me, *r, p, bytes);
    return !r || !r->payload;
  }
  Region& r = memory_.require(me, p, bytes, "st_global");
  if (r.is_registered()) step(me);  // others can see it: they may act before it
  memory_.check_write(me, r, p, bytes, "st_global", true);
  check_row(me, r, p, bytes);
  if (r.watches_writes()) {
    const GranuleSpan s(r.offset(p), bytes);
    set(r.written, s.at, s.n, 0xff);
  }
  return true;
}

// Whose rows may this rank write? Those of the sources on its own rail: it forwards them. In combine only its own.
void Machine::check_row(const Lane& me, const Region& region, const void* dst, uint64_t bytes) {
  if (region.use != Region::Use::kRecvRows) return;
  const Rank& owner = rank(region.rank);
  if (owner.first_row.empty()) {
    if (me.rank != region.rank) throw_rule(me, "outside_rows", "a write into another rank's partial rows");
    return;
  }
  const uint64_t to = region.offset(dst);
  const auto rows = std::ranges::find_if(owner.received, [=](const auto& r) { return to >= r.at && to < r.end; });
  if (rows == owner.received.end())
    throw_rule(me, "outside_rows", "a write behind the receive rows of rank " + std::to_string(region.rank));
  const uint64_t at = to - rows->at, row = at / rows->row_bytes;
  if ((at + bytes - 1) / rows->row_bytes != row)
    throw_rule(me, "outside_rows", "a write across receive rows " + std::to_string(row) + " and the next");
  const auto next = std::upper_bound(owner.first_row.begin(), owner.first_row.end(), uint32_t(row));
  const int source = int(next - owner.first_row.begin()) - 1, lanes = config_.num_local_ranks;
  if (source >= num_ranks())
    throw_rule(me, "outside_rows",
               "a write into row " + std::to_string(row) + " behind rank " + std::to_string(region.rank) +
                   "'s last receive row");
  if (source % lanes != me.rank % lanes)
    throw_rule(me, "outside_rows",
               "a write into row " + std::to_string(row) + " of rank " + std::to_string(region.rank) +
                   ", which belongs to source rank " + std::to_string(source) + " of another rail");
}

// ---------------------------------------------------------------- bulk loads

void Machine::load(Lane& me, void* dst, const void* src, uint32_t bytes, Mbarrier& bar) {
  if (timed()) return clockwork_->load(me, dst, src, bytes, bar);
  step(me);
  require_barrier(me, bar, "bulk_g2s");
  if (reinterpret_cast<uintptr_t>(src) % 16 || bytes % 16)
    throw_rule(me, "alignment", "bulk_g2s of " + std::to_string(bytes) + " bytes: source and size in 16-byte units");
  const GranuleSpan s(locate(me, dst, bytes, 16, "bulk_g2s"), bytes);
  SharedShadow& shadow = me.block->shadow;
  if (any(shadow.unpublished, s.at, s.n))
    throw_rule(me, "unpublished", "bulk_g2s into shared memory that a lane accessed without publish_shared");
  if (any(shadow.storing, s.at, s.n))
    throw_rule(me, "store_in_flight", "bulk_g2s into shared memory that a bulk store may still read");
  if (any(shadow.loading, s.at, s.n))
    throw_rule(me, "load_in_flight", "bulk_g2s into shared memory that another bulk load may still write");
  Region& r = memory_.require(me, src, bytes, "bulk_g2s");
  memory_.check_read(me, r, src, bytes, "bulk_g2s");
  if (r.use == Region::Use::kRecvRows && r.rank != me.rank && !rank(r.rank).first_row.empty())
    throw_rule(me, "outside_licence",
               "bulk_g2s of rows of rank " + std::to_string(r.rank) + ", which is still in its dispatch");
  if (r.watches_writes()) {
    const GranuleSpan from(r.offset(src), bytes);
    hep::sim::add(r.reading, from.at, from.n, 1);
  }
  hep::sim::add(shadow.loading, s.at, s.n, 1);
  set(shadow.valid, s.at, s.n, 0);
  bar.word = mbar::add_load(bar.word);
  Wire& wire = wires_[size_t(me.rank)];
  wire.loads.push_back({static_cast<std::byte*>(dst), src, bytes, &bar, me.block, &r, &me});
  set_ready(uint32_t(me.rank), wire.ready);
  if (config_.log) note(me, "bulk_g2s of " + std::to_string(bytes) + " bytes from " + r.name);
}

void Machine::land_load(const Load& load) {
  std::memcpy(load.dst, load.src, load.bytes);
  Block& block = *load.block;
  const GranuleSpan s(uint64_t(load.dst - block.smem), load.bytes);
  hep::sim::add(block.shadow.loading, s.at, s.n, 0xff);
  set(block.shadow.valid, s.at, s.n, 0xff);
  if (load.region->watches_writes()) {
    const GranuleSpan from(load.region->offset(load.src), load.bytes);
    hep::sim::add(load.region->reading, from.at, from.n, 0xff);
  }
  const uint64_t before = load.bar->word;
  load.bar->word = mbar::settle(mbar::land(mbar::drop_load(before), load.bytes));
  if (config_.log) note(*load.issuer, "a load of " + std::to_string(load.bytes) + " bytes lands");
  end_phase(load.issuer, block, *load.bar, before);
}

void Machine::arrive(Lane& me, Mbarrier& bar, uint32_t bytes) {
  if (timed()) return clockwork_->arrive(me, bar, bytes);
  step(me);
  require_barrier(me, bar, "mbar_arrive");
  const uint64_t before = bar.word;
  if (mbar::guards_refill(before) && !me.touched.empty())
    throw_rule(me, "unpublished",
               "an arrive that licenses a refill while " + std::to_string(me.touched.size() * kGranule) +
                   " bytes are not published");
  if (mbar::pending(before) == 0) throw_rule(me, "arrive_count", "the phase already has all its arrivals");
  if (mbar::tx(before) + int64_t(bytes) > mbar::kMaxTx) throw_rule(me, "expect_tx", "too many bytes in one phase");
  bar.word = mbar::settle(mbar::arrive(mbar::expect(before, bytes)));
  if (config_.log) note(me, bytes ? "announces " + std::to_string(bytes) + " bytes" : "arrives");
  end_phase(&me, *me.block, bar, before);
}

void Machine::end_phase(const Lane* me, Block& block, Mbarrier& bar, uint64_t before) {
  if (mbar::phase(before) == mbar::phase(bar.word)) return;
  if (mbar::loads(bar.word))
    throw_rule(*me, "expect_tx",
               "a phase ended with " + std::to_string(mbar::loads(bar.word)) +
                   " bulk loads in flight: fewer bytes were announced than loaded");
  wake_phase_waiters(block, bar);
}

// ---------------------------------------------------------------- bulk stores

void Machine::store(Lane& me, void* dst, const void* src, uint32_t bytes) {
  if (timed()) return clockwork_->store(me, dst, src, bytes);
  if (reinterpret_cast<uintptr_t>(dst) % 16 || bytes % 16)
    throw_rule(me, "alignment", "bulk_s2g of " + std::to_string(bytes) + " bytes: target and size in 16-byte units");
  const uint64_t at = locate(me, src, bytes, 16, "bulk_s2g");
  const GranuleSpan s(at, bytes);
  SharedShadow& shadow = me.block->shadow;
  if (any(shadow.loading, s.at, s.n))
    throw_rule(me, "load_in_flight", "bulk_s2g of shared memory that a bulk load may still write");
  if (any(shadow.writer, s.at, s.n))
    throw_rule(me, "unpublished", "bulk_s2g of shared memory that was written without publish_shared");
  if (!every(shadow.valid, s.at, s.n)) throw_rule(me, "never_written", "bulk_s2g of shared memory without data");
  Region& r = memory_.require(me, dst, bytes, "bulk_s2g");
  memory_.check_write(me, r, dst, bytes, "bulk_s2g");
  check_row(me, r, dst, bytes);
  hep::sim::add(shadow.storing, s.at, s.n, 1);
  const GranuleSpan to(r.offset(dst), bytes);
  hep::sim::add(r.writing, to.at, to.n, 1);
  me.open.push_back({&r, static_cast<unsigned char*>(dst), uint32_t(at), bytes});
  if (config_.log) note(me, "bulk_s2g of " + std::to_string(bytes) + " bytes to " + r.name);
}

// The copy happens at the last legal moment, or, now and then, at once: hardware may do either.
void Machine::commit(Lane& me) {
  me.groups.emplace_back();
  me.groups.back().stores.swap(me.open);
  if (timed()) return clockwork_->commit(me);
  if (strategy_.rng().one_in(4)) copy_group(me, me.groups.back());
  step(me);
}

void Machine::copy_group(Lane& me, StoreGroup& group) {
  for (Store& store : group.stores) {
    if (std::exchange(store.copied, true)) continue;
    const std::byte* from = store.data.empty() ? me.block->smem + store.smem_at : store.data.data();
    std::memcpy(store.dst, from, store.bytes);
  }
}

void Machine::release_group(Lane& me, StoreGroup& group) {
  for (Store& store : group.stores) {
    const std::byte* from = me.block->smem + store.smem_at;
    if (!store.copied) store.data.assign(from, from + store.bytes);
    const GranuleSpan s(store.smem_at, store.bytes);
    hep::sim::add(me.block->shadow.storing, s.at, s.n, 0xff);
  }
}

void Machine::finish_group(Lane& me, StoreGroup& group) {
  copy_group(me, group);
  for (const Store& store : group.stores) {
    const GranuleSpan to(store.region->offset(store.dst), store.bytes);
    hep::sim::add(store.region->writing, to.at, to.n, 0xff);
    set(store.region->written, to.at, to.n, 0xff);
  }
}

void Machine::wait_stores(Lane& me, int newest, bool written) {
  if (timed()) return clockwork_->wait_stores(me, newest, written);
  step(me);
  for (; me.num_released + size_t(newest) < me.groups.size(); ++me.num_released)
    release_group(me, me.groups[me.num_released]);
  for (; written && me.groups.size() > size_t(newest); --me.num_released) {
    finish_group(me, me.groups.front());
    me.groups.pop_front();
  }
}

void Machine::lane_returns(Lane& me) {
  if (timed()) {  // its last arrivals must not meet the next launch
    clockwork_->finish_streams(me);
    return clockwork_->settle(me);
  }
  if (!me.open.empty()) throw_rule(me, "open_group", "the lane returned with bulk stores it never committed");
  for (const StoreGroup& g : me.groups)
    if (!g.stores.empty())
      throw_rule(me, "unfinished_group", "the lane returned without bulk_wait<0> for its bulk stores");
  if (me.launch->alive > 1) return;
  for (const Load& load : wires_[size_t(me.rank)].loads)
    if (load.issuer->launch == me.launch)
      throw_rule(me, "unfinished_load", "the kernel returned with bulk loads in flight");
}

}  // namespace hep::sim
