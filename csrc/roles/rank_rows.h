// What the ranks of this node say of their rows in a combine (layout/reading.h), in a feed's shared memory.
#pragma once
#include "pipeline/stage_fifo.h"
#include "roles/params.h"

namespace hep {

struct alignas(16) RowsOfRank {
  const unsigned char* x;  // row 0 of its outputs, as mapped here
  const unsigned char* partials;
  SumFrom from;
  uint32_t rows, unused[2];
};

template <Arch A>
struct RankRows {
  using Words = HeadWords<RowsOfRank>;
  static constexpr uint32_t kWords = sizeof(Words) / sizeof(Vec16);
  static constexpr uint32_t kNever = 1u << 31;

  A& a;
  const CombineParams& p;
  Vec16* const mail;   // of the feed's own
  Vec16* const ranks;  // [L] RowsOfRank
  // [PartialFlags::kParts][L]: 1 + the group of each rank's partials that was waited for last; 0 = none yet, kNever =
  // there will be none: its rows are of another type or size than this rank's.
  uint32_t* const seen;

  HEP_DEVICE RankRows(A& arch, const CombineParams& params, std::byte* smem, int feed)
      : a(arch),
        p(params),
        mail(reinterpret_cast<Vec16*>(smem + params.node_rows_at[feed])),
        ranks(mail + 1),
        seen(reinterpret_cast<uint32_t*>(ranks + kWords * uint32_t(params.world.num_local_ranks))) {}

  HEP_HOST_DEVICE static uint64_t bytes(const CombineParams& p) {
    return align_up((sizeof(RowsOfRank) + 8) * uint64_t(p.world.num_local_ranks) + sizeof(Vec16), 128);
  }
  // By all lanes of the feed's warp, or by one, which then have seen all ranks ready in `epoch`.
  template <bool kTogether>
  HEP_DEVICE void read(uint64_t epoch) const {
    for (int l = kTogether ? a.lane() : 0; l < p.world.num_local_ranks; l += kTogether ? A::kLanes : 1) {
      const auto said = p.gate.template said<Reading>(a, uint32_t(l));
      const bool here = said.is_of(epoch), meant = here && said.means_rows_of(p.reading);
      // Of rows that will never be there, none lies where it could be read, nor is a partial promised.
      const SumFrom from = meant ? said.from : here ? SumFrom::kReceiveRow : SumFrom::kPartials;
      const auto words =
          std::bit_cast<Words>(RowsOfRank{p.peers.at(l, said.x), p.peers.recv[l], from, meant ? said.rows : 0, {}});
      for (uint32_t i = 0; i < kWords; ++i) a.st_shared(ranks + uint32_t(l) * kWords + i, words.v[i]);
      for (const auto part : {PartialFlags::kPayload, PartialFlags::kWeights})
        a.st_shared(groups(part) + l, here && !meant ? kNever : 0u);
    }
  }
  HEP_DEVICE uint32_t* groups(PartialFlags::Part part) const {
    return seen + uint32_t(part) * uint32_t(p.world.num_local_ranks);
  }
  // Whether lanes look at this rank's flags together (roles/partial_looks.h). Its weights: unless it will never tell of
  // them. Its payload: if it forms a partial of every row; where rows are read in place, few have one.
  HEP_DEVICE bool looked_at(PartialFlags::Part part, uint32_t l) const {
    if (part == PartialFlags::kWeights) return !(a.ld_shared(groups(part) + l) & kNever);
    return said_by(l).from == SumFrom::kPartials;
  }
  HEP_DEVICE RowsOfRank said_by(uint32_t l) const {
    Words words;
    for (uint32_t i = 0; i < kWords; ++i) words.v[i] = a.ld_shared(ranks + l * kWords + i);
    return std::bit_cast<RowsOfRank>(words);
  }
};

}  // namespace hep
