// Count vectors of a latency dispatch: they travel as the headers of slabs, from every rank to every rank.
#pragma once
#include "roles/latency_params.h"

namespace hep {

// By all lanes of a block; each warp has ranks of its own.
template <Arch A>
struct LatencyCountsRole {
  A& a;
  const LatencyDispatchParams& p;
  const uint64_t flag;
  const LinePart<A> part;

  HEP_DEVICE LatencyCountsRole(A& arch, const LatencyDispatchParams& params, uint64_t step)
      : a(arch), p(params), flag(step), part(arch) {}

  // This rank's vector, which lies among the counts.
  HEP_DEVICE void send() {
    const uint64_t* own = vector(p.world.rank);
    each([&](int rank, uint32_t line, bool there) {
      uint64_t words[A::kLineWords] = {};
      part.each_word(line, [&](uint32_t i, uint32_t m) { words[i] = m < num_words() ? own[m] : 0; });
      a.st_line(there ? p.link.slab(flag, rank, p.world.rank) + line : nullptr, words, flag);
    });
    if (a.warp_idx() == 0 && a.lane() == 0)
      a.count_rank(&p.traffic->count_bytes, uint64_t(p.world.num_ranks() - 1) * num_lines() * sizeof(Line));
  }
  // All others'.
  HEP_DEVICE void receive() {
    each([&](int rank, uint32_t line, bool there) {
      uint64_t words[A::kLineWords];
      p.link.wait(a, there ? p.link.slab(flag, p.world.rank, rank) + line : nullptr, flag, words,
                  {Site::kLatencyHeader, rank, int64_t(line)});
      part.each_word(line, [&](uint32_t i, uint32_t m) {
        if (there && m < num_words()) a.st_global(vector(rank) + m, words[i]);
      });
    });
  }

 private:
  HEP_DEVICE uint32_t num_words() const { return uint32_t(p.route.layout.vector_bytes() / 8); }
  HEP_DEVICE uint32_t num_lines() const { return p.link.slabs.header_lines; }
  HEP_DEVICE uint64_t* vector(int rank) const {
    return reinterpret_cast<uint64_t*>(p.route.counts + p.route.parity_bytes() +
                                       uint64_t(rank) * p.route.layout.vector_bytes());
  }
  // Lines of this warp's ranks, those of each begun together; `there`: this lane has one.
  template <class F>
  HEP_DEVICE void each(F&& f) {
    const int ranks = p.world.num_ranks();
    for (int i = 1 + a.warp_idx(); i < ranks; i += a.num_warps())
      for (uint32_t first = 0; first < num_lines(); first += part.kAtOnce)
        f((p.world.rank + i) % ranks, first + part.group, first + part.group < num_lines());
  }
};

}  // namespace hep
