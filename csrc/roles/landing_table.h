// Where rows may be stored on each rank of the node, for a lane that stores them: read once an operation from what the
// ranks said beside their ready flags, then from shared memory. Loads of global memory on the way to every store would
// take the lane longer than all the rest of it.
#pragma once
#include "common/bugs.h"
#include "pipeline/stage_fifo.h"
#include "roles/params.h"

namespace hep {

// What a store needs of a rank's Landing, as addresses.
struct alignas(16) LandingOfRank {
  unsigned char *recv, *x, *scales;  // metadata entries of receive rows; row 0 of payloads and of scales
  uint32_t rows : 31, followed : 1;
  LandIn in;
};
static_assert(sizeof(LandingOfRank) == 32);

template <class A>
struct LandingTable {
  using Words = HeadWords<LandingOfRank>;
  static constexpr uint32_t kWords = sizeof(Words) / sizeof(Vec16);

  A& a;
  const DispatchParams& p;
  Vec16* const table;  // [L][kWords], shared memory

  // Of scatter warp `warp`, whose own it is.
  HEP_DEVICE LandingTable(A& arch, const DispatchParams& params, std::byte* smem, int warp)
      : a(arch),
        p(params),
        table(reinterpret_cast<Vec16*>(smem + params.landings_at) +
              uint32_t(warp * params.world.num_local_ranks) * kWords) {}

  // By all lanes of the warp, which have seen all ranks ready. False: a lane has left, for a rank means other rows.
  HEP_DEVICE bool read() const {
    const uint64_t epoch = p.gate.epoch();
    for (int l = a.lane(); l < p.world.num_local_ranks; l += A::kLanes) {
      const Landing said = p.gate.landing(a, uint32_t(l), epoch, p.message);
      unsigned char* const recv = p.peers.recv[l];
      const auto words = std::bit_cast<Words>(
          LandingOfRank{recv, p.peers.at(l, said.x), p.peers.at(l, said.scales), said.rows, said.followed, said.in});
      for (uint32_t i = 0; i < kWords; ++i) a.st_shared(table + uint32_t(l) * kWords + i, words.v[i]);
    }
    return a.warp_whole();
  }
  HEP_DEVICE LandingOfRank of(uint32_t local_rank) const {
    if (injected(Bug::kLandingOfAnother) && local_rank) --local_rank;
    Words words;
    for (uint32_t i = 0; i < kWords; ++i) words.v[i] = a.ld_shared(table + local_rank * kWords + i);
    return std::bit_cast<LandingOfRank>(words);
  }
};

}  // namespace hep
