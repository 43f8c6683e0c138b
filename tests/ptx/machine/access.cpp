// Loads, stores and atomics, lane by lane, each checked against what it may touch.
#include <cstring>

#include "impl.h"

namespace hep::ptxm {
namespace {

u64 load_bytes(const u8* p, u32 bytes, bool sign) {
  switch (bytes) {
    case 1: return sign ? u64(s64(s8(*p))) : *p;
    case 2: {
      u16 v;
      std::memcpy(&v, p, 2);
      return sign ? u64(s64(s16(v))) : v;
    }
    case 4: {
      u32 v;
      std::memcpy(&v, p, 4);
      return sign ? u64(s64(s32(v))) : v;
    }
    default: {
      u64 v;
      std::memcpy(&v, p, 8);
      return v;
    }
  }
}
// What other threads of the process may read or write at the same time is taken in one piece.
u64 load_whole(const u8* p, u32 bytes, bool sign) {
  if (bytes == 8) return __atomic_load_n(reinterpret_cast<const u64*>(p), __ATOMIC_ACQUIRE);
  if (bytes == 4) {
    const u32 v = __atomic_load_n(reinterpret_cast<const u32*>(p), __ATOMIC_ACQUIRE);
    return sign ? u64(s64(s32(v))) : v;
  }
  return load_bytes(p, bytes, sign);
}
void store_whole(u8* p, u32 bytes, u64 v) {
  switch (bytes) {
    case 1: *p = u8(v); break;
    case 2: std::memcpy(p, &v, 2); break;
    case 4: __atomic_store_n(reinterpret_cast<u32*>(p), u32(v), __ATOMIC_RELEASE); break;
    default: __atomic_store_n(reinterpret_cast<u64*>(p), v, __ATOMIC_RELEASE);
  }
}
void take_one(Context& c, const Ins& i, u32 lane, const u8* p) {
  if (i.count == 1) return i.o[0] == kNone ? void() : c.set(i.o[0], i.reg_bytes, lane, load_whole(p, i.bytes, i.sign));
  for (u32 k = 0; k < i.count; ++k)
    if (i.o[k] != kNone) c.set(i.o[k], i.reg_bytes, lane, load_bytes(p + k * i.bytes, i.bytes, i.sign));
}
void put_one(Context& c, const Ins& i, u32 lane, u8* p) {
  for (u32 k = 0; k < i.count; ++k) store_whole(p + k * i.bytes, i.bytes, c.value(i.o[k], i.reg_bytes, lane));
}

// The forms that most accesses have: N words, as wide in the registers as in memory.
template <class T, u32 N, class P>
void take_words(Context& c, const Ins& i, u32 mask, P&& place) {
  T* d[N];
  for (u32 k = 0; k < N; ++k) d[k] = c.row<T>(i.o[k]);
  for (; mask; mask &= mask - 1) {
    const u32 lane = u32(std::countr_zero(mask));
    const T* p = reinterpret_cast<const T*>(place(lane));
    for (u32 k = 0; k < N; ++k) d[k][lane] = N == 1 ? __atomic_load_n(p, __ATOMIC_ACQUIRE) : p[k];
  }
}
template <class T, u32 N, class P>
void put_words(Context& c, const Ins& i, u32 mask, P&& place) {
  const T* d[N];
  for (u32 k = 0; k < N; ++k) d[k] = c.row<T>(i.o[k]);
  for (; mask; mask &= mask - 1) {
    const u32 lane = u32(std::countr_zero(mask));
    T* p = reinterpret_cast<T*>(place(lane));
    for (u32 k = 0; k < N; ++k) __atomic_store_n(p + k, d[k][lane], __ATOMIC_RELEASE);
  }
}
// words<T, N>() for those forms, one(lane) for every lane of any other.
template <class Words, class One>
void by_form(const Ins& i, u32 mask, Words&& words, One&& one) {
  switch (i.form) {
    case Form::kWord: return words.template operator()<u32, 1>();
    case Form::kLong: return words.template operator()<u64, 1>();
    case Form::kFourWords: return words.template operator()<u32, 4>();
    default: each_lane(mask, one);
  }
}
template <class P>
void take(Context& c, const Ins& i, u32 mask, P&& place) {
  by_form(
      i, mask, [&]<class T, u32 N>() { take_words<T, N>(c, i, mask, place); },
      [&](u32 lane) { take_one(c, i, lane, place(lane)); });
}
template <class P>
void put(Context& c, const Ins& i, u32 mask, P&& place) {
  by_form(
      i, mask, [&]<class T, u32 N>() { put_words<T, N>(c, i, mask, place); },
      [&](u32 lane) { put_one(c, i, lane, place(lane)); });
}
std::string size_of(const Ins& i) {
  return std::to_string(i.count * i.bytes) + " bytes";
}

// A poll that sees what it saw before lets time pass.
Flow poll(Context& c, const Ins& i, u32 mask) {
  Fragment& f = *c.fragment;
  const u64 seen = c.value(i.o[0], i.reg_bytes, u32(std::countr_zero(mask)));
  if (f.polled_pc == f.pc && f.polled == seen) {
    c.machine->sleep(*c.warp, f, c.machine->now() + 50 + c.machine->random.below(450));
    return Flow::kStop;
  }
  f.polled_pc = f.pc;
  f.polled = seen;
  return Flow::kYield;
}

Flow bad_global(Context& c, const Ins& i, u32 lane, u64 at, const char* verb) {
  const u32 n = i.count * i.bytes;
  if (at % n)
    return c.machine->fault(c, i, lane,
                            std::string(verb) + " of " + size_of(i) + " at " + hex(at) + ", which is misaligned");
  if (at < (1u << 24))
    return c.machine->fault(c, i, lane,
                            std::string(verb) + " of global memory at " + hex(at) +
                                ", which looks like an address of shared memory or null");
  return c.machine->fault(c, i, lane,
                          std::string(verb) + " of " + size_of(i) + " at global " + c.machine->memory.describe(at));
}
Flow bad_shared(Context& c, const Ins& i, u32 lane, u32 at, const char* verb) {
  const u32 n = i.count * i.bytes;
  if (at % n)
    return c.machine->fault(
        c, i, lane, std::string(verb) + " of " + size_of(i) + " at shared " + hex(at) + ", which is misaligned");
  return c.machine->fault(c, i, lane,
                          std::string(verb) + " of " + size_of(i) + " at shared " + hex(at) + "; the block has " +
                              hex(kSharedBase) + " to " + hex(kSharedBase + c.warp->block->shared.bytes.size()));
}
// The first lane whose access is misaligned or in no range; kLanes: none.
u32 first_bad(Context& c, const u64* base, const Ins& i, u32 mask, bool write) {
  const u32 n = i.count * i.bytes;
  for (; mask; mask &= mask - 1) {
    const u32 lane = u32(std::countr_zero(mask));
    const u64 at = base[lane] + u64(i.offset);
    if (at & (n - 1) || !c.machine->memory.holds(at, n, write)) [[unlikely]]
      return lane;
  }
  return kLanes;
}
u32 first_bad_shared(Context& c, const u32* base, const Ins& i, u32 mask) {
  const u32 n = i.count * i.bytes;
  const u64 end = kSharedBase + c.warp->block->shared.bytes.size();
  for (; mask; mask &= mask - 1) {
    const u32 lane = u32(std::countr_zero(mask)), at = base[lane] + u32(i.offset);
    if (at & (n - 1) || at < kSharedBase || u64(at) + n > end) [[unlikely]]
      return lane;
  }
  return kLanes;
}
void check_mbar(Context& c, const Ins& i, u32 lane, u32 off, u32 n) {
  const SharedMemory& s = c.warp->block->shared;
  if (s.mbars[off >> 3] || s.mbars[(off + n - 1) >> 3]) [[unlikely]]
    c.machine->report("mbarrier", Who{*c.warp, lane}, &i, "an access to the memory of a live mbarrier");
}
template <class F>
void each(u32 mask, F&& f) {
  for (; mask; mask &= mask - 1) f(u32(std::countr_zero(mask)));
}

}  // namespace

Flow load_global(Context& c, const Ins& i, u32 mask) {
  const u64 offset = u64(i.offset);
  u64 base[kLanes];  // the result may be the address's register
  std::memcpy(base, c.row<u64>(i.o[4]), sizeof base);
  if (const u32 lane = first_bad(c, base, i, mask, false); lane < kLanes)
    return bad_global(c, i, lane, base[lane] + offset, "load");
  if (i.of_line) {
    check_line(c, i, mask, base, false);
    take_line(c, i, mask, base);
  } else {
    take(c, i, mask, [&](u32 lane) { return reinterpret_cast<const u8*>(base[lane] + offset); });
  }
  if (Races* races = c.machine->races.get())
    each(mask, [&](u32 lane) { races->global({*c.warp, lane}, base[lane] + offset, i.count * i.bytes, false, i); });
  return i.strong ? poll(c, i, mask) : Flow::kGo;
}
Flow store_global(Context& c, const Ins& i, u32 mask) {
  const u64 offset = u64(i.offset), *base = c.row<u64>(i.o[4]);
  if (const u32 lane = first_bad(c, base, i, mask, true); lane < kLanes)
    return bad_global(c, i, lane, base[lane] + offset, "store");
  if (i.of_line) check_line(c, i, mask, base, true);
  if (Races* races = c.machine->races.get())
    each(mask, [&](u32 lane) { races->global({*c.warp, lane}, base[lane] + offset, i.count * i.bytes, true, i); });
  put(c, i, mask, [&](u32 lane) { return reinterpret_cast<u8*>(base[lane] + offset); });
  return i.strong ? Flow::kYield : Flow::kGo;
}
Flow load_shared(Context& c, const Ins& i, u32 mask) {
  SharedMemory& s = c.warp->block->shared;
  const u32 n = i.count * i.bytes, offset = u32(i.offset) - kSharedBase;
  u32 base[kLanes];
  std::memcpy(base, c.row<u32>(i.o[4]), sizeof base);
  if (const u32 lane = first_bad_shared(c, base, i, mask); lane < kLanes)
    return bad_shared(c, i, lane, base[lane] + u32(i.offset), "load");
  const u32 used = i.used_bytes & ((1u << n) - 1);
  each(mask, [&](u32 lane) {
    const u32 off = base[lane] + offset;
    check_mbar(c, i, lane, off, n);
    if (const u32 missing = used & ~s.written_bits(off, n)) [[unlikely]]
      c.machine->report("uninitialised", {*c.warp, lane}, &i,
                        "byte " + std::to_string(std::countr_zero(missing)) + " of a load at shared " +
                            hex(off + kSharedBase) + " was never written");
    if (c.machine->races) c.machine->races->shared({*c.warp, lane}, off, n, false, i);
  });
  take(c, i, mask, [&](u32 lane) { return &s.bytes[base[lane] + offset]; });
  return Flow::kGo;
}
Flow store_shared(Context& c, const Ins& i, u32 mask) {
  SharedMemory& s = c.warp->block->shared;
  const u32 n = i.count * i.bytes, offset = u32(i.offset) - kSharedBase, *base = c.row<u32>(i.o[4]);
  if (const u32 lane = first_bad_shared(c, base, i, mask); lane < kLanes)
    return bad_shared(c, i, lane, base[lane] + u32(i.offset), "store");
  each(mask, [&](u32 lane) {
    const u32 off = base[lane] + offset;
    check_mbar(c, i, lane, off, n);
    if (c.machine->races) c.machine->races->shared({*c.warp, lane}, off, n, true, i);
    s.write_bits(off, n);
  });
  put(c, i, mask, [&](u32 lane) { return &s.bytes[base[lane] + offset]; });
  return Flow::kGo;
}
Flow load_param(Context& c, const Ins& i, u32 mask) {
  const std::vector<u8>& params = c.warp->block->run->launch.params;
  const u64* base = c.row<u64>(i.o[4]);
  const u32 n = i.count * i.bytes;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest));
    const u64 at = base[lane] + u64(i.offset);
    if (at > params.size() || n > params.size() - at || at % n) [[unlikely]]
      return c.machine->fault(c, i, lane,
                              "load of " + size_of(i) + " at parameter byte " + std::to_string(s64(at)) + " of " +
                                  std::to_string(params.size()));
    take_one(c, i, lane, &params[at]);
  }
  return Flow::kGo;
}
Flow load_argument(Context& c, const Ins& i, u32 mask) {
  const u32 frame = c.warp->block->run->program->frame_bytes;
  each_lane(mask, [&](u32 lane) { take_one(c, i, lane, c.warp->frame + lane * frame + i.offset); });
  return Flow::kGo;
}
Flow store_argument(Context& c, const Ins& i, u32 mask) {
  const u32 frame = c.warp->block->run->program->frame_bytes;
  each_lane(mask, [&](u32 lane) { put_one(c, i, lane, c.warp->frame + lane * frame + i.offset); });
  return Flow::kGo;
}

