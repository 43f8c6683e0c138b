// Notify: one warp writes what the host wants to know of an exchange into the rank's notification, and then its ticket.
//
// Ordering. The words are stored by all lanes of the warp; warp_sync orders them before the elected lane's release at
// system scope, which is cumulative; the host acquires the ticket. Nothing overwrites the notification while the host
// reads: the next exchange that notifies is launched by the same host thread, after it has read.
#pragma once
#include <cstddef>

#include "layout/count_notification.h"
#include "layout/headers.h"
#include "roles/params.h"

namespace hep {

// The notification's numbers are the first words of PlanNumbers.
static_assert(offsetof(PlanNumbers, recv_rows) == 0 && offsetof(PlanNumbers, max_recv_rows) == 4 &&
              offsetof(PlanNumbers, permuted_rows) == 8 && offsetof(PlanNumbers, overflow) == 12 &&
              offsetof(PlanNumbers, has_holes) == 16 &&
              CountNotification::kHasHoles - CountNotification::kRecvRows == 4);

template <class A>
struct NotifyRole {
  A& a;
  const ExchangeParams& p;
  const PlaceParams& place;
  const CountsView counts;
  const CountNotification at;
  uint32_t* const words;
  const int own_node;

  HEP_DEVICE NotifyRole(A& arch, const ExchangeParams& params, const CountsView& view)
      : a(arch),
        p(params),
        place(params.place),
        counts(view),
        at(CountNotification::make(params.layout)),
        words(CountNotification::word(params.notification)),
        own_node(params.world.node()) {}

  // By all lanes of one warp. placed: what placement found has been stored, and the warp has synchronised with it.
  HEP_DEVICE void run(bool placed) {
    const uint32_t end = placed ? at.words() : at.rank_rows_at();
    for (uint32_t i = uint32_t(a.lane()); i < end; i += uint32_t(A::kLanes)) a.st_global(words + i, word(i, placed));
    a.warp_sync();
    if (a.elect_one()) a.st_release_sys(CountNotification::ticket(p.notification), p.notification_ticket);
  }

 private:
  // One loop over all words, and not one for each array: that is a tenth of this kernel's code.
  HEP_DEVICE uint32_t word(uint32_t i, bool placed) const {
    if (i == CountNotification::kPlaced) return placed;
    if (i < at.headers_at())
      return placed ? reinterpret_cast<const uint32_t*>(place.numbers)[i - CountNotification::kRecvRows] : 0;
    if (i < at.rank_rows_at()) {
      i -= at.headers_at();
      return counts.header(int(i / kCountHeaderWords), int(i % kCountHeaderWords));
    }
    if (i < at.source_rows_at()) return place.rank_rows[i - at.rank_rows_at()];
    if (i < at.dropped_at()) return counts.rows(int(i - at.source_rows_at()), p.world.rank);
    if (i < at.from_nodes_at()) return uint32_t(place.dropped_per_rank[i - at.dropped_at()]);
    if (i < at.tokens_per_expert_at()) {
      i -= at.from_nodes_at();
      return int(i) == own_node ? place.node_count[i] : place.rail_count[i];
    }
    if (i < at.padded_at()) return uint32_t(place.tokens_per_expert[i - at.tokens_per_expert_at()]);
    return uint32_t(place.padded_tokens_per_expert[i - at.padded_at()]);
  }
};

}  // namespace hep
