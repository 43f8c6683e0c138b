// This rank's tokens by logical expert, and, once clones are planned, where each of its pairs goes. Tokens are cut into
// runs, in order, one for each warp that counts ("walker") of each block, as in roles/route.h: who has counted what the
// walkers before him have knows the number of each of its tokens among those for an expert, and by that its slot. So
// no choice of a slot depends on the number of blocks or warps.
#pragma once
#include "roles/balance_params.h"
#include "roles/clone_instances.h"
#include "roles/clone_rows.h"

namespace hep {

template <Arch A>
class CloneRoutingRole {
 public:
  HEP_DEVICE CloneRoutingRole(A& arch, const BalanceParams& params, std::byte* shared)
      : p(params),
        a(arch),
        words_(reinterpret_cast<uint32_t*>(shared)),
        experts_(uint32_t(params.shape.num_experts)),
        width_(uint32_t(arch.num_warps() * A::kLanes)),
        me_(uint32_t(arch.warp_idx() * A::kLanes + arch.lane())) {}

  // The block's tokens; sums are in block_counts when all lanes have returned.
  HEP_DEVICE void count() {
    for (uint32_t i = me_; i < p.walkers * experts_; i += width_) a.st_shared(words_ + i, 0u);
    a.block_sync();
    walk([](uint32_t, uint64_t, uint32_t, uint32_t) {});
    a.block_sync();
    for (uint32_t e = me_; e < experts_; e += width_) {
      uint32_t sum = 0;
      for (uint32_t w = 0; w < p.walkers; ++w) {
        uint32_t* const counter = words_ + w * experts_ + e;
        const uint32_t n = a.ld_shared(counter);
        a.st_shared(counter, sum);
        sum += n;
      }
      a.st_global(p.block_counts + uint64_t(a.block_idx()) * experts_ + e, sum);
    }
  }
  // Behind the meeting of all blocks: where this block's walkers begin; with `vector`, to which this rank's counts are
  // to come, by the last block. The block must meet before either is read.
  HEP_DEVICE void begin_behind_other_blocks(uint32_t* vector) {
    for (uint32_t e = me_; e < experts_; e += width_) {
      uint32_t before = 0;
      for (int b = 0; b < a.block_idx(); ++b) before += of_block(b, e);
      for (uint32_t w = 0; before && w < p.walkers; ++w) {
        uint32_t* const begin = words_ + w * experts_ + e;
        a.st_shared(begin, a.ld_shared(begin) + before);
      }
      if (vector) a.st_global(vector + p.layout.experts_at() + e, before + of_block(a.block_idx(), e));
    }
  }
  // Behind that: where each of the block's pairs goes. links: of the clones, in shared memory.
  HEP_DEVICE void redirect(CloneLinks links) {
    if (p.routing_map) begin_rows();
    walk([&](uint32_t t, uint64_t cell, uint32_t expert, uint32_t number) {
      const int slot = clone_slot(a, links, p.share, int(expert), number);
      const int64_t at = slot < 0 ? a.ld_global(p.columns.columns + expert) : p.columns.of_slot(slot);
      if (p.topk_idx) {
        a.st_global(p.out_idx + cell, at);
      } else {
        if (slot >= 0 && p.out_columns) a.st_global(p.out_columns + cell, at);
        a.st_global(p.out_map + uint64_t(t) * p.num_columns() + uint64_t(at), uint8_t(1));
      }
    });
  }

