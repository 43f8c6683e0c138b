// What is resident: launches, blocks, warps and the fragments that a warp's lanes form.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "machine.h"
#include "program.h"
#include "races.h"

namespace hep::ptxm {

struct Block;
struct Run;

// Lanes of a warp that are at the same place and go on together. Any two that come to the same place may be joined,
// and any one may be parted: PTX promises neither but at its meetings.
struct Fragment {
  enum State : u8 { kRun, kSleep, kBarrier, kMeeting, kBulk };
  u32 mask = 0, pc = 0;
  State state = kRun;
  u8 depth = 0;
  u32 returns[4] = {};
  u64 wake = 0;             // kSleep
  u32 mbar = 0;             // kSleep: woken by this mbarrier's phase, 0: by none
  const Ins* at = nullptr;  // what it waits in
  u32 barrier = 0;          // kBarrier: which
  u32 members = 0;          // kMeeting
  u32 polled_pc = kNone;    // the last acquire, and what it saw
  u64 polled = 0;
  bool together(const Fragment& o) const {
    if (state != kRun || o.state != kRun || pc != o.pc || depth != o.depth) return false;
    for (u32 k = 0; k < depth; ++k)
      if (returns[k] != o.returns[k]) return false;
    return true;
  }
};

// Bulk stores of a thread, by committed group.
struct BulkGroup {
  u32 number = 0, unread = 0, unwritten = 0;
};
struct LaneCopies {
  BulkGroup open;
  std::deque<BulkGroup> committed;  // oldest first
};

struct Warp {
  Block* block = nullptr;
  u32 index = 0;
  u32 live = 0;  // lanes that have not exited
  std::vector<Fragment> parts;
  u8* rows = nullptr;
  u8* frame = nullptr;  // arguments of functions, frame_bytes a lane
  s32 ready_at = -1;    // its place in the list of those that can run
  u32 apart = 0;        // turns in which nothing is joined
  u64 steps = 0;        // instructions that it executed
  std::unique_ptr<LaneCopies[]> copies;
  WarpClocks clocks;
};

struct Mbar {
  u32 at = 0;
  bool live = false;
  s64 expected = 0, pending = 0, bytes = 0;  // tx-count
  u64 phase = 0;
  MbarClocks clocks;
};

struct BlockBarrier {
  u32 arrived = 0, predicates = 0;
  const Ins* kind = nullptr;
};

// A block's shared memory by offset into its window.
struct SharedMemory {
  std::vector<u8> bytes, written;  // written: a bit a byte
  std::vector<u16> mbars;          // by eight bytes: 1 + its number, 0: none
  // Of an aligned access of up to 16 bytes: a bit for every byte that was written.
  u32 written_bits(u32 at, u32 n) const {
    return (u32(written[at >> 3] | written[(at >> 3) + 1] << 8) >> (at & 7)) & ((1u << n) - 1);
  }
  void write_bits(u32 at, u32 n) {
    const u32 bits = ((1u << n) - 1) << (at & 7);
    written[at >> 3] |= u8(bits);
    written[(at >> 3) + 1] |= u8(bits >> 8);
  }
  void set_initialised(u32 at, u32 n) {
    for (; n && at & 7; ++at, --n) written[at >> 3] |= u8(1 << (at & 7));
    for (; n >= 8; at += 8, n -= 8) written[at >> 3] = 255;
    for (; n; ++at, --n) written[at >> 3] |= u8(1 << (at & 7));
  }
};

struct Block {
  Run* run = nullptr;
  u32 index = 0, sm = 0, serial = 0;
  SharedMemory shared;
  std::deque<Mbar> mbars;
  BlockBarrier barriers[16];
  std::vector<Warp> warps;
  std::unique_ptr<u8[]> rows;
  u32 live = 0, copies_in_flight = 0;  // threads; bulk copies
  bool ended = false;
  BlockCells cells;
};

// A launch that was started.
struct Run {
  LaunchId id = 0;
  Launch launch;
  const Program* program = nullptr;
  u32 next_block = 0, live_blocks = 0;
  std::vector<std::unique_ptr<Block>> blocks;  // resident
  bool failed = false, done = false;
  RunClocks clocks;
};

// One thread.
struct Who {
  Warp& warp;
  u32 lane;
  Block& block() const { return *warp.block; }
  u32 thread() const { return warp.index * kLanes + lane; }
};

}  // namespace hep::ptxm
