// What the simulator knows of every 16 bytes (a granule) of memory: whether it holds data, and who is about to
// read or write it. Bulk copies have 16-byte granularity, so every rule is exact.
//
// A granule of registered memory goes free -> being written -> written -> (licence given back) free. Writing what
// is not free, reading what is not written, and anything that meets an operation in flight is a broken rule.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace hep::sim {

inline constexpr uint64_t kGranule = 16;

// Arrays of small counters, one per granule; plain loops that vectorise.
using Counts = std::vector<uint8_t>;
inline bool any(const Counts& c, uint64_t at, uint64_t n) {
  uint8_t all = 0;
  for (const uint8_t *p = c.data() + at, *end = p + n; p != end; ++p) all |= *p;
  return all != 0;
}
inline bool every(const Counts& c, uint64_t at, uint64_t n) {
  uint8_t all = 0xff;
  for (const uint8_t *p = c.data() + at, *end = p + n; p != end; ++p) all &= *p;
  return all != 0;
}
inline void add(Counts& c, uint64_t at, uint64_t n, uint8_t by) {
  for (uint8_t *p = c.data() + at, *end = p + n; p != end; ++p) *p = uint8_t(*p + by);
}
inline void set(Counts& c, uint64_t at, uint64_t n, uint8_t to) {
  for (uint8_t *p = c.data() + at, *end = p + n; p != end; ++p) *p = to;
}

// A block's shared memory.
struct SharedShadow {
  Counts valid;        // holds data: 0xff
  Counts unpublished;  // lanes with generic accesses that they have not published
  Counts writer;       // 1 + warp of the last generic write that is not published, 0 = none
  Counts loading;      // bulk loads that may still write it
  Counts storing;      // bulk stores that may still read it
  Counts barrier;      // an initialised mbarrier lies here

  void reset(uint64_t bytes) {
    const uint64_t n = (bytes + kGranule - 1) / kGranule;
    for (Counts* c : {&valid, &unpublished, &writer, &loading, &storing, &barrier}) c->assign(n, 0);
  }
};

// A stretch of global memory that kernels may touch.
struct Region {
  enum class Use {
    kInput,         // read only
    kMetadata,      // written and read by its owner's kernels
    kOutput,        // written by its owner, once per launch
    kNotification,  // written by its owner's kernels, read by the host, which is not simulated
    kCounts,        // count vectors: the host writes into them too, so only operations in flight are watched
    kRail,          // registered: places of the latency path for what goes along the rail, watched as counts are
    kSendRing,      // registered: filled by its owner, read by the NIC, free again when the put has landed
    kRecvRing,      // registered: filled by the rail peer, free again when its owner returns the credit
    kRecvRows,      // registered: filled by ranks of the node, free again when its owner's operation ends
    kArena,         // the same, where no rank has rows of its own
    kSlabs,         // registered: lines, each free again when its owner has read it
  };
  const char* name = "";
  unsigned char* begin = nullptr;
  uint64_t bytes = 0;
  int rank = 0;
  Use use = Use::kInput;
  bool payload = false;  // timed worlds do not move its bytes
  Counts written{}, writing{}, reading{};

  bool is_registered() const { return use >= Use::kCounts; }
  bool is_licensed() const { return use >= Use::kSendRing; }
  bool watches_writes() const { return use != Use::kInput; }
  bool contains(const void* p, uint64_t n) const {
    const auto* at = static_cast<const unsigned char*>(p);
    return at >= begin && at + n <= begin + bytes;
  }
  uint64_t offset(const void* p) const { return uint64_t(static_cast<const unsigned char*>(p) - begin); }
  void watch() {
    const uint64_t n = (bytes + kGranule - 1) / kGranule;
    for (Counts* c : {&written, &writing, &reading}) c->assign(n, 0);
  }
};

// Granules of [at, at + bytes).
struct GranuleSpan {
  uint64_t at, n;
  GranuleSpan(uint64_t byte, uint64_t bytes)
      : at(byte / kGranule), n((byte + bytes + kGranule - 1) / kGranule - byte / kGranule) {}
};

}  // namespace hep::sim
