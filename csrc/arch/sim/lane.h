// The parts of a simulated world: ranks, launches, blocks, lanes, and what a lane may wait for.
#pragma once
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <source_location>
#include <vector>

#include "arch/host/fiber.h"
#include "arch/host/mbarrier.h"
#include "arch/sim/costs.h"
#include "arch/sim/shadow.h"
#include "arch/sim/zero_pages.h"
#include "common/timeout_report.h"

namespace hep::sim {

class Machine;
struct Lane;
struct Block;
using host::Mbarrier;
using Where = std::source_location;  // the line of the role that called

// What a blocked lane waits for.
struct Wait {
  enum Kind : uint8_t {
    kNothing,
    kPhase,   // the mbarrier's phase bit leaves `value`
    kWord,    // a flag reaches `value`
    kPoll,    // any flag of this rank changes
    kMeet,    // the lanes of the block (or group) arrive: *word reaches `value`
    kGroups,  // this lane's bulk stores: `value` = how far
    kLaunch,  // a host lane: its kernel
    kClock,   // timed: the world's clock reaches this lane's
    kLine,    // timed: the line `value` of a slot
  };
  Kind kind = kNothing;
  const uint64_t* word = nullptr;
  uint64_t value = 0;
  WaitInfo info{Site::kBlockSync};
  uint64_t expected = 0, seen = 0;  // kPoll: for the timeout report
  Ps since = 0;
};

// A bulk store, from issue to completion.
struct Store {
  Region* region = nullptr;
  unsigned char* dst = nullptr;
  uint32_t smem_at = 0, bytes = 0;
  bool copied = false;            // exploration: the bytes have reached dst
  std::vector<std::byte> data{};  // exploration: read from shared memory, not yet written
};
struct StoreGroup {
  std::vector<Store> stores;
  uint32_t reads_pending = 0, writes_pending = 0;  // timed
  Ps read_at = 0, written_at = 0;
};

// Timed: lines of one slot that a lane has stored and that go together, and whoever waits for lines of the slot.
struct LineSlot {
  uint64_t flag = 0;
  Lane* waiting = nullptr;       // the first of them
  std::vector<uint64_t> landed;  // of the step of `flag`: a bit a line
  std::vector<uint64_t> facts;   // words of the lines that addresses come from
};
struct LineRun {
  LineSlot* slot;
  uint64_t flag;
  uint32_t first, count;
  int owner;
};

// FIFO server of virtual time.
struct Server {
  Ps free_at = 0, busy = 0;
  uint64_t bytes = 0, served = 0;
};

struct RoleTime {  // of one role on one rank, summed over blocks
  const char* role = "";
  Ps busy = 0;
  Ps waited[kSites] = {};  // by Site
};

struct Launch {
  const char* kernel = "";
  int num_blocks = 0, num_warps = 0;
  size_t smem_bytes = 0;
  uint32_t alive = 0;  // lanes
  std::function<void(Lane&)> body;
  std::exception_ptr error;
  // Timed: of a message, of what goes to its metadata entry, and of what is really moved of it.
  uint32_t row_bytes = 0, entry_bytes = 0, moved_bytes = 0;
  uint32_t fact_lines = 0;  // of a slot: the first, which addresses come from
  Ps line_store_ps = 0, line_load_ps = 0, word_load_ps = 0;
  Ps signal_ps = 0, count_ps = 0;          // a look at a signal of the rail; a count of system scope, with its fence
  Ps rail_store_ps = 0, rail_load_ps = 0;  // for 8 bytes of what goes along the rail, in this rank's places for it
  const char* charged_role = nullptr;      // a lane that takes it spends `charge` first
  Ps charge = 0;
  Ps start = 0, end = 0;
};

struct Block {
  int idx = 0, rank = 0;
  Launch* launch = nullptr;
  std::vector<std::byte> memory;  // exploration: of the heap, which sanitizers watch
  ZeroPages pages;                // timed
  std::byte* smem = nullptr;
  SharedShadow shadow;
  uint64_t arrived = 0, group_arrived[16] = {};
  Ps meet_at = 0;
  std::vector<Lane*> lanes;
  Server tma_read, tma_write, line_store;
};

enum class Verdict : uint8_t { kGo, kExpired, kAbandoned };

struct Lane {
  explicit Lane(Machine& m, uint32_t index) : machine(&m), actor(index) {}
  Machine* machine;
  uint32_t actor;  // index among lanes, also among everything that the strategy can choose
  int rank = 0, warp = 0;
  Block* block = nullptr;  // null: the rank's host lane
  Launch* launch = nullptr;
  const char* role = "";
  Where where;
  bool alive = false, ready = false;
  Verdict verdict = Verdict::kGo;
  Wait wait;
  uint64_t seen_changes = 0;
  Ps now = 0;  // timed: this lane's clock, at or ahead of the world's
  Ps idle_since = 0;
  RoleTime* time = nullptr;
  std::deque<StoreGroup> groups;  // committed, oldest first
  size_t num_released = 0;        // exploration: of them, how many the lane knows to have read shared memory
  std::vector<Store> open;
  uint64_t first_group = 0;       // number of groups.front()
  std::vector<uint32_t> touched;  // granules of generic accesses not yet published
  // Timed: loads of one stage that go together.
  Mbarrier* merged_bar = nullptr;
  uint32_t merged_bytes = 0, merged_ops = 0;
  int merged_from = 0;
  // Timed: lines that are stored and have not been posted; bytes of rows likewise, and of those posted which are not
  // through; the next who waits for a line of the same slot.
  std::vector<LineRun> line_runs;
  uint64_t row_bytes = 0;
  uint32_t rows_in_flight = 0;
  Lane* next_waiting = nullptr;
  std::unique_ptr<host::Fiber> fiber;
};

// Thrown through a lane that must end because something else failed. Never leaves the machine.
struct Abandoned {};

struct Rank {
  Lane* host = nullptr;
  bool dead = false;  // a fault: nothing of it moves any more
  Launch launch;
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned char* segment = nullptr;
  uint64_t changes = 0;        // flags written in this rank's segment
  std::vector<Lane*> waiting;  // lanes that wait for a flag or a change of this rank
  // Licence of the receive region: first_row[s] = first row of source s; empty = the owner alone writes. In a dispatch
  // it holds rows of metadata, then, where rows do not land elsewhere, of payload and of scales.
  struct Rows {
    uint64_t at, end, row_bytes;
  };
  std::vector<Rows> received;
  std::vector<uint32_t> first_row;
  // Timed: payload of this rank's launch, which is address space and no memory.
  const unsigned char *phantom_begin = nullptr, *phantom_end = nullptr;
  const unsigned char *rail_begin = nullptr, *rail_end = nullptr;  // places of the latency path, to send and to receive
  bool has_on_rail(const unsigned char* p) const { return p >= rail_begin && p < rail_end; }
  Server hbm, egress, ingress, nic_out, nic_in;
  std::deque<RoleTime> times;
};

}  // namespace hep::sim
