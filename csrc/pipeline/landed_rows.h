// What has landed: a counter for every kGroupRows receive rows of a rank. Whoever stores rows on a rank of its node
// adds to its counters when the stores are complete, so that local work follows the links and waits for no more rows
// than it needs.
//
// Ordering. The lane that stored adds (add_release_sys_each, behind bulk_wait<0>), the lane that waits acquires: rows
// and metadata of the group may be read behind it. Counters only grow; `before` is what the operations before this one
// have brought, kept by the lane that waits. Rows of another operation cannot come between: nobody stores before ready.
#pragma once
#include <bit>
#include <cstdint>

#include "arch/concept.h"
#include "common/bugs.h"
#include "layout/buffer.h"

namespace hep {

// The counters of this rank.
struct LandedRows {
  const uint64_t* counters;  // in this rank's segment, written by its node
  uint64_t* before;          // rank-private

  // Group `group`, of which `stores` stores are to come, a tile of a row each. Of take and await one succeeds once an
  // operation for each group. Has all come? Then it is taken.
  template <class A>
  HEP_DEVICE bool take(A& a, uint32_t group, uint32_t stores) const {
    const uint64_t all = before[group] + stores;
    if (!injected(Bug::kLandedUnawaited) &&
        a.ld_acquire_sys(counters + group) < all - injected(Bug::kLandedOneRowEarly))
      return false;
    settle(group, all);
    return true;
  }
  // Names no rank: the count does not say whose rows are missing.
  template <class A>
  HEP_DEVICE void await(A& a, uint32_t group, uint32_t stores) const {
    const uint64_t all = before[group] + stores;
    if (!injected(Bug::kLandedUnawaited))
      a.wait_ge_sys(counters + group, all - injected(Bug::kLandedOneRowEarly), {Site::kRowsLanded, -1, int64_t(group)});
    settle(group, all);
  }

 private:
  HEP_DEVICE void settle(uint32_t group, uint64_t all) const {
    if (!injected(Bug::kLandedNotSettled)) before[group] = all;
  }
};

// Of a lane that stores rows: how many it has stored on each rank of its node and not told. In shared memory.
struct alignas(16) UntoldRows {
  uint32_t group, here, next, unused;  // stores into this group of rows, and into the next
};

// What is collected spans two groups of a rank at most: rows of one source ascend with its tokens, so kGroupRows tokens
// of a chunk do. The caller sees to it.
template <Arch A>
struct LandedTally {
  A& a;
  unsigned char* const* recv;  // [L] receive regions
  uint64_t counters_below;     // bytes from a rank's counters to its receive region
  Vec16* untold;               // [L], shared memory
  int num_local_ranks;
  bool any = false;

  HEP_DEVICE void clear() {
    for (int l = 0; l < num_local_ranks; ++l) a.st_shared(untold + l, Vec16{});
    any = false;
  }
  HEP_DEVICE void add(uint32_t local_rank, uint32_t row) {
    auto u = std::bit_cast<UntoldRows>(a.ld_shared(untold + local_rank));
    const uint32_t group = row / BufferLayout::kGroupRows;
    if (!u.here) u = {group, 0, 0, 0};
    ++(group == u.group ? u.here : u.next);
    a.st_shared(untold + local_rank, std::bit_cast<Vec16>(u));
    any = true;
  }
  // The stores are complete.
  HEP_DEVICE void tell() {
    const auto get = [&](int i) { return std::bit_cast<UntoldRows>(a.ld_shared(untold + i / 2)); };
    a.add_release_sys_each(
        2 * num_local_ranks,
        [&](int i) {
          auto* counters = reinterpret_cast<uint64_t*>(recv[i / 2] - counters_below);
          return counters + get(i).group + uint32_t(i & 1);
        },
        [&](int i) { return uint64_t(i & 1 ? get(i).next : get(i).here); });
    clear();
  }
};

}  // namespace hep
