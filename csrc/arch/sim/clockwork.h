// Virtual time: lanes spend time on instructions, copies queue at FIFO servers (an SM's TMA engine, HBM, NVLink
// egress and ingress, NIC), and everything that another lane can see happens in the order of the clock.
//
// A lane's own clock may run ahead of the world's while nothing it does depends on others; it is brought back in
// step (sync) before it looks at what others may still change. A copy passes its servers cut-through: it reaches
// the next one when the previous one starts on it, and is done when the slowest is.
#pragma once
#include <vector>

#include "arch/sim/machine.h"

namespace hep::sim {

class Clockwork {
 public:
  explicit Clockwork(Machine& machine) : m_(machine) {}

  // Handles the next event; false when there is none.
  bool advance();
  void sync(Lane& me);               // waits until the world's clock is the lane's
  void settle(Lane& me);             // also until what it posted has happened: before it returns
  void resume(Lane& lane, Ps cost);  // the lane's wait ends now
  void found(Lane& lane, Ps look);   // what it looks for is there since now: one look behind that it has seen it
  void flush(Lane& me);              // loads of one stage go as one copy: posts what is pending

  void load(Lane& me, void* dst, const void* src, uint32_t bytes, Mbarrier& bar);
  void arrive(Lane& me, Mbarrier& bar, uint32_t bytes);
  void store(Lane& me, void* dst, const void* src, uint32_t bytes);
  void commit(Lane& me);
  void wait_stores(Lane& me, int newest, bool written);
  void store_line(Lane& me, int owner, uint64_t line, const uint64_t* words, uint64_t flag);
  void await_line(Lane& me, uint64_t line, uint64_t flag, uint64_t* words);
  void stream(Lane& me, uint64_t bytes);  // of rows, between a warp and this GPU's memory
  void finish_streams(Lane& me);
  void load_rail(Lane& me, const void* p, uint64_t bytes);
  bool store_rail(Lane& me, const Region& region, const void* p, uint64_t bytes);
  bool is_rail_fact(const Lane& me, const unsigned char* p) const;
  void set_flag(Lane& me, uint64_t* flag, uint64_t value, bool add, int owner);
  void put(Lane& me, int peer, unsigned char* dst, const unsigned char* src, uint64_t bytes, uint64_t* flag,
           uint64_t value);

 private:
  void go_on(Lane& lane, Ps at);
  struct Hop {
    Server* server;
    Ps time;
    const char* link;
  };
  struct Item {
    enum Kind : uint8_t { kLoad, kStore, kPut, kFlag, kArrive, kResume, kLines, kRows } kind = kResume;
    bool add = false, landed = false;
    uint8_t hop = 0, num_hops = 0;
    Hop hops[5];
    Ps end = 0, latency = 0;
    uint64_t bytes = 0, group = 0, value = 0;
    uint64_t* flag = nullptr;
    LineSlot* slot = nullptr;
    uint32_t first_line = 0;
    Lane* lane = nullptr;
    Block* block = nullptr;
    Mbarrier* bar = nullptr;
    const char* role = "";
    int rank = 0, owner = 0;
  };
  static constexpr int kItemBits = 24;
  struct Due {
    Ps at;
    uint64_t key;  // number of the posting << kItemBits | item: ties in the order of posting
  };
  struct Later {
    bool operator()(const Due& a, const Due& b) const { return a.at != b.at ? a.at > b.at : a.key > b.key; }
  };

  uint32_t take(const Item& item);
  void post(uint32_t item, Ps at);
  void process(uint32_t item);
  void complete(uint32_t item);
  void add_hop(Item& item, Server& server, uint64_t mbps, const char* link, Ps least = 0);
  void land(Mbarrier& bar, Block& block, uint64_t bytes, bool arrival);
  Item of_lane(Lane& me, Item::Kind kind, uint64_t bytes) const;
  bool done(const Lane& me, int newest, bool written) const;
  void post_run(Lane& me, const LineRun& run);
  void post_rows(Lane& me);
  void land_lines(const Item& item);
  struct LineAt {
    LineSlot& slot;
    uint32_t line;
    bool header;
  };
  LineAt line_at(int owner, uint64_t line);
  uint64_t rail_facts(const Lane& me, uint64_t at) const;
  unsigned char* fact(const Lane& me, const Region& region, const void* p);

  Machine& m_;
  std::vector<Due> due_;  // a heap
  std::vector<Item> items_;
  std::vector<uint32_t> free_;
  std::vector<std::vector<unsigned char>> metadata_;  // by rank * 3 + kind of registered region
  std::vector<std::vector<LineSlot>> slots_;          // by rank: of each slab its header and its slots
  uint64_t posted_ = 0;
};

}  // namespace hep::sim
