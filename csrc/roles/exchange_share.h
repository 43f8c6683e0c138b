// What a block of an exchange has: words of shared memory, and its share of the tokens.
#pragma once
#include "arch/concept.h"
#include "roles/exchange_params.h"

namespace hep {

// Shared memory of an exchange, in words.
struct ExchangeSmem {
  static constexpr uint32_t kUnlimited = ~0u;  // room of a rank

  CountsLayout layout;
  uint32_t walkers;

  HEP_HOST_DEVICE uint32_t columns() const { return layout.num_ranks + layout.num_nodes + layout.num_experts; }
  // Counters of a walker, later where it begins: [R], [N], [E].
  HEP_HOST_DEVICE uint32_t of_walker(uint32_t w) const { return w * columns(); }
  HEP_HOST_DEVICE uint32_t nodes_at() const { return layout.num_ranks; }
  HEP_HOST_DEVICE uint32_t experts_at() const { return layout.num_ranks + layout.num_nodes; }
  // What placement finds: permuted rows that a rank has room for, receive rows of a rank [R] and where those of this
  // source begin; pairs of an expert [E], and the permuted row where those of this source begin.
  HEP_HOST_DEVICE uint32_t room_at() const { return walkers * columns(); }
  HEP_HOST_DEVICE uint32_t rank_rows_at() const { return room_at() + layout.num_ranks; }
  HEP_HOST_DEVICE uint32_t row_base_at() const { return rank_rows_at() + layout.num_ranks; }
  HEP_HOST_DEVICE uint32_t expert_pairs_at() const { return row_base_at() + layout.num_ranks; }
  HEP_HOST_DEVICE uint32_t pair_base_at() const { return expert_pairs_at() + layout.num_experts; }
  HEP_HOST_DEVICE uint64_t bytes() const { return 4ull * (pair_base_at() + layout.num_experts); }
};

// The tokens that a block counts, and whose records it finishes.
struct TokenShare {
  uint32_t begin, count;

  template <class A>
  HEP_DEVICE static TokenShare of(A& a, const ExchangeParams& p) {
    const uint32_t most = p.walkers * p.run_tokens, begin = uint32_t(a.block_idx()) * most;
    return {begin, begin >= p.num_tokens ? 0 : p.num_tokens - begin < most ? p.num_tokens - begin : most};
  }
};

}  // namespace hep
