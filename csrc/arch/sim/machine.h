// The simulated machine: all ranks of a world in one thread. Lanes are fibers; loads, puts and signals are events.
// Exploration (no costs): a seeded strategy picks among runnable lanes and pending events in any legal order.
// Timed (costs set): everything happens in the order of an integer clock; nothing is random.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arch/host/rng.h"
#include "arch/sim/failure.h"
#include "arch/sim/global_memory.h"
#include "arch/sim/lane.h"
#include "arch/sim/strategy.h"
#include "arch/sim/timeline.h"
#include "common/world.h"
#include "layout/buffer.h"

namespace hep::sim {

struct Fault {
  enum Kind : uint8_t { kNone, kRankDies, kRailStops, kPutLost } kind = kNone;
  int rank = 0, peer_node = 0;  // the rail from `rank` to its peer on `peer_node`
  uint64_t at = 0;              // steps of the rank, or puts on the rail, before it happens
};

struct MachineConfig {
  int num_nodes = 1, num_local_ranks = 1;
  uint64_t seed = 0;
  StrategyKind strategy = StrategyKind::kRandom;
  bool timed = false;
  bool looks_together = true;  // see Arch
  CostModel costs;
  Fault fault;
  Ps timeout_ps = 100'000'000'000'000;  // of every wait in a world with a fault; 0 = none, it deadlocks
  uint64_t max_steps = 20'000'000;      // exploration: more means that lanes run in circles
  bool log = false;                     // keep a line per event
  bool trace = false;                   // timed: keep spans
};

class Machine {
 public:
  explicit Machine(const MachineConfig& config);
  ~Machine();
  Machine(const Machine&) = delete;

  // The rank's registered memory; before run().
  void add_segment(int rank, unsigned char* data, const BufferLayout& layout);
  // Runs program(rank) on every rank's host lane to its end, or to the first failure of the world.
  void run(const std::function<void(int rank)>& program);
  const Failure& failure() const { return failure_; }
  void fail(const char* kind, const char* rule, const std::string& what);

  // By a rank's host lane: a kernel, to its end. Throws what one of its lanes threw.
  void launch(int rank, Launch launch);
  GlobalMemory& memory() { return memory_; }

  // ---- by lanes, through SimArch
  void step(Lane& me);
  void wait_phase(Lane& me, const Mbarrier& bar, uint32_t parity, const WaitInfo& info);
  void wait_word(Lane& me, const uint64_t* word, uint64_t value, const WaitInfo& info, Ps cost);
  void poll(Lane& me, const WaitInfo& info, uint64_t expected, uint64_t seen);
  void poll_reset(Lane& me);
  void meet(Lane& me, uint64_t& arrived, uint64_t participants);
  void arrive(Lane& me, Mbarrier& bar, uint32_t bytes);
  void load(Lane& me, void* dst, const void* src, uint32_t bytes, Mbarrier& bar);
  void store(Lane& me, void* dst, const void* src, uint32_t bytes);
  void commit(Lane& me);
  void wait_stores(Lane& me, int newest, bool written);
  void publish(Lane& me);
  void read_shared(Lane& me, const void* p, uint64_t bytes, uint64_t alignment);
  void write_shared(Lane& me, void* p, uint64_t bytes, uint64_t alignment);  // before the bytes are written
  void read_global(Lane& me, const void* p, uint64_t bytes);
  bool write_global(Lane& me, void* p, uint64_t bytes);  // false: the bytes are not moved (timed payload)
  bool has_payload(Lane& me, const void* p);             // timed: p is payload, which is not there to be read
  void load_payload(Lane& me, const void* p, uint64_t bytes);
  void store_line(Lane& me, Line* dst, const uint64_t* words, uint64_t flag);
  bool look_at_line(Lane& me, const Line* src, uint64_t flag, uint64_t* words);
  void init_barrier(Lane& me, Mbarrier& bar, uint32_t arrivals, bool guards_refill);
  void fence_sys(Lane& me);
  void set_flag(Lane& me, uint64_t* flag, uint64_t value, bool add);
  uint64_t add_rank(Lane& me, uint64_t* word, uint64_t value, Ps cost);
  uint64_t look(Lane& me, const uint64_t* flag, uint64_t wanted, Ps cost);
  void put(Lane& me, int node, uint64_t offset, const void* src, uint64_t bytes, const uint64_t* flag_offset,
           uint64_t value);
  void lane_returns(Lane& me);
  void spend(Lane& me, Ps time) {
    me.now += time;
    if (me.time) me.time->busy += time;
  }
  void set_role(Lane& me, const char* role);
  void did(Lane& me, LoopStep step) {
    if (timed()) spend(me, config_.costs.loop_ps[int(step)]);
  }

  // ---- metadata
  const MachineConfig& config() const { return config_; }
  const World& world() const { return world_; }
  bool timed() const { return config_.timed; }
  Rank& rank(int r) { return ranks_[size_t(r)]; }
  const Rank& rank(int r) const { return ranks_[size_t(r)]; }
  int num_ranks() const { return int(ranks_.size()); }
  int rank_of(const void* p) const;  // whose memory; -1 = none
  Timeline& timeline() { return timeline_; }
  Ps clock() const { return clock_; }
  uint64_t steps() const { return steps_; }
  std::vector<std::string>& log() { return log_; }
  void note(const Lane& me, const std::string& what);
  static Lane* running();  // the lane that this thread runs

