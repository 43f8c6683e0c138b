// Latency dispatch, the sending half: a token's message, its words loaded once, in lines to the slab of this rank at
// every rank of the node that needs it; and as plain bytes, with a signal, to the rail peer on every other node that
// does, which hands it on there (roles/latency_forward.h). Nothing is waited for.
#pragma once
#include "roles/latency_tokens.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct LatencySendRole {
  A& a;
  Net& net;
  const LatencyDispatchParams& p;
  const uint64_t flag;
  const LinePart<A> part;
  LineTraffic traffic;

  HEP_DEVICE LatencySendRole(A& arch, Net& n, const LatencyDispatchParams& params, uint64_t step)
      : a(arch), net(n), p(params), flag(step), part(arch) {}

  // Its lines [first, n), for the node that the token stands at, by all lanes of a warp.
  template <class Token>
  HEP_DEVICE void send(const Token& token, uint32_t first, uint32_t n) {
    if constexpr (kHasRail<Net>)
      if (int(token.node) != p.world.node()) return to_rail(token, first, n);
    to_node(token, first, n);
  }
  HEP_DEVICE void report() { traffic.report(a, p.traffic, p.lines(), p.message.token_bytes()); }

 private:
  template <class Token>
  HEP_DEVICE void to_node(const Token& token, uint32_t first, uint32_t n) {
    if (first == 0)
      token.each_dst([&](uint32_t local, uint32_t) { traffic.add(int(local) == p.link.template own<Net>()); });
    for (uint32_t line = first + part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      load(token, line, false, words);
      token.each_dst([&](uint32_t local, uint32_t slot) {
        a.st_line(line < n ? p.link.slot(flag, int(local), p.world.rank, slot) + line : nullptr, words, flag);
      });
    }
  }
  template <class Token>
  HEP_DEVICE void to_rail(const Token& token, uint32_t first, uint32_t n) {
    const uint32_t all = p.message.token_bytes() / 8, index = token.position();
    if (first == 0) ++traffic.rail_rows;
    auto* to = reinterpret_cast<uint64_t*>(p.link.rail.token(net, flag, int(token.node), index));
    for (uint32_t line = first + part.group; line < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      load(token, line, true, words);
      part.each_word(line, [&](uint32_t i, uint32_t m) {
        if (m < all) a.st_global(to + m, words[i]);
      });
    }
    p.link.rail.send_token(a, net, flag, int(token.node), index, LinePart<A>::words(first, n, all), all);
  }
  // Most lines hold payload alone.
  template <class Token>
  HEP_DEVICE void load(const Token& token, uint32_t line, bool with_dsts, uint64_t (&words)[A::kLineWords]) {
    const uint32_t m = part.word(line), payload = p.message.payload_at() / 8, end = p.message.token_bytes() / 8;
    if (m < payload || m + A::kLineWords > end)
      return part.each_word(line, [&](uint32_t i, uint32_t at) { words[i] = word(token, at, with_dsts); });
    const auto* from = reinterpret_cast<const uint64_t*>(p.x + uint64_t(token.t) * p.message.row_bytes) + (m - payload);
    HEP_UNROLL
    for (int i = 0; i < A::kLineWords; ++i) words[i] = a.ld_global(from + i);
  }
  // The m-th of the token's message; zeros behind its end.
  template <class Token>
  HEP_DEVICE uint64_t word(const Token& token, uint32_t m, bool with_dsts) const {
    const MessageLayout& l = p.message;
    const auto at = [&](const unsigned char* row, uint32_t i) {
      return a.ld_global(reinterpret_cast<const uint64_t*>(row) + i);
    };
    const uint32_t payload = l.payload_at() / 8, scales = l.scales_at() / 8, weights = l.weights_at() / 8;
    if (m >= l.token_bytes() / 8) return 0;
    if (m >= payload) return at(p.x + uint64_t(token.t) * l.row_bytes, m - payload);
    if (m >= scales) return at(p.scales + uint64_t(token.t) * l.scale_bytes, m - scales);
    if (m < weights) return token.record_word(m, with_dsts);
    return at(reinterpret_cast<const unsigned char*>(p.weights + uint64_t(token.t) * p.plan.weight_stride),
              m - weights);
  }
};

}  // namespace hep
