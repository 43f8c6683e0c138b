// Which of a rank's partial rows are there. A rank tells it group by group, to those of its node who read them: then
// the sums of the links follow the experts' rows as they are added up, and nobody waits for a whole rank.
//
// A rank has a flag for every group of kGroupRows receive rows of every rank of its node, and two of them: payload and
// weights are written by different warps. A flag is the epoch of the operation that wrote the rows, so it is never
// reset and no operation's is mistaken for another's: whoever reads a group in operation e has not announced that he is
// done, and the group's owner does not leave e before he has.
//
// Ordering. All lanes that wrote rows of a group are complete (bulk_wait<0>) and have met before one of them releases;
// the reader's lane acquires, and loads behind that.
#pragma once
#include <cstdint>

#include "arch/concept.h"
#include "common/bugs.h"
#include "common/world.h"
#include "layout/buffer.h"

namespace hep {

struct PartialFlags {
  enum Part : uint32_t { kPayload, kWeights, kParts };

  World world;
  const uint64_t* flags;       // [kParts][L][groups] in this rank's segment, entry l written by local rank l
  unsigned char* const* recv;  // [L] receive regions
  uint64_t below;              // bytes from a rank's flags to its receive region
  uint32_t groups;             // of a rank

  HEP_DEVICE const uint64_t* flag(Part part, uint32_t owner, uint32_t group) const {
    return flags + at(part, owner, group);
  }
  // By the owner of the group: its `part` may be read by the local ranks first, first + 1, ... (round the node), n in
  // all, in operation `epoch`.
  template <class A>
  HEP_DEVICE void tell(A& a, Part part, uint32_t group, uint32_t first, int n, uint64_t epoch) const {
    const uint64_t mine = at(part, uint32_t(world.local_rank()), group);
    a.st_release_sys_each(
        n,
        [=, this](int i) {
          const uint32_t l = (first + uint32_t(i)) % uint32_t(world.num_local_ranks);
          return reinterpret_cast<uint64_t*>(recv[l] - below) + mine;
        },
        epoch);
  }
  // By the lane that reads rows of the group. Many groups at once: roles/partial_looks.h.
  template <class A>
  HEP_DEVICE void await(A& a, Part part, uint32_t owner, uint32_t group, uint64_t epoch) const {
    if (injected(Bug::kPartialsUnawaited)) return;
    const int rank = world.rank_of(world.node(), int(owner));
    a.wait_ge_sys(flag(part, owner, group), epoch, {Site::kPartialRows, rank, int64_t(group)});
  }

 private:
  HEP_DEVICE uint64_t at(Part part, uint32_t owner, uint32_t group) const {
    return (uint64_t(part) * uint32_t(world.num_local_ranks) + owner) * groups + group;
  }
};

}  // namespace hep