 private:
  HEP_DEVICE uint32_t of_block(int block, uint32_t expert) {
    return a.ld_global(p.block_counts + uint64_t(block) * experts_ + expert);
  }
  struct Run {
    uint32_t begin, end;
  };
  HEP_DEVICE Run run() const {
    const uint64_t walker = uint64_t(a.block_idx()) * p.walkers + uint32_t(a.warp_idx());
    const uint64_t begin = uint32_t(a.warp_idx()) < p.walkers ? walker * p.run_tokens : p.num_tokens;
    const uint64_t end = begin + p.run_tokens;
    return {uint32_t(begin < p.num_tokens ? begin : p.num_tokens), uint32_t(end < p.num_tokens ? end : p.num_tokens)};
  }
  // Rows of the map without a choice, and columns of owners, of a walker's tokens.
  HEP_DEVICE void begin_rows() {
    const Run of = run();
    if (p.out_columns)
      repeat_row(a, p.out_columns + uint64_t(of.begin) * experts_, p.columns.columns, experts_, of.end - of.begin);
    clear_bytes(a, p.out_map, uint64_t(of.begin) * p.num_columns(), uint64_t(of.end) * p.num_columns());
    a.warp_sync();
  }
  // take(token, cell, expert, number): of every choice of an expert, with the number of tokens for it before this one.
  // Counters end behind the run.
  template <class Take>
  HEP_DEVICE void walk(const Take& take) {
    const Run of = run();
    const bool whole = experts_ % 8 == 0 && reinterpret_cast<uint64_t>(p.routing_map) % 8 == 0;
    uint32_t* const counters = words_ + uint32_t(a.warp_idx()) * experts_;
    for (uint32_t t = of.begin; t < of.end; ++t)
      p.topk_idx ? walk_choices(t, counters, take) : walk_row(t, counters, whole, take);
  }
  // A lane has eight experts for itself.
  template <class Take>
  HEP_DEVICE void walk_row(uint32_t t, uint32_t* counters, bool whole, const Take& take) {
    const uint64_t first = uint64_t(t) * experts_;
    for (uint32_t begin = 8 * uint32_t(a.lane()); begin < experts_; begin += 8 * A::kLanes) {
      uint64_t word = 0;
      if (whole)
        word = a.ld_global(reinterpret_cast<const uint64_t*>(p.routing_map + first + begin));
      else
        for (uint32_t i = 0; i < 8 && begin + i < experts_; ++i)
          word |= uint64_t(a.ld_global(p.routing_map + first + begin + i)) << (8 * i);
      for (uint32_t e = begin; word; word >>= 8, ++e) {
        if (!(word & 0xff)) continue;
        const uint32_t number = a.ld_shared(counters + e);
        take(t, first + e, e, number);
        a.st_shared(counters + e, number + 1);
      }
    }
  }
  // A lane has a choice, and an expert that is named twice counts once.
  template <class Take>
  HEP_DEVICE void walk_choices(uint32_t t, uint32_t* counters, const Take& take) {
    const uint64_t first = uint64_t(t) * p.topk;
    for (uint32_t k = uint32_t(a.lane()); k < p.topk; k += A::kLanes) {
      const int64_t e = a.ld_global(p.topk_idx + first + k);
      if (is_expert(e))
        take(t, first + k, uint32_t(e), a.ld_shared(counters + e));
      else if (p.out_idx)  // no choice stays none, and what is no expert names no slot either
        a.st_global(p.out_idx + first + k, e < 0 ? e : int64_t(p.num_columns()));
    }
    a.warp_sync();
    for (uint32_t k = uint32_t(a.lane()); k < p.topk; k += A::kLanes)
      if (const int64_t e = a.ld_global(p.topk_idx + first + k); is_expert(e) && !named_before(first, k, e))
        a.st_shared(counters + e, a.ld_shared(counters + e) + 1);
    a.warp_sync();
  }
  HEP_DEVICE bool is_expert(int64_t e) const { return e >= 0 && e < int64_t(experts_); }
  HEP_DEVICE bool named_before(uint64_t first, uint32_t k, int64_t expert) {
    for (uint32_t i = 0; i < k; ++i)
      if (a.ld_global(p.topk_idx + first + i) == expert) return true;
    return false;
  }

  const BalanceParams& p;
  A& a;
  uint32_t* const words_;
  const uint32_t experts_, width_, me_;
};

}  // namespace hep
