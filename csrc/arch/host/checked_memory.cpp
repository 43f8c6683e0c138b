// The rules of shared memory, bulk copies and meetings, as the checked model enforces them.
#include "arch/host/checked_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

namespace hep::host {
namespace {

std::string where(size_t at, size_t bytes) {
  return "[" + std::to_string(at) + ", " + std::to_string(at + bytes) + ") of shared memory";
}

void fill_with_garbage(std::byte* p, size_t bytes, uint64_t seed) {
  Rng rng(seed);
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t value = rng.next();
    std::memcpy(p + i, &value, std::min<size_t>(8, bytes - i));
  }
}

bool is_aligned(const void* p, size_t alignment) {
  return reinterpret_cast<uintptr_t>(p) % alignment == 0;
}

}  // namespace

// ---------------------------------------------------------------- block

void CheckedBlock::prepare(uint64_t seed) {
  const size_t bytes = config->smem_bytes;
  const size_t granules = (bytes + kGranule - 1) / kGranule;
  async_view.resize(granules * kGranule);
  fill_with_garbage(smem, bytes, seed);
  fill_with_garbage(async_view.data(), async_view.size(), seed ^ 0xa5a5);
  unpublished.assign(granules, 0);
  loading.assign(granules, 0);
  storing.assign(granules, 0);
  writer.assign(granules * kGranule, 0);
  barriers.assign((bytes + 7) / 8, Barrier{});
  warps.assign(static_cast<size_t>(config->num_warps), Warp{});
  for (Group& group : groups) group = Group{};
  loads_in_flight = lanes_returned = empty_waits = 0;
}

Span CheckedBlock::locate(const LaneBase& me, const void* p, size_t bytes, size_t alignment,
                          const char* operation) const {
  const auto* b = static_cast<const std::byte*>(p);
  if (b < smem || b + bytes > smem + config->smem_bytes) {
    throw_protocol(me, Rule::kOutsideShared,
                   std::string(operation) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(b - smem) +
                       ", shared memory has " + std::to_string(config->smem_bytes) + " bytes");
  }
  const size_t at = static_cast<size_t>(b - smem);
  if (at % alignment != 0) {
    throw_protocol(me, Rule::kAlignment,
                   std::string(operation) + " at offset " + std::to_string(at) + ", needs a multiple of " +
                       std::to_string(alignment));
  }
  return {at, bytes};
}

void CheckedBlock::check_no_barrier(const LaneBase& me, const Span& s, const char* operation) const {
  for (size_t i = s.at / 8; i < (s.at + s.bytes + 7) / 8; ++i) {
    if (peek(barriers[i].live) == 0) continue;
    throw_protocol(me, Rule::kBarrierState, std::string(operation) + " over the mbarrier at " + where(i * 8, 8));
  }
}

void CheckedBlock::check_zero(const LaneBase& me, const std::vector<uint16_t>& count, const Span& s, Rule rule,
                              const char* operation, const char* conflict) const {
  for (size_t g = s.first_granule(); g < s.end_granule(); ++g) {
    if (peek(count[g]) == 0) continue;
    throw_protocol(me, rule, std::string(operation) + " touches " + where(g * kGranule, kGranule) + " " + conflict);
  }
}

CheckedBlock::Barrier& CheckedBlock::barrier(const LaneBase& me, const Mbarrier& bar, const char* operation,
                                             bool live) {
  Barrier& known = barriers[locate(me, &bar, sizeof bar, alignof(Mbarrier), operation).at / 8];
  if (live && peek(known.live) == 0) {
    throw_protocol(me, Rule::kBarrierState, std::string(operation) + " on an mbarrier that was not initialised");
  }
  return known;
}

// ---------------------------------------------------------------- loads in flight

LoadEngine::~LoadEngine() {
  collect();
  for (Load* load : in_flight_) delete load;
}

