// Happens-before: which accesses are ordered, by what PTX says of scopes, barriers, mbarriers and proxies.
//
// Every thread has a clock. It is joined with others' where they synchronise: a meeting, an acquire that sees a release
// whose scopes hold both threads, an mbarrier's phase. An access must find the last write of its bytes (and a write the
// last reads) in its thread's clock. Bulk copies are accesses of components of their own, made through the async proxy:
// a bulk load's of its mbarrier, known to who waits for that phase; a bulk store's of its thread's groups, known behind
// a wait. What a bulk copy touches must moreover be known to the async proxy: a generic write is from fence.proxy.async
// on. The memory model's other half, that weak values show late, is not modelled.
#pragma once
#include <memory>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "machine.h"
#include "program.h"

namespace hep::ptxm {

class MachineImpl;
struct Who;
struct Warp;
struct Block;
struct Run;
struct Mbar;
struct BulkCopy;

struct LaneClocks {
  Clocks known;
  u32 own = 1;        // the thread's tick; others know it when it is published
  Clocks fenced;      // known at the last fence
  Clocks pending[4];  // what relaxed loads saw, by the narrowest scope that holds both threads: what a fence must have
  Scope fence = Scope::kNone;
};
struct WarpClocks {
  u32 group = kNone, reads = kNone, writes = kNone;  // of the lanes; of their bulk stores
  std::unique_ptr<LaneClocks[]> lanes;
};
struct MbarClocks {
  u32 component = kNone;
  Clocks now, done;  // of the arrivals of this phase; of the phase before
};
struct RunClocks {
  Clock end;
};

// What is known of four bytes of memory.
struct Cell {
  const Ins *write = nullptr, *read = nullptr;
  u32 writer = 0, write_tick = 0;  // tick 0: none
  u32 reader = 0, read_tick = 0;   // reader kNone: read_tick is a number of a list
  u8 write_bytes = 0, read_bytes = 0;
  bool write_async = false, read_async = false, sync = false;
  Scope strong = Scope::kNone;  // of the write
};
struct BlockCells {
  std::vector<Cell> cells;
  u32 mbar_group = kNone, mbars = 0;
};

struct Knowledge {
  Clock clock;
  u64 generation = 0;
};

class Races {
 public:
  explicit Races(MachineImpl& m) : machine_(m) {}

  void start(Run& r);
  void start(Block& b);
  void exit(const Who& w);
  Order order_of(const Run& r);

  void global(const Who& w, u64 at, u32 n, bool write, const Ins& i);
  void shared(const Who& w, u32 at, u32 n, bool write, const Ins& i);
  void atomic(const Who& w, u64 at, u32 n, const Ins& i);
  void fence(const Who& w, Scope scope);
  void proxy_fence(const Who& w, u32 spaces);

  void meet(Warp& w, u32 lanes);
  void meet(Block& b, u32 barrier);

  void init(const Who& w, Mbar& m, const Ins& i);
  void use(const Who& w, Mbar& m, const Ins& i);
  void arrive(const Who& w, Mbar& m);
  void complete(Mbar& m);
  void observe(const Who& w, Mbar& m);

  void issue(const Who& w, BulkCopy& k, const Ins& i);
  void waited(const Who& w, u32 group, bool read);

  void forget(u64 base, u64 bytes);
  void quiesce();

 private:
  struct Owner {  // of a group of components
    u32 block = 0;
    int device = 0;
    u64 gpu = 0;
  };
  struct Sync {  // the release that a word holds
    Clocks clocks;
    Scope scope = Scope::kNone;
    u32 component = 0;
  };
  struct Reader {
    u32 component, tick;
  };
  struct Access {
    const Who& who;
    const Ins& ins;
    u32 component, tick;
    const Clock& known;
    const Clock* proxy;  // null: through the generic proxy
    Scope strong;
    bool shared;
  };

  u32 new_group(const Block& b);
  LaneClocks& lane(const Who& w);
  u32 component(const Who& w) const;
  const Clocks& publish(const Who& w);  // all of it until now; what comes is new
  bool includes(Scope scope, u32 a, u32 b) const;
  bool synchronises(const Sync& s, u32 by, Scope scope) const;
  Cell& global_cell(u64 at);
  void touch(Cell& c, bool write, const Access& a, u8 bytes, u64 at);
  void touch_global(bool write, const Access& a, u64 at, u32 n);
  void touch_shared(bool write, const Access& a, u32 at, u32 n);
  void check_write(const Cell& c, bool write, const Access& a, u64 at);
  void check_reads(const Cell& c, const Access& a, u64 at);
  void note_read(Cell& c, const Access& a, u8 bytes);
  void saw(const Who& w, u64 at, const Ins& i);                  // a strong load
  void published(const Who& w, u64 at, const Ins& i, bool rmw);  // a strong store

  MachineImpl& machine_;
  std::vector<Owner> owners_;
  std::vector<std::vector<Reader>> readers_;
  std::unordered_map<u64, std::unique_ptr<Cell[]>> pages_;
  u64 near_page_ = ~0ull;
  Cell* near_cells_ = nullptr;
  std::unordered_map<u64, Sync> syncs_;
  u64 generation_ = 1;
};

}  // namespace hep::ptxm
