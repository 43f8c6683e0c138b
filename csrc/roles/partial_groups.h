// Which groups of receive rows a worker of a combine forms partials of, in their readers' order, who are told of each
// (pipeline/partial_flags.h).
#pragma once
#include "common/bugs.h"
#include "roles/group_walk.h"
#include "roles/params.h"

namespace hep {

template <Arch A>
struct PartialGroups {
  A& a;
  const CombineParams& p;
  const uint32_t* begins;  // see GroupWalk
  const uint32_t rows;

  HEP_DEVICE PartialGroups(A& arch, const CombineParams& params, const std::byte* smem)
      : a(arch),
        p(params),
        begins(reinterpret_cast<const uint32_t*>(smem + params.source_begins_at)),
        rows(params.plan.numbers->recv_rows) {}

  template <class F>
  HEP_DEVICE void each(uint32_t worker, uint32_t workers, F&& f) const {
    GroupWalk<A>{a, begins, uint32_t(p.world.num_ranks()), worker, workers}.template run<true>(f);
  }
  HEP_DEVICE uint32_t end_of(uint32_t group) const {
    const uint32_t end = (group + 1) * BufferLayout::kGroupRows;
    return end < rows ? end : rows;
  }
  // Its part is written. Readers are the sources' rail peers here: those of all that have a row of it. None behind
  // `source` has.
  HEP_DEVICE void tell(PartialFlags::Part part, uint32_t group, uint32_t source, uint64_t epoch) const {
    const uint32_t end = end_of(group), last = uint32_t(p.world.num_ranks()) - 1;
    while (source > 0 && a.ld_shared(begins + source) > group * BufferLayout::kGroupRows) --source;  // of the first row
    uint32_t s = source;
    while (s < last && a.ld_shared(begins + s + 1) < end && !injected(Bug::kPartialsToOneReader)) ++s;
    const int readers = int(s - source) + 1, most = p.world.num_local_ranks;
    p.partials.tell(a, part, group, source, readers < most ? readers : most, epoch);
  }
};

}  // namespace hep
