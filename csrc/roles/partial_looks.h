// Looks at flags of partial rows by all lanes of a feed's warp, of which one sums. There is a flag for sixteen rows of
// a rank: of a node with many ranks nearly every row of a sum asks for one of its own, and a lane that looked at one
// after the other would wait for memory each time. So lanes look together at all that some tokens need, before these
// are summed: at payload and, where sums have them, at weights (RankRows::looked_at says of which ranks).
#pragma once
#include "common/bugs.h"
#include "roles/rank_rows.h"
#include "roles/record_window.h"

namespace hep {

template <Arch A>
struct PartialLooks {
  static constexpr uint32_t kMost = 8;  // records that are looked at together, a power of two

  A& a;
  const CombineParams& p;
  const RankRows<A>& ranks;

  // By the lane that sums: records that were opened, kMost at most, are next, if any; or it is through.
  HEP_DEVICE void say(const RecordWindow<A>& opened, bool any, bool through) const {
    const auto at = reinterpret_cast<uint64_t>(opened.next());
    a.st_shared(ranks.mail, Vec16{{uint32_t(at), uint32_t(at >> 32), any ? opened.to_come() : 0, through}});
  }
  // By all lanes, behind it: their partials are there, of ranks that form one of every row. False: it is through.
  HEP_DEVICE bool look() const {
    a.warp_sync();
    const Vec16 said = a.ld_shared(ranks.mail);
    const auto* const records = reinterpret_cast<const unsigned char*>(uint64_t(said.w[1]) << 32 | said.w[0]);
    const uint32_t n = said.w[2], with_weights = p.partial.weight_bytes != 0;
    DstEntry dst{};
    a.acquire_ge_sys_warp(
        int((most_dsts() * kMost) << with_weights),
        [&, this](int i) -> const uint64_t* {
          const uint32_t j = uint32_t(i) % kMost, of_record = uint32_t(i) / kMost;
          if (j + injected(Bug::kLookLeavesOneOut) >= n || injected(Bug::kPartialsUnawaited)) return nullptr;
          const auto part = PartialFlags::Part(of_record & with_weights);
          return wanted(part, records + j * p.record_bytes, of_record >> with_weights, dst);
        },
        p.gate.epoch(),
        [&, this](int) {
          return WaitInfo{Site::kPartialRows, p.world.rank_of(p.world.node(), int(dst.local_rank)), group_of(dst)};
        });
    return !said.w[3];
  }

 private:
  HEP_DEVICE uint32_t most_dsts() const { return (p.pairs_at - MessageLayout::dsts_at()) / 8; }
  HEP_DEVICE static int64_t group_of(const DstEntry& dst) { return dst.row / BufferLayout::kGroupRows; }
  // The flag of a part of the record's i-th destination, null: there is none to wait for.
  HEP_DEVICE const uint64_t* wanted(PartialFlags::Part part, const unsigned char* record, uint32_t i,
                                    DstEntry& dst) const {
    const auto rec = std::bit_cast<RecordHeader>(a.ld_global(reinterpret_cast<const Vec16*>(record)));
    dst =
        std::bit_cast<DstEntry>(a.ld_global(reinterpret_cast<const uint64_t*>(record + MessageLayout::dsts_at()) + i));
    if (i >= rec.num_dsts || !ranks.looked_at(part, dst.local_rank)) return nullptr;
    return p.partials.flag(part, dst.local_rank, uint32_t(group_of(dst)));
  }
};

}  // namespace hep
