// What goes through the stages of a sum, and what its feed is told of it.
#pragma once
#include "common/macros.h"
#include "common/numeric.h"

namespace hep {

struct alignas(16) SumHead {
  enum : uint32_t {
    kStop = 1,
    kFirst = 2,
    kLast = 4,
    kEmpty = 8,
    kScaled = 16,
    kRing = 32,       // the row lies in a ring slot, which is counted (RailTally)
    kChunkEnd = 64,   // of a chunk for a rail peer: it may be sent
    kGroupEnd = 128,  // of a group of partial rows: it may be read
    kSettle = 256,    // of a chunk of own tokens: what was taken from the rings is told
    kPart = 512,      // one of several rows in place of a partial: they are added and rounded before the sum has them
    kPartFirst = 1024,
    kPartLast = 2048,
  };
  uint64_t dst;  // address of the output tile
  uint32_t elems, flags;
  float scale;
  uint32_t peer;          // kRing, kChunkEnd: the rail peer's index; kGroupEnd: the source that GroupWalk gave with it
  uint32_t chunk;         // kRing, kChunkEnd: of that peer; kGroupEnd: the group
  uint32_t chunk_stages;  // kRing: that the chunk has; kChunkEnd: its rows

  HEP_DEVICE bool is(uint32_t any) const { return flags & any; }
  // Types of the rows and of their sum, beside the flags.
  HEP_DEVICE static constexpr uint32_t types(DType in, DType out) { return uint32_t(in) << 16 | uint32_t(out) << 18; }
  HEP_DEVICE DType in() const { return DType(flags >> 16 & 3); }
  HEP_DEVICE DType out() const { return DType(flags >> 18 & 3); }
};

// What rides on the last stage of a sum: fields of its head.
struct SumEnd {
  uint32_t flags = 0, peer = 0, chunk = 0, chunk_stages = 0;
};

// One row of a sum. The weights of a partial lie apart from its payload; of a part its last row has them.
struct alignas(16) SumRow {
  const unsigned char *payload, *weights = nullptr;
  float scale = 1.f;
  uint16_t peer = 0, part = 0;           // part: SumHead's flags of it
  uint32_t chunk = 0, chunk_stages = 0;  // with peer of a row out of a ring: chunk_stages is not 0 then
};

// What is summed of rows: payload or weights, into `dst`.
struct SumPart {
  unsigned char* dst;
  uint32_t elems, flags;
  bool weights;
};

}  // namespace hep
