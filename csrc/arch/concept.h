// The Arch contract: what a role may ask of the machine it runs on. Roles see this and a Transport,
// nothing else. One object of an Arch is one lane of one warp of one block ("I"); it is cheap to copy
// on a GPU (empty) and a handle to the fiber or thread on the host.
//
// Vocabulary: a block has num_warps() warps of kLanes lanes. kLanes is 32 on CUDA, 1 or 4 on the host:
// role code loops `for (i = a.lane(); i < n; i += A::kLanes)` and never assumes a width.
//
// Two views of shared memory, as on Hopper: ld_shared / st_shared go through the generic proxy,
// bulk_g2s / bulk_s2g through the async proxy. publish_shared() is the only bridge (per lane): what this
// lane read or wrote in shared memory before it is ordered before async-proxy accesses that are issued
// after the publishing lanes have synchronised with the issuing lane.
//
// Ordering is in the operation's name; there is no free-standing fence:
//   ld_acquire_sys / st_release_sys / add_release_sys  system scope, between ranks that map each other
//   st_release_sys_each / wait_ge_sys_each             the same for a group of flags, with one fence for all of it;
//                                                      add_release_sys_each likewise
//   st_release_sys_warp / wait_ge_sys_warp             the same by all lanes of a warp, which share the flags;
//                                                      acquire_ge_sys_warp likewise, without a fence
//   add_acq_rel_rank                                   between blocks of one rank (gpu scope)
//   add_acq_rel_sys                                    the same at system scope: the last speaks for all to other ranks
//   take_rank, count_rank                              the same scope, and they order nothing
//   st_line / ld_line                                  between ranks: a flag and the payload that lies beside it
//   mbar_arrive (release) / mbar_wait (acquire)        between lanes of one block (cta scope)
//   bulk_wait<0>() orders the completed stores before later releases BY THE SAME LANE; bulk groups belong
//   to the lane that committed them, so the lane that commits is the lane that waits.
//
// Every wait takes a WaitInfo and has the run's deadline. When it passes, the wait does not return: it
// ends the kernel with a TimeoutReport (host: exception; device: mapped memory and exit).
#pragma once
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "common/loop_step.h"
#include "common/numeric.h"
#include "common/role.h"
#include "common/timeout_report.h"
#include "layout/line.h"