namespace {
// Lanes of a warp one after the other: their order is nobody's promise.
template <class F>
Flow atomic(Context& c, const Ins& i, u32 mask, F&& change) {
  const u64* base = c.row<u64>(i.o[4]);
  MachineImpl& m = *c.machine;
  for (u32 rest = mask; rest; rest &= rest - 1) {
    const u32 lane = u32(std::countr_zero(rest));
    const u64 at = base[lane] + u64(i.offset);
    if (at % i.bytes || !m.memory.holds(at, i.bytes, true)) return bad_global(c, i, lane, at, "atomic");
    const u64 old = change(lane, at);
    if (i.o[0] != kNone) c.set(i.o[0], i.bytes, lane, old);
    if (m.races) m.races->atomic({*c.warp, lane}, at, i.bytes, i);
  }
  return Flow::kYield;
}
}  // namespace

Flow atomic_add(Context& c, const Ins& i, u32 mask) {
  return atomic(c, i, mask, [&](u32 lane, u64 at) -> u64 {
    const u64 by = c.value(i.o[1], i.bytes, lane);
    if (i.bytes == 8) return __atomic_fetch_add(reinterpret_cast<u64*>(at), by, __ATOMIC_SEQ_CST);
    return __atomic_fetch_add(reinterpret_cast<u32*>(at), u32(by), __ATOMIC_SEQ_CST);
  });
}
Flow atomic_cas(Context& c, const Ins& i, u32 mask) {
  return atomic(c, i, mask, [&](u32 lane, u64 at) -> u64 {
    const u64 expected = c.value(i.o[1], i.bytes, lane), wanted = c.value(i.o[2], i.bytes, lane);
    if (i.bytes == 8) {
      u64 old = expected;
      __atomic_compare_exchange_n(reinterpret_cast<u64*>(at), &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
      return old;
    }
    u32 old = u32(expected);
    __atomic_compare_exchange_n(reinterpret_cast<u32*>(at), &old, u32(wanted), false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
    return old;
  });
}
Flow do_fence(Context& c, const Ins& i, u32 mask) {
  if (c.machine->races)
    for (u32 rest = mask; rest; rest &= rest - 1)
      c.machine->races->fence({*c.warp, u32(std::countr_zero(rest))}, i.scope);
  return Flow::kYield;
}

}  // namespace hep::ptxm
