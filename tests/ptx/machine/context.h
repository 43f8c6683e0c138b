// What a handler gets: a warp's registers, and where they belong.
#pragma once
#include <bit>

#include "program.h"

namespace hep::ptxm {

class MachineImpl;
struct Warp;
struct Fragment;

struct Context {
  u8* base[2];  // rows of the warp, rows of constants
  MachineImpl* machine = nullptr;
  Warp* warp = nullptr;
  Fragment* fragment = nullptr;

  template <class T>
  T* row(u32 operand) const {
    return reinterpret_cast<T*>(base[operand >> 31] + (operand & ~kConstant));
  }
  u64 value(u32 operand, u32 bytes, u32 lane) const {  // zero-extended
    switch (bytes) {
      case 2: return row<u16>(operand)[lane];
      case 4: return row<u32>(operand)[lane];
      default: return row<u64>(operand)[lane];
    }
  }
  void set(u32 operand, u32 bytes, u32 lane, u64 v) const {
    switch (bytes) {
      case 2: row<u16>(operand)[lane] = u16(v); break;
      case 4: row<u32>(operand)[lane] = u32(v); break;
      default: row<u64>(operand)[lane] = v;
    }
  }
  u32& predicate(u32 operand) const { return *row<u32>(operand); }
};

// f(lane) for every lane of the mask; a full one is a loop that the compiler can vectorise.
template <class F>
inline __attribute__((always_inline)) void each_lane(u32 mask, F&& f) {
  if (mask == ~0u) {
#pragma GCC ivdep
    for (u32 lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (; mask; mask &= mask - 1) f(u32(std::countr_zero(mask)));
  }
}

}  // namespace hep::ptxm
