// The state behind the checked model: what a block's shared memory looks like through each proxy, who has
// touched which 16 bytes, and which bulk copies are still under way. 16 bytes (a granule) is the unit of
// bulk copies, so every rule below is exact, never an approximation by cache lines.
//
// Counters are relaxed atomics: under the thread executor they must not create an ordering that the code
// under test does not create itself, or ThreadSanitizer would be blind.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "arch/host/errors.h"
#include "arch/host/lane.h"
#include "arch/host/line_engine.h"
#include "arch/host/mbarrier.h"
#include "arch/host/rng.h"
#include "arch/host/scheduler.h"

namespace hep::host {

struct CheckedLane;

inline constexpr size_t kGranule = 16;

template <class T>
T peek(const T& x) {
  return std::atomic_ref<T>(const_cast<T&>(x)).load(std::memory_order_relaxed);
}
template <class T>
void poke(T& x, T value) {
  std::atomic_ref<T>(x).store(value, std::memory_order_relaxed);
}
template <class T>
T bump(T& x, int by) {
  return std::atomic_ref<T>(x).fetch_add(static_cast<T>(by), std::memory_order_relaxed);
}

// A stretch of shared memory, as an offset into it.
struct Span {
  size_t at = 0, bytes = 0;
  size_t first_granule() const { return at / kGranule; }
  size_t end_granule() const { return (at + bytes + kGranule - 1) / kGranule; }
};

struct CheckedBlock : BlockBase {
  std::vector<std::byte> async_view;  // what bulk copies see; `smem` is what loads and stores see
  std::vector<uint16_t> unpublished;  // by granule: lanes with accesses they have not published
  std::vector<uint16_t> loading;      // by granule: bulk loads that may still write it
  std::vector<uint16_t> storing;      // by granule: bulk stores that may still read it
  std::vector<uint16_t> writer;       // by byte: lane id of the last unpublished write, 0 = none
  struct Barrier {
    uint16_t live = 0;
    uint16_t waiting[2] = {};  // lanes inside mbar_wait, by the parity they wait for
  };
  std::vector<Barrier> barriers;  // by 8 bytes
  struct Warp {
    uint64_t meeting[2] = {};  // number * 2 + (1 for elect_one) of the newest meetings
    uint32_t lanes_returned = 0;
    Line lines[4];  // that its lanes put together
  };
  std::vector<Warp> warps;
  struct Group {
    uint64_t members = 0;  // bit per warp
    uint32_t num_warps = 0;
  };
  Group groups[16];
  uint32_t loads_in_flight = 0, lanes_returned = 0;
  uint32_t empty_waits = 0;  // bulk waits by lanes that had nothing to wait for

  void prepare(uint64_t seed);  // garbage everywhere, nothing under way

  // Where `p` lies in shared memory. Throws unless [p, p + bytes) is inside and aligned.
  Span locate(const LaneBase& me, const void* p, size_t bytes, size_t alignment, const char* operation) const;
  bool contains(const void* p) const {
    const auto* b = static_cast<const std::byte*>(p);
    return b >= smem && b < smem + config->smem_bytes;
  }
  void check_no_barrier(const LaneBase& me, const Span& s, const char* operation) const;
  void check_zero(const LaneBase& me, const std::vector<uint16_t>& count, const Span& s, Rule rule,
                  const char* operation, const char* conflict) const;
  // What is known of a barrier. Throws unless it is inside shared memory, aligned and (if asked) initialised.
  Barrier& barrier(const LaneBase& me, const Mbarrier& bar, const char* operation, bool live = true);
};

// A bulk load under way.
struct Load {
  std::byte* dst;
  const void* src;
  uint32_t bytes;
  Mbarrier* bar;
  CheckedBlock* block;
  const LaneBase* issuer;
  Load* next;
};

// Bulk loads in flight. Lanes push without ordering one another; whoever drives the launch lands them.
class LoadEngine : public AsyncEngine {
 public:
  using Land = void (*)(const Load&);  // copies and completes on the barrier
  explicit LoadEngine(Land land) : land_(land) {}
  ~LoadEngine() override;
  void push(const Load& load);
  bool complete_one(Rng& rng) override;

 private:
  void collect();
  Land land_;
  std::atomic<Load*> inbox_ = nullptr;
  std::vector<Load*> in_flight_;
};

// All that goes on beside the lanes. Loads and lines wait for nothing, least of all for one another.
class AsyncMemory : public AsyncEngine {
 public:
  explicit AsyncMemory(LoadEngine::Land land) : loads(land) {}
  bool complete_one(Rng& rng) override {
    AsyncEngine* const order[] = {&loads, &lines};
    const bool lines_first = rng.one_in(2);
    return order[lines_first]->complete_one(rng) || order[!lines_first]->complete_one(rng);
  }

  LoadEngine loads;
  LineEngine lines;
};

struct BulkStore {
  std::byte* dst;
  Span src;
  std::vector<std::byte> data;  // once read
};

struct StoreGroup {
  std::vector<BulkStore> stores;
  bool read = false, written = false;  // the copying
  bool released = false;               // the committing lane knows that shared memory has been read
};

struct CheckedLane : LaneBase {
  uint16_t id = 0;  // in the block, from 1
  int lanes_per_warp = 1;
  uint64_t num_meetings = 0;  // elect_one and warp_sync so far
  LoadEngine* loads = nullptr;
  LineEngine* lines = nullptr;
  Rng rng;
  std::vector<uint32_t> touched;    // granules with accesses not yet published
  std::vector<uint8_t> is_touched;  // by granule
  StoreGroup open;
  std::deque<StoreGroup> groups;  // committed, oldest first

  void reset(BlockBase& of_block, int warp_idx, int lane_idx) {
    LaneBase::reset(of_block, warp_idx, lane_idx);
    open = {};
    groups.clear();
    touched.clear();
    num_meetings = 0;
  }
  void prepare(int lanes_of_warp, AsyncMemory& memory, uint64_t seed);
  CheckedBlock& shared() const { return *static_cast<CheckedBlock*>(block); }

  Line& line_of_warp(int group) const { return shared().warps[static_cast<size_t>(warp)].lines[group]; }

  void touch(const Span& s);
  void publish();
  void check_load_shared(const void* p, size_t bytes);
  void note_store_shared(const void* p, size_t bytes);  // before the bytes are written
  void check_global(const void* p, size_t bytes, const char* operation) const;
  Load begin_load(void* dst, const void* src, uint32_t bytes, Mbarrier& bar);
  void begin_store(void* dst, const void* src, uint32_t bytes);
  void commit();
  void wait_read(int newest);
  void wait_written(int newest);
  void meets_warp(bool electing);
  void meets_group(int id_of_group, int num_warps);
  void returns();

 private:
  void read(StoreGroup& group);
  void write(StoreGroup& group);
  void release(StoreGroup& group);
};

}  // namespace hep::host