  // ---- actors, for strategies
  uint32_t num_wires() const { return uint32_t(wires_.size()); }
  bool is_lane(uint32_t actor) const { return actor >= num_wires(); }
  const Lane& lane_at(uint32_t actor) const { return *lanes_[actor - num_wires()]; }
  int actor_rank(uint32_t actor) const { return is_lane(actor) ? lane_at(actor).rank : wires_[actor].src; }
  bool is_rail(uint32_t actor) const { return !is_lane(actor) && wires_[actor].node >= 0; }
  bool only_chunk(uint32_t wire, uint32_t chunk) const;
  uint64_t num_roles_seen() const { return roles_.size(); }
  const char* role_seen(size_t i) const { return roles_[i]; }

 private:
  struct Load {
    std::byte* dst;
    const void* src;
    uint32_t bytes;
    Mbarrier* bar;
    Block* block;
    Region* region;
    Lane* issuer;
  };
  struct Put {
    unsigned char* dst = nullptr;
    const unsigned char* src = nullptr;
    uint64_t bytes = 0;
    uint64_t* flag = nullptr;
    uint64_t value = 0;
    Region *from = nullptr, *to = nullptr;
    uint32_t slot = ~0u;
  };
  // Some words of a line on their way: all of them, but where a mutant tears it.
  struct LinePiece {
    Line* dst;
    Line line;
    int first, count;
    bool flag_first;  // the flag alone: its payload comes behind it
    Region* region;
  };
  // Loads and lines of a rank (node < 0), or the rail from rank src to its peer on a node. One event at a time leaves
  // it.
  struct Wire {
    int src = 0, node = -1;
    bool ready = false, stopped = false;
    uint64_t posted = 0;
    std::vector<Load> loads{};
    std::vector<Put> puts{};
    std::vector<LinePiece> lines{};

    bool empty() const { return loads.empty() && puts.empty() && lines.empty(); }
  };

  // machine.cpp: lanes and the choice of what goes next
  static host::FiberContext& lane_entry(void* lane);
  Lane& take_lane(int rank);
  host::FiberContext& next_context();
  void suspend(Lane& me);
  void block(Lane& me);
  void yield(Lane& me);
  uint64_t locate(const Lane& me, const void* p, uint64_t bytes, uint64_t alignment, const char* operation) const;
  void require_barrier(const Lane& me, const Mbarrier& bar, const char* operation) const;
  void wake(Lane& lane);
  void wake_flag_waiters(int rank);
  void wake_phase_waiters(Block& block, const Mbarrier& bar);
  void set_ready(uint32_t actor, bool& flag);
  void unready(size_t at, bool& flag);
  bool idle();
  void take_smem(Block& block, size_t bytes);
  void expire();
  void kill(int rank);
  void abandon_all();
  void abandon(Launch& launch, int rank);
  [[noreturn]] void raise(Lane& me);
  std::string wait_graph() const;
  // events.cpp: exploration
  void run_wire(Wire& wire);
  void land_load(const Load& load);
  void land_put(const Put& put, Wire& wire);
  void land_line(Wire& wire, size_t at);
  void send_pieces(const LinePiece& piece, Wire& wire);
  Region& line_region(const Lane& me, const Line* line, const char* operation) const;
  void end_phase(const Lane* me, Block& block, Mbarrier& bar, uint64_t before);
  void release_group(Lane& me, StoreGroup& group);
  void copy_group(Lane& me, StoreGroup& group);
  void finish_group(Lane& me, StoreGroup& group);
  int segment_of(const Lane& me, const void* flag) const;
  void check_row(const Lane& me, const Region& region, const void* dst, uint64_t bytes);
  void give_back(const Lane& me, uint64_t flag_offset, int node);
  // timed.cpp
  friend class Clockwork;

  static constexpr size_t kReserve = 64 * 1024;  // less than what an allocator maps by itself

  MachineConfig config_;
  World world_;
  std::optional<BufferLayout> layout_;
  Strategy strategy_;
  GlobalMemory memory_;
  std::vector<Rank> ranks_;
  std::vector<Wire> wires_;  // loads of rank r at r; rails behind
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<Lane*> free_lanes_;  // with room for all, for those that return have none to ask for
  // Given back where memory is short, so that who says so has some: where mappings are, a heap does not grow either.
  std::unique_ptr<char[]> reserve_ = std::make_unique<char[]>(kReserve);
  std::vector<uint32_t> ready_;
  std::vector<const char*> roles_;
  host::FiberContext main_;
  std::function<void(int)> program_;
  uint32_t alive_ = 0;
  bool aborting_ = false;
  Failure failure_;
  Ps clock_ = 0;
  uint64_t steps_ = 0;
  std::vector<std::string> log_;
  Timeline timeline_;
  std::unique_ptr<class Clockwork> clockwork_;
};

}  // namespace hep::sim
