// Count vectors of a latency dispatch: they travel as the headers of slabs, from every rank to every rank of its node,
// and along the rail; those of rail peers are handed on to the node.
#pragma once
#include "roles/latency_params.h"

namespace hep {

// By all lanes of a block; each warp has ranks of its own.
template <Arch A, Transport<A> Net>
struct LatencyCountsRole {
  A& a;
  Net& net;
  const LatencyDispatchParams& p;
  const uint64_t flag;
  const LinePart<A> part;

  HEP_DEVICE LatencyCountsRole(A& arch, Net& n, const LatencyDispatchParams& params, uint64_t step)
      : a(arch), net(n), p(params), flag(step), part(arch) {}

  // This rank's vector, which lies among the counts.
  HEP_DEVICE void send() {
    if constexpr (kHasRail<Net>) send_along_rail();
    hand_on(p.world.rank, vector(p.world.rank));
  }
  // All others'. What this rank hands on comes first: others wait for it. Then those of its node, whose delays are not
  // to be taken for those of ranks whose vectors they hand on.
  HEP_DEVICE void receive() {
    if constexpr (kHasRail<Net>) receive_from_rail();
    const int ranks = p.world.num_ranks(), locals = p.world.num_local_ranks, own = p.world.local_rank();
    const int node = p.world.rank_of(p.world.node(), 0);
    for (int i = 1 + a.warp_idx(); i < ranks; i += a.num_warps())
      if (const int rank = i < locals ? node + (own + i) % locals : (node + i) % ranks;
          i < locals || rank % locals != own)
        take(rank);
  }

 private:
  HEP_DEVICE void send_along_rail() {
    for (int i = 1 + a.warp_idx(); i < p.world.num_nodes; i += a.num_warps()) {
      const int node = (p.world.node() + i) % p.world.num_nodes;
      auto* to = reinterpret_cast<Vec16*>(p.link.rail.header(net, flag, node));
      const auto* from = reinterpret_cast<const Vec16*>(vector(p.world.rank));
      for (uint32_t m = uint32_t(a.lane()); m < vector_bytes() / sizeof(Vec16); m += A::kLanes)
        a.st_global(to + m, from[m]);  // padding and all, which nobody has written
      p.link.rail.send_header(a, net, flag, node, vector_bytes());
      count(vector_bytes());
    }
  }
  HEP_DEVICE void receive_from_rail() {
    for (int i = 1 + a.warp_idx(); i < p.world.num_nodes; i += a.num_warps()) {
      const int node = (p.world.node() + i) % p.world.num_nodes, source = p.world.rail_peer(node);
      const auto* came =
          reinterpret_cast<const uint64_t*>(p.link.rail.await_header(a, net, flag, node, Late{*this, source}));
      for (uint32_t m = uint32_t(a.lane()); m < num_words(); m += A::kLanes)
        a.st_global(vector(source) + m, a.ld_global(came + m));
      hand_on(source, came, true);
    }
  }
  HEP_DEVICE uint64_t vector_bytes() const { return p.route.layout.vector_bytes(); }
  HEP_DEVICE uint32_t num_words() const { return uint32_t(vector_bytes() / 8); }
  HEP_DEVICE uint32_t num_lines() const { return p.link.slabs.header_lines; }
  HEP_DEVICE uint64_t* vector(int rank) const {
    return reinterpret_cast<uint64_t*>(p.route.counts + p.route.parity_bytes() + uint64_t(rank) * vector_bytes());
  }
  HEP_DEVICE void count(uint64_t bytes) {
    if (a.lane() == 0) a.count_rank(&p.traffic->count_bytes, bytes);
  }
  // The vector of a rank of this rail to the others of the node, by each warp to ranks of its own, or by one to all.
  HEP_DEVICE void hand_on(int source, const uint64_t* words_of, bool alone = false) {
    const int locals = p.world.num_local_ranks, own = p.world.local_rank();
    for (int i = 1 + (alone ? 0 : a.warp_idx()); i < locals; i += alone ? 1 : a.num_warps()) {
      Line* to = p.link.slab(flag, (own + i) % locals, source);
      each_line([&](uint32_t line, bool there) {
        uint64_t words[A::kLineWords] = {};
        part.each_word(line, [&](uint32_t w, uint32_t m) { words[w] = m < num_words() ? words_of[m] : 0; });
        a.st_line(there ? to + line : nullptr, words, flag);
      });
      count(num_lines() * sizeof(Line));
    }
  }
  // Counts a rank's delay.
  struct Late {
    LatencyCountsRole& role;
    const int rank;
    uint64_t since = 0;

    HEP_DEVICE void begin() { since = role.a.clock_ns(); }
    HEP_DEVICE void end() {
      if (role.a.elect_one()) role.a.count_rank(role.p.route.waited + rank, role.a.clock_ns() - since);
    }
  };
  // Likewise; a vector of another node comes by a rank of this one, whose own is waited for first.
  struct LateHere : Late {
    HEP_DEVICE void begin() {
      if (kHasRail<Net>) this->role.await_who_hands_on(this->rank);
      Late::begin();
    }
  };
  HEP_DEVICE void await_who_hands_on(int rank) {
    const int by = p.world.rank_of(p.world.node(), rank % p.world.num_local_ranks);
    uint64_t words[A::kLineWords];
    const Line* own = by == rank ? nullptr : p.link.slab(flag, p.world.local_rank(), by);
    while (!a.ld_line(own, flag, words)) a.poll_idle({Site::kLatencyHeader, by}, flag, 0);
    a.poll_reset();
  }
  HEP_DEVICE void take(int rank) {
    const Line* from = p.link.slab(flag, p.world.local_rank(), rank);
    each_line([&](uint32_t line, bool there) {
      uint64_t words[A::kLineWords];
      p.link.wait(a, there ? from + line : nullptr, flag, words, {Site::kLatencyHeader, rank, int64_t(line)},
                  LateHere{{*this, rank}});
      part.each_word(line, [&](uint32_t w, uint32_t m) {
        if (there && m < num_words()) a.st_global(vector(rank) + m, words[w]);
      });
    });
  }
  // `there`: this lane has one.
  template <class F>
  HEP_DEVICE void each_line(F&& f) {
    for (uint32_t first = 0; first < num_lines(); first += part.kAtOnce)
      f(first + part.group, first + part.group < num_lines());
  }
};

}  // namespace hep
