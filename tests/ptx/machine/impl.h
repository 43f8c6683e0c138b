// The machine inside: what its parts share.
#pragma once
#include <queue>
#include <unordered_map>

#include "context.h"
#include "handlers.h"
#include "memory.h"
#include "state.h"

namespace hep::ptxm {

struct BulkCopy {
  bool load = false, read = false;  // read: its source was taken, the destination is still to be written
  bool dropped = false;             // its block was killed
  Warp* warp = nullptr;
  u32 lane = 0;
  const Ins* ins = nullptr;
  u64 global = 0;
  u32 shared = 0, bytes = 0;  // shared: offset into the window
  u32 mbar = 0;               // its number
  u64 phase = 0;              // of the mbarrier at the issue
  u32 group = 0;
  std::vector<u8> data;
};

class Random {  // splitmix64
 public:
  explicit Random(u64 seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  u64 operator()() {
    u64 z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  u64 below(u64 n) { return n ? (*this)() % n : 0; }

 private:
  u64 state_;
};

struct Counts {
  u64 threads = 0, warps = 0;
};

struct Sm {
  u32 threads = 0, registers = 0, shared = 0, blocks = 0;
};
struct Device {
  DeviceModel model;
  std::vector<Sm> sms;
};

class MachineImpl {
 public:
  explicit MachineImpl(const Options& o);

  // ---- Scheduling (schedule.cpp)
  Progress run(u32 quanta);
  void make_ready(Warp& w);
  void make_unready(Warp& w);
  void wake(Warp& w, Fragment& f);
  void sleep(Warp& w, Fragment& f, u64 until, u32 mbar = 0);
  u64 now() const { return kStart + warp_steps / 4 + jumped; }
  u64 timer() const;  // what a kernel reads
  u64 clock() const;
  void nap();

  // ---- Launches and SMs (residency.cpp)
  std::string refusal(const Launch& l) const;
  u32 blocks_per_sm(const Kernel& k, int device, u32 block, u32 dynamic, u32 registers) const;
  LaunchId start(Launch l);
  void admit();
  void end_block_if_over(Block& b);
  void kill(Run& r);

  // ---- Meetings (meet.cpp)
  void exit_lanes(Context& c, u32 mask);
  void check_warp(Warp& w);
  void check_barrier(Block& b, u32 id);

  // ---- mbarriers and bulk copies (mbarrier.cpp, bulk.cpp)
  Mbar* find_mbar(Context& c, const Ins& i, u32 lane, u32 address);
  void end_phase_if_complete(Block& b, Mbar& m);
  void step_copy(u32 slot);
  void wake_waiter(Warp& w, u32 lane);
  void issue(Context& c, BulkCopy copy);

  // ---- Reports (report.cpp)
  void report(const char* kind, const Who& who, const Ins* i, const std::string& what);
  void report(const char* kind, const Run* run, const std::string& what);
  Flow fault(Context& c, const Ins& i, u32 lane, const std::string& what);  // ends the launch
  void report_deadlock();
  std::vector<LineCount> line_counts() const;

  struct Event {
    u64 when;
    Warp* warp;  // null: a bulk copy
    u32 serial;  // of the warp's block, which may be gone
    u32 copy;
    bool operator<(const Event& o) const { return when > o.when; }
  };
  static constexpr u64 kStart = 1'000'000'000;

  Options options;
  Random random;
  Memory memory;
  std::vector<Device> devices;
  std::deque<std::unique_ptr<Run>> runs;  // started and not forgotten, oldest first
  std::vector<LaunchId> ended;
  std::vector<Warp*> ready;
  std::priority_queue<Event> events;
  std::vector<BulkCopy> copies;  // by slot
  std::vector<u32> free_copies;
  std::unordered_map<u32, Block*> blocks;  // by serial
  std::unordered_map<const Program*, std::vector<Counts>> counts;
  std::unordered_map<const Program*, std::shared_ptr<const Program>> programs;
  std::vector<Report> reports;
  std::unordered_map<std::string, u32> reported;
  std::unique_ptr<Races> races;
  u64 warp_steps = 0, longest_warp = 0, thread_steps = 0, jumped = 0, launches = 0, running = 0;
  u64 napped = 0;
  u32 next_serial = 1;
  LaunchId next_id = 1;
  bool run_failed = false;  // one of the runs met a fault since it was last looked

 private:
  u32 run_fragment(Warp& w, u32 index, u32 burst);
  u32 choose(Warp& w);
  void join_parts(Warp& w);
  void wake_due(Warp& w);
  void take_event(const Event& e);
  void end_failed();
  bool place(Run& r);
  void make_warps(Block& b);
};

std::string hex(u64 x);

}  // namespace hep::ptxm