namespace hep {

// 16 bytes, the unit of vector access to shared and global memory.
struct alignas(16) Vec16 {
  uint32_t w[4];
};

// What a role that only computes asks for: lanes that meet, and memory. What each does is said below, with the rest.
template <class A>
concept Lanes = requires(A a, const Vec16* vsrc, Vec16* vdst) {
  { A::kLanes } -> std::convertible_to<int>;
  { a.lane() } -> std::same_as<int>;
  { a.warp_idx() } -> std::same_as<int>;
  { a.num_warps() } -> std::same_as<int>;
  { a.warp_sync() };
  { a.block_sync() };
  { a.template ld_shared<Vec16>(vsrc) } -> std::same_as<Vec16>;
  { a.template st_shared<Vec16>(vdst, Vec16{}) };
  { a.template ld_global<Vec16>(vsrc) } -> std::same_as<Vec16>;
  { a.template st_global<Vec16>(vdst, Vec16{}) };
};

// For waits that nobody counts.
struct NotCounted {
  HEP_HOST_DEVICE uint64_t* operator()(int) const { return nullptr; }
};

template <class A>
concept Arch = requires(A a, typename A::Mbarrier& bar, void* dst, const void* src, const uint64_t* flag,
                        uint64_t* mut_flag, const Vec16* vsrc, Vec16* vdst, WaitInfo info, Line* line,
                        const uint64_t* (*flags)(int), uint64_t* (*mut_flags)(int), WaitInfo (*infos)(int)) {
  requires Lanes<A>;
  typename A::Mbarrier;  // lives in shared memory
  { A::kLanes } -> std::convertible_to<int>;

  // Who am I.
  { a.lane() } -> std::same_as<int>;
  { a.warp_idx() } -> std::same_as<int>;
  { a.num_warps() } -> std::same_as<int>;
  { a.block_idx() } -> std::same_as<int>;
  { a.num_blocks() } -> std::same_as<int>;
  { a.set_role(Role{}) };  // what timeout reports call this lane
  { a.did(LoopStep{}) };   // a round of a copy role's loop is over: what a machine with a clock charges for it

  // Convergence. elect_one: true on exactly one lane of the warp, the same one within a kernel but not necessarily
  // lane 0; converges the warp but orders no memory. warp_sync / group_sync / block_sync order memory of the lanes
  // taking part (cta scope). group_sync(id, n): named barrier of n warps; ids 1..15, an id belongs to one group of
  // warps for the whole kernel. A lane that returns early must not be missed at a later meeting of its warp.
  // Lanes of a warp that all wait on an mbarrier must meet before one of them does what lets the barrier complete
  // its next phase: a slow lane would be lapped and wait for ever.
  { a.elect_one() } -> std::same_as<bool>;
  { a.warp_sync() };
  { a.group_sync(int{}, int{}) };
  { a.block_sync() };
  // As warp_sync and block_sync, and whether every lane came. A lane whose wait did not return has left; without
  // asking, those that meet behind that wait take it for granted that it was over. All that meet get the same answer.
  // group_sync needs no asking: a warp that is not whole never arrives there.
  { a.warp_whole() } -> std::same_as<bool>;
  { a.warp_any(bool{}) } -> std::same_as<bool>;  // of all lanes of a warp, which meet as in elect_one
  { a.block_whole() } -> std::same_as<bool>;
  // Whether this rank was given up: a wait of its expired, or the host stopped it. Waits that are not over look for
  // themselves; a kernel asks when it starts (roles/enter.h). Lanes may differ in what they see.
  { a.given_up() } -> std::same_as<bool>;

  // Transaction barriers. A phase completes when `arrivals` arrivals AND all expected bytes are in.
  // mbar_wait(bar, parity) returns once the phase with that parity has completed (a fresh barrier is in
  // phase 0, so waiting for parity 1 on it passes at once). guards_refill declares a protocol fact: passing
  // this barrier licenses an async-proxy overwrite of the memory it stands for; checked executors refuse an
  // arrive on it while the arriving lane still has unpublished shared-memory accesses.
  { a.mbar_init(bar, uint32_t{}, bool{}) };  // arrivals, guards_refill; then block_sync
  { a.mbar_arrive(bar) };
  { a.mbar_arrive_expect_tx(bar, uint32_t{}) };  // announces bytes, then arrives
  { a.mbar_wait(bar, uint32_t{}, info) };
  { a.mbar_test(bar, uint32_t{}) } -> std::same_as<bool>;  // as mbar_wait, without waiting

  // Bulk copies (async proxy). Addresses and sizes are multiples of 16. Loads complete on `bar` at any
  // later time, in any order. Stores are grouped by bulk_commit; bulk_wait_read<N>: all but the newest N
  // groups of this lane have READ shared memory (the stage may be refilled); bulk_wait<N>: they are
  // complete, visible to whoever acquires a release made by this lane afterwards.
  { a.bulk_g2s(dst, src, uint32_t{}, bar) };
  { a.bulk_s2g(dst, src, uint32_t{}) };
  { a.bulk_commit() };
  { a.template bulk_wait_read<0>() };
  { a.template bulk_wait<0>() };
  { a.publish_shared() };

  // Generic-proxy accesses. T is a trivially copyable type of 1, 2, 4, 8 or 16 bytes, naturally aligned.
  { a.template ld_shared<Vec16>(vsrc) } -> std::same_as<Vec16>;
  { a.template st_shared<Vec16>(vdst, Vec16{}) };
  { a.template ld_global<Vec16>(vsrc) } -> std::same_as<Vec16>;
  { a.template st_global<Vec16>(vdst, Vec16{}) };

  // Flags. All are monotonic 64-bit counters; waiting is always "at least".
  { a.ld_acquire_sys(flag) } -> std::same_as<uint64_t>;
  { a.st_release_sys(mut_flag, uint64_t{}) };
  { a.add_release_sys(mut_flag, uint64_t{}) };
  { a.wait_ge_sys(flag, uint64_t{}, info) };  // acquires
  // Of n flags, each given by a function of its number 0..n-1. A system fence takes a microsecond: flags share one.
  // Flags are set in ascending order, but seen in any; the wait names the lowest that is missing.
  { a.st_release_sys_each(int{}, mut_flags, uint64_t{}) };
  { a.add_release_sys_each(int{}, mut_flags, static_cast<uint64_t (*)(int)>(nullptr)) };  // 0: nothing is done
  { a.wait_ge_sys_each(int{}, flags, uint64_t{}, infos) };
  { a.wait_ge_sys_each(int{}, flags, uint64_t{}, infos, mut_flags) };  // counts as wait_ge_sys_warp does
  // By all lanes of a warp, which come together first. What any of them did before is released; what any acquired is
  // everybody's. The wait says, as warp_whole does, whether every lane came back from it. To the counters that
  // `waited` gives (null: none) count_rank adds the nanoseconds from the first look that found a flag missing until
  // this one was there; one lane may look at several flags, one after the other, and finds the later ones there.
  { a.st_release_sys_warp(int{}, mut_flags, uint64_t{}) };
  { a.wait_ge_sys_warp(int{}, flags, uint64_t{}, infos) } -> std::same_as<bool>;
  { a.wait_ge_sys_warp(int{}, flags, uint64_t{}, infos, mut_flags) } -> std::same_as<bool>;
  // The same for a wait in a loop: every lane acquires what it looks at, in place of a fence, which waits for stores
  // that are on their way. A flag that is null is none; infos is asked of a flag behind it.
  // Where a lane has left in it, the others do.
  { a.acquire_ge_sys_warp(int{}, flags, uint64_t{}, infos) };
  // Whether roles are to look so where one lane might as well; the same for all of a kernel. May: known when it is
  // compiled.
  { A::kMayLookTogether } -> std::convertible_to<bool>;
  { a.looks_together() } -> std::same_as<bool>;
  { a.clock_ns() } -> std::same_as<uint64_t>;  // of waits that are counted by hand; 0 for ever on a machine without

  // Counters of one rank. What returns the old value costs the lane a round trip to memory; count_rank does not.
  { a.add_acq_rel_rank(mut_flag, uint64_t{}) } -> std::same_as<uint64_t>;
  { a.add_acq_rel_sys(mut_flag, uint64_t{}) } -> std::same_as<uint64_t>;
  { a.take_rank(mut_flag) } -> std::same_as<uint64_t>;  // adds 1: tickets for work that is visible already
  { a.count_rank(mut_flag, uint64_t{}) };               // sums that only the host reads

  // Lines (layout/line.h). By all lanes of a warp together: kLineLanes neighbours have a line, each kLineWords words
  // of it in order, those of the last the flag at their end (which st_line puts there); null: these lanes have none.
  // A line that is stored becomes visible later, in no order with anything else, but whole. ld_line says whether the
  // lines of all lanes have that very flag, to all lanes alike; if so their words are what was stored with it, and if
  // not, only the flag's is what was seen. Nothing is licensed by it but these words: who overwrites a line must know
  // by other means that it has been read.
  { A::kLineLanes } -> std::convertible_to<int>;
  { A::kLineWords } -> std::convertible_to<int>;
  { a.st_line(line, flag, uint64_t{}) };
  { a.ld_line(line, uint64_t{}, mut_flag) } -> std::same_as<bool>;

  // A role that polls several flags by hand calls this once per fruitless round, with what it waits for;
  // `since_progress` is the role's own token: reset it with poll_reset whenever something was found.
  { a.poll_idle(info, uint64_t{}, uint64_t{}) };  // expected, seen: for the timeout report
  { a.poll_reset() };
};

// Optional: an Arch with one lane whose shared memory is plain memory may offer arithmetic on whole tiles:
// `static void add_row(const TileRow&, float* acc)`. It must give the same bits as the vec8s of roles/slice_sum.h.
// Specialised where it is offered. kReadsRows: it also reads rows where they lie, so that stages hold addresses,
// `static void fetch(const unsigned char*, uint32_t bytes)` brings nearer what is to be read soon, and
// `static void add_rows(const TileRows&, uint32_t begin, const TileRow& sum)` forms elements [begin, begin + sum.n) of
// all those rows' unscaled sum in one go, where `static bool adds_rows(DType in, DType out)` says that it can.
template <class A>
struct TileMath {
  static constexpr bool kOffered = false, kReadsRows = false;
};

// Optional: an Arch with one lane whose shared memory is plain memory may offer a look through many keys at once:
// `static int64_t largest_below(const int64_t* key, int n, int64_t limit, int64_t flip)`, which gives what the loop of
// roles/warp_fold.h does. Specialised where it is offered.
template <class A>
struct KeyMath {
  static constexpr bool kOffered = false;
};

// Optional: a machine whose warps find the largest of their lanes' values by themselves:
// `static int64_t largest(int64_t mine)`, by all lanes of a warp; it orders no memory.
template <class A>
struct WarpMath {
  static constexpr bool kOffered = false;
};

// Optional: conversions of two elements of 16 bits, the first in the lower half of a word, where a machine has
// instructions for them. They must give the bits of common/numeric.h.
template <class A>
struct PairMath {
  template <class T>
  HEP_DEVICE static void widen(uint32_t word, float* v) {
    v[0] = to_float(T{uint16_t(word)});
    v[1] = to_float(T{uint16_t(word >> 16)});
  }
  template <class T>
  HEP_DEVICE static uint32_t round(float lower, float upper) {
    return from_float<T>(lower).bits | uint32_t(from_float<T>(upper).bits) << 16;
  }
};

// Rows of one sum. In place of some of them the sum has what they give as a part, rounded to their type.
struct TileRows {
  static constexpr uint32_t kMost = 16;
  enum Place : uint8_t { kAlone, kInPart, kEndsPart };

  const unsigned char* at[kMost];
  Place place[kMost];
  uint32_t n = 0;
};

// One row of a sum over tiles of n elements.
struct TileRow {
  const void* row;  // n elements of `in`; null = zeros, the only row of its sum
  void* out;        // n elements of `out_type`, written by the last row
  DType in, out_type;
  uint32_t n;
  bool first, last, scaled;
  float scale;

  // At most `most` elements of it, from element `begin` on.
  TileRow strip(uint32_t begin, uint32_t most) const {
    TileRow r = *this;
    if (row) r.row = static_cast<const unsigned char*>(row) + uint64_t(begin) * dtype_bytes(in);
    r.out = static_cast<unsigned char*>(out) + uint64_t(begin) * dtype_bytes(out_type);
    r.n = n - begin < most ? n - begin : most;
    return r;
  }
};

}  // namespace hep