// Release without acquire: lanes that push one after the other learn nothing of each other.
void LoadEngine::push(const Load& load) {
  Load* node = new Load(load);
  node->next = inbox_.load(std::memory_order_relaxed);
  while (!inbox_.compare_exchange_weak(node->next, node, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

void LoadEngine::collect() {
  for (Load* load = inbox_.exchange(nullptr, std::memory_order_acquire); load != nullptr; load = load->next) {
    in_flight_.push_back(load);
  }
}

bool LoadEngine::complete_one(Rng& rng) {
  collect();
  if (in_flight_.empty()) return false;
  std::swap(in_flight_[rng.below(in_flight_.size())], in_flight_.back());
  const std::unique_ptr<Load> load(in_flight_.back());
  in_flight_.pop_back();
  CheckedBlock& block = *load->block;
  std::memcpy(load->dst, load->src, load->bytes);
  const Span s{static_cast<size_t>(load->dst - block.smem), load->bytes};
  std::memcpy(block.async_view.data() + s.at, load->src, load->bytes);
  for (size_t g = s.first_granule(); g < s.end_granule(); ++g) bump(block.loading[g], -1);
  bump(block.loads_in_flight, -1);
  land_(*load);
  return true;
}

// ---------------------------------------------------------------- lane: generic accesses

void CheckedLane::prepare(int lanes_of_warp, AsyncMemory& memory, uint64_t seed) {
  lanes_per_warp = lanes_of_warp;
  id = static_cast<uint16_t>(warp * lanes_per_warp + lane + 1);
  loads = &memory.loads;
  lines = &memory.lines;
  is_touched.assign(shared().unpublished.size(), 0);
  const uint64_t warp_seed = seed + 0x51ed27u * static_cast<uint64_t>(block->config->rank + 1) +
                             0x2545f5u * static_cast<uint64_t>(block->idx) + static_cast<uint64_t>(warp);
  elected_lane = static_cast<int>(Rng(warp_seed).below(static_cast<uint64_t>(lanes_per_warp)));
  rng = Rng(warp_seed ^ static_cast<uint64_t>(lane + 1) << 32);
}

void CheckedLane::touch(const Span& s) {
  for (size_t g = s.first_granule(); g < s.end_granule(); ++g) {
    if (is_touched[g]) continue;
    is_touched[g] = 1;
    touched.push_back(static_cast<uint32_t>(g));
    bump(shared().unpublished[g], 1);
  }
}

void CheckedLane::publish() {
  CheckedBlock& b = shared();
  for (const uint32_t g : touched) {
    const size_t end = std::min((g + 1) * kGranule, b.config->smem_bytes);
    for (size_t i = g * kGranule; i < end; ++i) {
      if (peek(b.writer[i]) != id) continue;  // not written by this lane, or overwritten since
      b.async_view[i] = b.smem[i];
      poke(b.writer[i], uint16_t{0});
    }
    is_touched[g] = 0;
    bump(b.unpublished[g], -1);
  }
  touched.clear();
}

void CheckedLane::check_load_shared(const void* p, size_t bytes) {
  const Span s = shared().locate(*this, p, bytes, bytes, "ld_shared");
  shared().check_no_barrier(*this, s, "ld_shared");
  shared().check_zero(*this, shared().loading, s, Rule::kLoadInFlight, "ld_shared",
                      "while a bulk load into it is in flight");
  touch(s);
}

void CheckedLane::note_store_shared(const void* p, size_t bytes) {
  CheckedBlock& b = shared();
  const Span s = b.locate(*this, p, bytes, bytes, "st_shared");
  b.check_no_barrier(*this, s, "st_shared");
  b.check_zero(*this, b.loading, s, Rule::kLoadInFlight, "st_shared", "while a bulk load into it is in flight");
  b.check_zero(*this, b.storing, s, Rule::kStoreInFlight, "st_shared", "while a bulk store may still read it");
  touch(s);
  for (size_t i = s.at; i < s.at + s.bytes; ++i) poke(b.writer[i], id);
}

void CheckedLane::check_global(const void* p, size_t bytes, const char* operation) const {
  if (!is_aligned(p, bytes)) {
    throw_protocol(
        *this, Rule::kAlignment,
        std::string(operation) + " of " + std::to_string(bytes) + " bytes at an address that is no multiple of it");
  }
  if (shared().contains(p)) {
    throw_protocol(*this, Rule::kOutsideShared, std::string(operation) + " of shared memory");
  }
}

// ---------------------------------------------------------------- lane: bulk copies

Load CheckedLane::begin_load(void* dst, const void* src, uint32_t bytes, Mbarrier& bar) {
  CheckedBlock& b = shared();
  const char* operation = "bulk_g2s";
  b.barrier(*this, bar, operation);
  if (!is_aligned(src, 16) || bytes % 16 != 0) {
    throw_protocol(*this, Rule::kAlignment,
                   "bulk_g2s of " + std::to_string(bytes) + " bytes: source address and size must be multiples of 16");
  }
  if (b.contains(src)) throw_protocol(*this, Rule::kOutsideShared, "bulk_g2s from shared memory");
  const Span s = b.locate(*this, dst, bytes, 16, operation);
  b.check_no_barrier(*this, s, operation);
  b.check_zero(*this, b.unpublished, s, Rule::kUnpublished, operation,
               "that a lane has read or written without publish_shared");
  b.check_zero(*this, b.storing, s, Rule::kStoreInFlight, operation, "while a bulk store may still read it");
  b.check_zero(*this, b.loading, s, Rule::kLoadInFlight, operation, "while another bulk load into it is in flight");
  for (size_t g = s.first_granule(); g < s.end_granule(); ++g) bump(b.loading[g], 1);
  bump(b.loads_in_flight, 1);
  return {static_cast<std::byte*>(dst), src, bytes, &bar, &b, this, nullptr};
}

void CheckedLane::begin_store(void* dst, const void* src, uint32_t bytes) {
  CheckedBlock& b = shared();
  const char* operation = "bulk_s2g";
  if (!is_aligned(dst, 16) || bytes % 16 != 0) {
    throw_protocol(*this, Rule::kAlignment,
                   "bulk_s2g of " + std::to_string(bytes) + " bytes: target address and size must be multiples of 16");
  }
  if (b.contains(dst)) throw_protocol(*this, Rule::kOutsideShared, "bulk_s2g to shared memory");
  const Span s = b.locate(*this, src, bytes, 16, operation);
  b.check_no_barrier(*this, s, operation);
  b.check_zero(*this, b.loading, s, Rule::kLoadInFlight, operation, "while a bulk load into it is in flight");
  for (size_t i = s.at; i < s.at + s.bytes; ++i) {
    const int writer = peek(b.writer[i]);
    if (writer == 0) continue;
    throw_protocol(*this, Rule::kUnpublished,
                   "bulk_s2g reads " + where(i, 1) + ", written by lane " +
                       std::to_string((writer - 1) % lanes_per_warp) + " of warp " +
                       std::to_string((writer - 1) / lanes_per_warp) + " without publish_shared");
  }
  for (size_t g = s.first_granule(); g < s.end_granule(); ++g) bump(b.storing[g], 1);
  open.stores.push_back({static_cast<std::byte*>(dst), s, {}});
}

// Mostly a store happens at the last legal moment; now and then at once, which hardware may do as well and
// which shows a target that was not free yet. What the lane may rely on does not change with it.
void CheckedLane::commit() {
  groups.push_back(std::exchange(open, StoreGroup{}));
  if (rng.one_in(4)) write(groups.back());
}

void CheckedLane::wait_read(int newest) {
  if (groups.empty()) bump(shared().empty_waits, 1);
  for (size_t i = 0; i + static_cast<size_t>(newest) < groups.size(); ++i) release(groups[i]);
}

void CheckedLane::wait_written(int newest) {
  wait_read(newest);
  while (groups.size() > static_cast<size_t>(newest)) {
    write(groups.front());
    groups.pop_front();
  }
}

void CheckedLane::read(StoreGroup& group) {
  if (std::exchange(group.read, true)) return;
  for (BulkStore& store : group.stores) {
    const std::byte* from = shared().async_view.data() + store.src.at;
    store.data.assign(from, from + store.src.bytes);
  }
}

void CheckedLane::write(StoreGroup& group) {
  if (std::exchange(group.written, true)) return;
  read(group);
  for (const BulkStore& store : group.stores) std::memcpy(store.dst, store.data.data(), store.data.size());
}

void CheckedLane::release(StoreGroup& group) {
  if (std::exchange(group.released, true)) return;
  read(group);
  for (const BulkStore& store : group.stores) {
    for (size_t g = store.src.first_granule(); g < store.src.end_granule(); ++g) bump(shared().storing[g], -1);
  }
}

// ---------------------------------------------------------------- lane: meetings, the end

void CheckedLane::meets_warp(bool electing) {
  if (lanes_per_warp == 1) return;
  CheckedBlock::Warp& w = shared().warps[static_cast<size_t>(warp)];
  const uint64_t number = ++num_meetings;
  const uint64_t mine = number * 2 + (electing ? 1 : 0);
  const uint64_t before = std::atomic_ref(w.meeting[number % 2]).exchange(mine, std::memory_order_relaxed);
  if (before / 2 == number && before != mine) {
    throw_protocol(*this, Rule::kDivergence, "some lanes of the warp are in elect_one, others in warp_sync");
  }
  if (peek(w.lanes_returned) > 0) {
    throw_protocol(*this, Rule::kDivergence,
                   std::string(electing ? "elect_one" : "warp_sync") + " after another lane of the warp has returned");
  }
}

void CheckedLane::meets_group(int id_of_group, int num_warps) {
  CheckedBlock& b = shared();
  if (id_of_group < 1 || id_of_group > 15 || num_warps < 1 || num_warps > b.config->num_warps) {
    throw_protocol(*this, Rule::kNamedBarrier,
                   "group_sync(" + std::to_string(id_of_group) + ", " + std::to_string(num_warps) +
                       "): ids are 1..15, warps 1.." + std::to_string(b.config->num_warps));
  }
  CheckedBlock::Group& group = b.groups[id_of_group];
  const uint64_t bit = uint64_t{1} << (warp % 64);
  const uint64_t members = std::atomic_ref(group.members).fetch_or(bit, std::memory_order_relaxed) | bit;
  const uint32_t size = static_cast<uint32_t>(num_warps);
  const uint32_t before = std::atomic_ref(group.num_warps).exchange(size, std::memory_order_relaxed);
  if ((before != 0 && before != size) || std::popcount(members) > num_warps) {
    throw_protocol(*this, Rule::kNamedBarrier,
                   "group_sync id " + std::to_string(id_of_group) + " is shared by two different groups of warps");
  }
}

void CheckedLane::returns() {
  CheckedBlock& b = shared();
  if (!open.stores.empty()) {
    throw_protocol(*this, Rule::kOpenGroup,
                   "the lane returned with " + std::to_string(open.stores.size()) + " bulk stores it never committed");
  }
  for (const StoreGroup& group : groups) {
    if (group.stores.empty()) continue;
    throw_protocol(*this, Rule::kUnfinishedGroup,
                   std::string("the lane returned without bulk_wait<0> for its bulk stores") +
                       (peek(b.empty_waits) > 0 ? "; another lane waited, but groups belong to the lane that "
                                                  "committed them"
                                                : ""));
  }
  const size_t w = static_cast<size_t>(warp);
  bump(b.warps[w].lanes_returned, 1);
  if (lanes_per_warp > 1 && peek(b.warp_arrived[w]) > num_meetings * static_cast<uint64_t>(lanes_per_warp)) {
    throw_protocol(*this, Rule::kDivergence, "the lane returned while others of its warp wait for it");
  }
  const uint32_t num_lanes = static_cast<uint32_t>(b.config->num_warps * lanes_per_warp);
  const uint32_t before = std::atomic_ref(b.lanes_returned).fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 < num_lanes) return;
  if (const uint32_t n = peek(b.loads_in_flight); n != 0) {
    throw_protocol(*this, Rule::kUnfinishedLoad,
                   "the block returned with " + std::to_string(n) + " bulk loads in flight");
  }
  for (size_t i = 0; i < b.barriers.size(); ++i) {
    if (peek(b.barriers[i].live) == 0) continue;
    const int64_t tx = mbar::tx(peek(reinterpret_cast<const Mbarrier*>(b.smem + i * 8)->word));
    if (tx == 0) continue;
    throw_protocol(*this, Rule::kExpectTx,
                   "the block returned while the mbarrier at " + where(i * 8, 8) + " misses " + std::to_string(tx) +
                       " announced bytes");
  }
}

}  // namespace hep::host
