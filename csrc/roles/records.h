// Records of this rank's own tokens, when placement has found where rows begin: by each block those of the tokens that
// it has counted.
#pragma once
#include "roles/exchange_share.h"

namespace hep {

template <class A>
struct RecordRole {
  A& a;
  const ExchangeParams& p;
  const PlaceParams& q;
  const ExchangeSmem smem;
  uint32_t* const words;
  const TokenShare share;

  HEP_DEVICE RecordRole(A& arch, const ExchangeParams& params, std::byte* shared)
      : a(arch),
        p(params),
        q(params.place),
        smem{params.layout, params.walkers},
        words(reinterpret_cast<uint32_t*>(shared)),
        share(TokenShare::of(arch, params)) {}

  // By all lanes of a block, a token each.
  HEP_DEVICE void run() {
    const uint32_t me = uint32_t(a.warp_idx() * A::kLanes + a.lane()), width = uint32_t(a.num_warps() * A::kLanes);
    for (uint32_t i = me; i < share.count; i += width)
      finish_token(share.begin + i, words + smem.of_walker(p.by_run.quotient(i)));
  }

 private:
  HEP_DEVICE uint32_t get(uint32_t word) const { return a.ld_shared(words + word); }

  // A pair of a token, with its positions among those of the walker.
  struct Pair {
    int32_t expert;
    uint32_t in_expert, in_rank;
  };
  HEP_DEVICE Pair load(uint64_t cell) const { return {p.pair_expert[cell], p.pair_pos[cell], p.row_pos[cell]}; }
  // One record for each node that the token goes to: its destination ranks and rows, its pairs and permuted rows.
  // begins: where the walker that counted the token begins in each column.
  HEP_DEVICE void finish_token(uint32_t t, const uint32_t* begins) {
    const uint64_t cells = uint64_t(t) * p.topk;
    const uint32_t L = uint32_t(p.world.num_local_ranks);
    uint32_t node = 0, rank = ~0u, first = 0, num_dsts = 0;
    bool kept = false;
    unsigned char* at = nullptr;  // the record that is being written
    Pair next = load(cells);
    for (uint32_t k = 0; next.expert >= 0; ++k) {
      const Pair pair = next;
      if (k + 1 < p.topk)
        next = load(cells + k + 1);  // on its way while this one is stored
      else
        next.expert = -1;
      const uint32_t expert = uint32_t(pair.expert), to = q.by_rank.quotient(expert);
      if (!at) {
        node = q.by_node.quotient(expert);
        first = k;
        num_dsts = 0;
        at = open(t, node, begins);
      }
      if (to != rank) {
        rank = to;
        const uint64_t row = uint64_t(get(smem.row_base_at() + rank)) + a.ld_shared(begins + rank) + pair.in_rank;
        kept = row < q.recv_capacity;
        if (kept) dsts(at)[num_dsts++] = {rank - node * L, uint32_t(row)};
      }
      const uint64_t row = uint64_t(get(smem.pair_base_at() + expert)) +
                           a.ld_shared(begins + smem.experts_at() + expert) + pair.in_expert;
      const uint32_t room = get(smem.room_at() + rank);
      pairs(at)[k - first] = {pair.expert,
                              kept && (room == ExchangeSmem::kUnlimited || row < room) ? int32_t(row) : -1};
      if (next.expert >= 0 && uint32_t(next.expert) < (node + 1) * q.experts_of_node) continue;
      close(at, num_dsts, k + 1 - first, first, t);
      at = nullptr;
    }
  }
  HEP_DEVICE static DstEntry* dsts(unsigned char* record) {
    return reinterpret_cast<DstEntry*>(record + MessageLayout::dsts_at());
  }
  HEP_DEVICE PairEntry* pairs(unsigned char* record) const { return reinterpret_cast<PairEntry*>(record + q.pairs_at); }
  // The token's record for a node, whose position among this rank's tokens for it becomes known.
  HEP_DEVICE unsigned char* open(uint32_t t, uint32_t n, const uint32_t* begins) {
    int32_t* pos = p.node_pos + uint64_t(t) * p.layout.num_nodes + n;
    const uint32_t j = uint32_t(*pos) + a.ld_shared(begins + smem.nodes_at() + n);
    *pos = int32_t(j);
    const uint64_t row = uint64_t(n) * p.num_tokens + j;
    p.node_tokens[row] = t;
    return q.record_base + row * q.record_bytes;
  }
  HEP_DEVICE void close(unsigned char* record, uint32_t num_dsts, uint32_t num_pairs, uint32_t first, uint32_t t) {
    *reinterpret_cast<RecordHeader*>(record) = {uint16_t(num_dsts), uint16_t(num_pairs), first, uint32_t(p.world.rank),
                                                t};
    for (uint32_t i = num_dsts; i < q.max_dsts; ++i) dsts(record)[i] = {0, 0};  // bytes that travel are never left over
    auto* end = reinterpret_cast<uint64_t*>(record + q.record_bytes);
    for (auto* v = reinterpret_cast<uint64_t*>(pairs(record) + num_pairs); v < end; ++v) *v = 0;
  }
};

}  // namespace hep
