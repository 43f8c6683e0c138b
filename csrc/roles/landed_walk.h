// Which groups of receive rows a worker follows, and in which order. All sources send at once, and each in the order of
// its rows: so a worker goes through all sources side by side, and groups of one source go to workers in turn.
#pragma once
#include "roles/params.h"

namespace hep {

template <Arch A>
struct LandedWalk {
  A& a;
  uint32_t* begins;  // [num_sources + 1], shared memory: the first receive row of each source, and the end
  uint32_t num_sources, worker, num_workers;

  // By one lane. f(group), every group of `rows` receive rows once over all workers.
  template <class F>
  HEP_DEVICE void run(const uint32_t* source_rows, uint32_t rows, F&& f) {
    uint32_t most = 0, begin = 0;  // groups of a source
    for (uint32_t s = 0; s < num_sources; ++s) {
      a.st_shared(begins + s, begin);
      const uint32_t left = rows - begin, n = source_rows[s] < left ? source_rows[s] : left, end = begin + n;
      const uint32_t groups = first_group(end) - first_group(begin);
      most = groups > most ? groups : most;
      begin = end;
    }
    a.st_shared(begins + num_sources, begin);
    // The k-th group of source s is that of worker k + s * apart: at any time the newest of all sources have many
    // owners.
    const uint32_t apart = num_workers > num_sources ? num_workers / num_sources : 1;
    const uint32_t start = worker / apart < num_sources ? worker / apart : num_sources - 1;
    for (uint32_t round = 0; round < most; round += num_workers)
      for (uint32_t i = 0; i < num_sources; ++i) {  // in the order in which they come
        const uint32_t s = (start + num_sources - i) % num_sources;
        const uint32_t k = round + (worker + num_workers - s * apart % num_workers) % num_workers;
        const uint32_t group = first_group(a.ld_shared(begins + s)) + k;
        if (group < first_group(a.ld_shared(begins + s + 1))) f(group);
      }
  }

 private:
  // The first that begins at or behind this row.
  HEP_DEVICE static uint32_t first_group(uint32_t row) { return uint32_t(div_up(row, LandedRows::kRows)); }
};

}  // namespace hep
