// Where a near construction puts a clone: on its owner's node while a rank there has room, then on nodes that hold the
// expert already, and on another, that with the most room, when there is no other way. For an expert goes to a node
// once, however many clones of it that node has, and over NICs that is what takes longest.
#pragma once
#include "roles/clone_tables.h"

namespace hep {

template <Lanes A>
struct CloneNearest {
  const CloneTables<A>& t;
  WarpFold<A>& fold;
  // Of the construction: keys of ranks as receivers [R], experts of clones [R][S], slots used [R]; where ranks are
  // levelled to.
  const int64_t* receivers;
  const int32_t *experts, *used;
  int64_t aim;

  // The key of the emptiest rank of the nearest kind that takes tokens of the donor's expert. A lane looks at a node.
  HEP_DEVICE int64_t receiver(int donor, int expert) const {
    const int local = t.shape.ranks_per_node(), home = donor / local * local;
    const int64_t here = fold.smallest(receivers + home, local);
    if (here != WarpFold<A>::kNever) return here;
    int64_t had = -1, roomiest = -1;  // of nodes that hold it the emptiest rank, upside down; the largest room
    for (int n = t.a.lane(); n < t.shape.num_nodes; n += A::kLanes) {
      int64_t room = 0, least = WarpFold<A>::kNever;
      bool holds = false;
      for (int r = n * local; r < (n + 1) * local; ++r) {
        holds = holds || is_on(r, expert);
        const int64_t key = t.a.ld_shared(receivers + r);
        if (key != WarpFold<A>::kNever) room += t.room(CloneKeys::load(key), aim);
        least = key < least ? key : least;
      }
      const int64_t upside_down = WarpFold<A>::kNever - least, key = CloneKeys::fullest(room, n);
      if (holds && room > 0 && upside_down > had) had = upside_down;
      if (room > 0 && key > roomiest) roomiest = key;
    }
    had = fold.largest(had);
    if (had >= 0) return WarpFold<A>::kNever - had;
    roomiest = fold.largest(roomiest);
    if (roomiest < 0) return WarpFold<A>::kNever;
    return fold.smallest(receivers + CloneKeys::fullest_rank(roomiest) * local, local);
  }
  HEP_DEVICE bool is_on(int rank, int expert) const {
    for (int i = rank * t.shape.spare_slots, end = i + t.a.ld_shared(used + rank); i < end; ++i)
      if (t.a.ld_shared(experts + i) == expert) return true;
    return false;
  }
};

}  // namespace hep
