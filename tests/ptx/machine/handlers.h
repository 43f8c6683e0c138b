// What instructions beyond register arithmetic do, and where their operands lie.
#pragma once
#include "program.h"

namespace hep::ptxm {

// ---- Control
Flow do_return(Context&, const Ins&, u32 mask);
Flow do_exit(Context&, const Ins&, u32 mask);
Flow do_call(Context&, const Ins&, u32 mask);  // target
enum Special : s64 { kThread, kBlockSize, kBlockIndex, kGridSize, kTimer, kLaneIndex, kZero, kOne };
Flow do_special(Context&, const Ins&, u32 mask);    // o[0] = which: offset
Flow do_nanosleep(Context&, const Ins&, u32 mask);  // o[1] ns

// ---- Memory: o[0..3] values, o[4] + offset the address
Flow load_global(Context&, const Ins&, u32 mask);
Flow store_global(Context&, const Ins&, u32 mask);
Flow load_shared(Context&, const Ins&, u32 mask);
Flow store_shared(Context&, const Ins&, u32 mask);
Flow load_param(Context&, const Ins&, u32 mask);     // of the kernel
Flow load_argument(Context&, const Ins&, u32 mask);  // of a function; offset alone
Flow store_argument(Context&, const Ins&, u32 mask);
Flow atomic_add(Context&, const Ins&, u32 mask);  // o[0] old value or kNone, o[1] operand
Flow atomic_cas(Context&, const Ins&, u32 mask);  // o[1] compare, o[2] new value
Flow do_fence(Context&, const Ins&, u32 mask);    // scope

// ---- Lines (lines.cpp): base, the lanes' addresses but for the offset
void mark_lines(Program& program);
void check_line(Context&, const Ins&, u32 mask, const u64* base, bool store);
void take_line(Context&, const Ins&, u32 mask, const u64* base);

// ---- Meetings
Flow block_barrier(Context&, const Ins&, u32 mask);  // o[0] count or kNone, o[1] id, o[2] predicate
enum Meeting : s64 { kWarpSync, kBallot, kElect, kLargest, kLargestSigned };
Flow warp_meeting(Context&, const Ins&, u32 mask);  // offset: which; o[0] result, o[1] members, o[2] predicate

// ---- mbarriers: o[4] + offset the address
Flow mbar_init(Context&, const Ins&, u32 mask);    // o[1] count
Flow mbar_arrive(Context&, const Ins&, u32 mask);  // o[1] bytes to expect or kNone
Flow mbar_wait(Context&, const Ins&, u32 mask);    // o[0] predicate, o[1] parity; sign: may suspend

// ---- Bulk copies: o[1] shared, o[2] global, o[3] bytes
Flow bulk_load(Context&, const Ins&, u32 mask);  // o[4] mbarrier
Flow bulk_store(Context&, const Ins&, u32 mask);
Flow bulk_commit(Context&, const Ins&, u32 mask);
Flow bulk_wait(Context&, const Ins&, u32 mask);    // offset: newest groups that may be pending; sign: .read
Flow proxy_fence(Context&, const Ins&, u32 mask);  // offset: 1 shared, 2 global, 3 both

}  // namespace hep::ptxm
