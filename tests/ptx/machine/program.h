// Decoded PTX: what the parser makes and the machine executes.
//
// A register is a row of 32 lanes in its warp's file, 2, 4 or 8 bytes a lane; a predicate is one word, a bit a lane.
// Constants are rows too, shared by all warps. An operand is the byte offset of its row, with kConstant in its top bit
// for a row of constants.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"

namespace hep::ptxm {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

inline constexpr u32 kLanes = 32;
inline constexpr u32 kConstant = 1u << 31;
inline constexpr u32 kNone = ~0u;
inline constexpr u32 kSharedBase = 1024;  // shared addresses below are the system's
inline constexpr u8 kPredicate = 1;       // "bytes" of a predicate register

struct Context;
struct Ins;
enum class Flow : u8 {
  kGo,     // on to the next instruction
  kYield,  // done, and a good place for others to run
  kStop,   // the fragment waits, or is gone
};
// Executes for the lanes of `mask`, never empty.
using Handler = Flow (*)(Context&, const Ins&, u32 mask);

enum class Scope : u8 { kNone, kCta, kGpu, kSys };
enum class Form : u8 { kOther, kWord, kLong, kFourWords };  // of a load or store whose registers are as wide as memory
enum class Kind : u8 {
  kPlain,
  kBranch,      // changes the fragment's pc; executed by the run loop
  kCollective,  // lanes that its guard leaves out must be parted first
};

struct Ins {
  Handler run = nullptr;
  u32 o[6] = {kNone, kNone, kNone, kNone, kNone, kNone};
  u32 guard = kNone;  // a predicate's row
  u32 target = 0;     // of a branch or call
  s64 offset = 0;     // of an address; or a small immediate, as each handler says
  bool guard_not = false;
  Kind kind = Kind::kPlain;
  Form form = Form::kOther;
  u8 defs = 0;       // bit k: o[k] is written
  u8 count = 1;      // elements of a vector
  u8 bytes = 0;      // of an element in memory
  u8 reg_bytes = 0;  // of the registers that hold the elements
  bool sign = false, acquire = false, release = false, strong = false;
  bool of_line = false;  // lanes have parts of lines of 128 bytes (lines.cpp)
  bool to_line = false;  // the meeting's lanes are on their way to such an access, together
  Scope scope = Scope::kNone;
  u16 used_bytes = 0xffff;  // of a load: bytes that the program uses (.pragma used_bytes_mask)
  const char* name = "";
  u32 line = 0, file = 0, source_line = 0;
};

struct Function {
  std::string name;
  u32 begin = 0, end = 0;  // its instructions
  u32 first_row = 0, row_bytes = 0;
  struct Argument {
    std::string name;
    u32 offset, bytes;
  };
  std::vector<Argument> args;  // of a function that is called: places in a lane's argument frame
};

struct EntryCode {  // where a kernel begins
  u32 pc = 0, row_bytes = 0;
};

struct Program {
  std::vector<Ins> code;  // of all functions; a pc is an index
  std::vector<Function> functions;
  std::vector<EntryCode> entries;  // by Kernel::index
  std::vector<u64> constants;      // rows, aligned to eight bytes
  std::vector<std::string> files;
  std::vector<Variable> variables;
  u32 frame_bytes = 0;  // of a lane's arguments to functions
  const u8* constant_rows() const { return reinterpret_cast<const u8*>(constants.data()); }
};

}  // namespace hep::ptxm
