// Post: one warp writes what the host wants to know of an exchange into the rank's mail, and then its ticket.
//
// Ordering. The words are stored by all lanes of the warp; warp_sync orders them before the elected lane's release at
// system scope, which is cumulative; the host acquires the ticket. The mail is not overwritten while the host reads:
// the next exchange that posts is launched by the same host thread, after it has read.
#pragma once
#include "layout/count_mail.h"
#include "layout/headers.h"
#include "roles/params.h"

namespace hep {

template <class A>
struct PostRole {
  A& a;
  const ExchangeParams& p;
  const PlaceParams& place;
  const CountsView counts;
  const CountMail at;
  uint32_t* const words;

  HEP_DEVICE PostRole(A& arch, const ExchangeParams& params, const PlaceParams& placed)
      : a(arch),
        p(params),
        place(placed),
        counts{params.layout, placed.counts},
        at(CountMail::make(params.layout)),
        words(CountMail::word(params.mail)) {}

  // By all lanes of one warp. placed: what placement found has been stored, and the warp has synchronised with it.
  HEP_DEVICE void run(bool placed) {
    const uint32_t ranks = at.num_ranks;
    write(at.headers_at(), ranks * kCountHeaderWords,
          [&](uint32_t i) { return counts.header(int(i / kCountHeaderWords), int(i % kCountHeaderWords)); });
    if (placed) {
      const PlanNumbers& n = *place.numbers;
      write(at.rank_rows_at(), ranks, [&](uint32_t i) { return place.rank_rows[i]; });
      write(at.source_rows_at(), ranks, [&](uint32_t i) { return counts.rows(int(i), p.world.rank); });
      write(at.dropped_at(), ranks, [&](uint32_t i) { return uint32_t(place.dropped_per_rank[i]); });
      write(at.from_nodes_at(), at.num_nodes,
            [&](uint32_t i) { return int(i) == p.world.node() ? place.node_count[i] : place.rail_count[i]; });
      write(at.tokens_per_expert_at(), at.num_local_experts,
            [&](uint32_t i) { return uint32_t(place.tokens_per_expert[i]); });
      write(at.padded_at(), at.num_local_experts,
            [&](uint32_t i) { return uint32_t(place.padded_tokens_per_expert[i]); });
      if (a.lane() == 0) {
        set(CountMail::kRecvRows, n.recv_rows), set(CountMail::kMaxRecvRows, n.max_recv_rows);
        set(CountMail::kPermutedRows, n.permuted_rows), set(CountMail::kOverflow, uint32_t(n.overflow));
        set(CountMail::kHasHoles, n.has_holes);
      }
    }
    if (a.lane() == 0) set(CountMail::kPlaced, placed);
    a.warp_sync();
    if (a.elect_one()) a.st_release_sys(CountMail::ticket(p.mail), p.mail_ticket);
  }

 private:
  HEP_DEVICE void set(uint32_t at_word, uint32_t value) { a.st_global(words + at_word, value); }
  template <class F>
  HEP_DEVICE void write(uint32_t begin, uint32_t count, F value) {
    for (uint32_t i = uint32_t(a.lane()); i < count; i += uint32_t(A::kLanes)) set(begin + i, value(i));
  }
};

}  // namespace hep
