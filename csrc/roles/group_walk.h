// Which groups of receive rows a worker has, and in which order. All sources send their tokens at once, each in order,
// and all of them read their sums so: a worker goes through all sources side by side, and groups of one source go to
// workers in turn.
#pragma once
#include "roles/params.h"

namespace hep {

template <Arch A>
struct GroupWalk {
  A& a;
  const uint32_t* begins;  // shared memory: the first receive row of each source, the end, the most groups of a source
  uint32_t num_sources, worker, num_workers;

  // Bytes of `begins`.
  static uint64_t bytes(uint64_t num_sources) { return align_up(4 * (num_sources + 2), 128); }
  // By one warp, before the block meets. source_rows: before the receive rows were cut to `rows`.
  HEP_DEVICE static void begin(A& a, uint32_t* begins, const uint32_t* source_rows, uint32_t num_sources,
                               uint32_t rows) {
    for (uint32_t s = uint32_t(a.lane()); s < num_sources; s += A::kLanes) a.st_shared(begins + s, source_rows[s]);
    a.warp_sync();
    if (a.lane() != 0) return;
    uint32_t begin = 0, most = 0;
    for (uint32_t s = 0; s < num_sources; ++s) {
      const uint32_t n = a.ld_shared(begins + s), left = rows - begin;
      a.st_shared(begins + s, begin);
      const uint32_t before = begin / BufferLayout::kGroupRows;
      begin += n < left ? n : left;
      most = first_group(begin) - before > most ? first_group(begin) - before : most;
    }
    a.st_shared(begins + num_sources, begin);
    a.st_shared(begins + num_sources + 1, most);
  }
  // f(group, source): every group of receive rows once over all workers. A group that several sources share is the last
  // of the first of them, for whoever waits until all its rows are there; with kSharedFirst the first of the last, for
  // who is waited for by all that read one of its rows.
  template <bool kSharedFirst = false, class F>
  HEP_DEVICE void run(F&& f) const {
    const auto first = [&](uint32_t s) {
      const uint32_t row = a.ld_shared(begins + s);
      return kSharedFirst && s < num_sources ? row / BufferLayout::kGroupRows : first_group(row);
    };
    // The k-th group of source s is that of worker k + s * apart: at any time the newest of all sources have many
    // owners. A worker has them in the order in which they come: k ascends. Of more sources than workers it has the
    // k-th of every num_workers-th.
    const uint32_t apart = num_workers > num_sources ? num_workers / num_sources : 1;
    const uint32_t kinds = num_workers < num_sources ? num_workers : num_sources;
    uint32_t s = worker / apart < kinds ? worker / apart : kinds - 1, k = worker - s * apart;
    while (k < a.ld_shared(begins + num_sources + 1)) {
      if (const uint32_t group = first(s) + k; group < first(s + 1)) f(group, s);
      s += kinds;
      if (s < num_sources) continue;
      s = (s + kinds - 1) % kinds;
      const uint32_t last = k % num_workers, next = (worker + num_workers - s * apart) % num_workers;
      k += next - last + (next > last ? 0 : num_workers);
    }
  }

 private:
  // The first that begins at or behind this row.
  HEP_DEVICE static uint32_t first_group(uint32_t row) { return uint32_t(div_up(row, BufferLayout::kGroupRows)); }
};

}  // namespace hep
