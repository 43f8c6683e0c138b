// Latency dispatch, the sending half: every token's message, in lines, into the slab of this rank on each rank that has
// an expert of it. It waits for nobody. Where the plan is being made nobody knows rows yet: a pair travels with its
// position among this rank's pairs for the expert, and the slot is the token's position among those for the rank. With
// a plan that is complete records travel as they are, and the slot is the token's number, which receivers have in
// theirs.
#pragma once
#include <bit>

#include "common/bugs.h"
#include "roles/exchange_share.h"
#include "roles/latency_params.h"

namespace hep {

// A token that this block has counted.
template <Arch A>
struct CountedToken {
  A& a;
  const LatencyDispatchParams& p;
  const ExchangeSmem smem;
  const uint32_t t;
  const uint32_t* begins;  // of the walker that counted it
  uint32_t num_pairs = 0;

  HEP_DEVICE CountedToken(A& arch, const LatencyDispatchParams& params, const ExchangeSmem& shared, uint32_t token,
                          const uint32_t* walker)
      : a(arch), p(params), smem(shared), t(token), begins(walker) {
    while (num_pairs < p.route.topk && expert(num_pairs) >= 0) ++num_pairs;
  }
  HEP_DEVICE uint64_t record_word(uint32_t m) const {
    if (m == 0) return uint64_t(num_pairs) << 16;  // where else it went is this rank's affair; first_pair is 0
    if (m == 1) return uint64_t(t) << 32 | uint32_t(p.world.rank);
    const uint32_t k = m - p.message.pairs_at() / 8;  // of the words before: a very large number
    if (k >= num_pairs) return 0;
    const uint32_t position = p.route.pair_pos[cell(k)] + a.ld_shared(begins + smem.experts_at() + uint32_t(expert(k)));
    return uint64_t(position) << 32 | uint32_t(expert(k));
  }
  template <class F>
  HEP_DEVICE void each_dst(F&& f) const {
    uint32_t rank = ~0u;
    for (uint32_t k = 0; k < num_pairs; ++k) {
      const uint32_t to = p.route.place.by_rank.quotient(uint32_t(expert(k)));
      if (to == rank) continue;
      rank = to;
      f(rank, a.ld_shared(begins + rank) + p.route.row_pos[cell(k)]);
    }
  }

 private:
  HEP_DEVICE uint64_t cell(uint32_t k) const { return uint64_t(t) * p.route.topk + k; }
  HEP_DEVICE int32_t expert(uint32_t k) const { return p.route.pair_expert[cell(k)]; }
};

// A token of a complete plan.
struct RecordedToken {
  const uint64_t* record;
  uint32_t t;

  HEP_DEVICE uint64_t record_word(uint32_t m) const { return record[m]; }
  template <class F>
  HEP_DEVICE void each_dst(F&& f) const {
    const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at() / 8);
    const uint32_t n = std::bit_cast<RecordHeader>(*reinterpret_cast<const Vec16*>(record)).num_dsts;
    for (uint32_t i = 0; i < n; ++i) f(dsts[i].local_rank, t);
  }
};

template <Arch A>
struct LatencySendRole {
  A& a;
  const LatencyDispatchParams& p;
  const uint64_t flag;
  const LinePart<A> part;
  LineTraffic traffic;

  HEP_DEVICE LatencySendRole(A& arch, const LatencyDispatchParams& params, uint64_t step)
      : a(arch), p(params), flag(step), part(arch) {}

  // Its lines [first, n), by all lanes of a warp.
  template <class Token>
  HEP_DEVICE void send(const Token& token, uint32_t first, uint32_t n) {
    if (first == 0) token.each_dst([&](uint32_t rank, uint32_t) { traffic.add(int(rank) == p.world.rank); });
    for (uint32_t line = first + part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      load(token, line, words);
      token.each_dst([&](uint32_t rank, uint32_t slot) {
        a.st_line(line < n ? p.link.slot(flag, int(rank), p.world.rank, slot) + line : nullptr, words, flag);
      });
    }
  }
  HEP_DEVICE void report() { traffic.report(a, p.traffic, p.lines()); }

 private:
  // Most lines hold payload alone.
  template <class Token>
  HEP_DEVICE void load(const Token& token, uint32_t line, uint64_t (&words)[A::kLineWords]) {
    const uint32_t m = part.word(line), payload = p.message.payload_at() / 8, end = p.message.token_bytes() / 8;
    if (m < payload || m + A::kLineWords > end)
      return part.each_word(line, [&](uint32_t i, uint32_t at) { words[i] = word(token, at); });
    const auto* from = reinterpret_cast<const uint64_t*>(p.x + uint64_t(token.t) * p.message.row_bytes) + (m - payload);
    HEP_UNROLL
    for (int i = 0; i < A::kLineWords; ++i) words[i] = a.ld_global(from + i);
  }
  // The m-th of the token's message; zeros behind its end.
  template <class Token>
  HEP_DEVICE uint64_t word(const Token& token, uint32_t m) const {
    const MessageLayout& l = p.message;
    const auto at = [&](const unsigned char* row, uint32_t i) {
      return a.ld_global(reinterpret_cast<const uint64_t*>(row) + i);
    };
    const uint32_t payload = l.payload_at() / 8, scales = l.scales_at() / 8, weights = l.weights_at() / 8;
    if (m >= l.token_bytes() / 8) return 0;
    if (m >= payload) return at(p.x + uint64_t(token.t) * l.row_bytes, m - payload);
    if (m >= scales) return at(p.scales + uint64_t(token.t) * l.scale_bytes, m - scales);
    if (m < weights) return token.record_word(m);
    return at(reinterpret_cast<const unsigned char*>(p.weights + uint64_t(token.t) * p.plan.weight_stride),
              m - weights);
  }
};

}  // namespace hep
