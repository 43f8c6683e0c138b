// What an exchange tells the host while the device runs on: a block of memory that both can reach, at the front of it
// a ticket that is released when the words behind it are there. The host reads all of them or none. A second ticket
// says that the kernel has started: what was queued before it is not part of its time.
#pragma once
#include "layout/counts.h"

namespace hep {

struct CountNotification {
  enum Word : uint32_t {  // behind the ticket, 32 bits each
    kPlaced,              // 0: the ranks' calls do not fit together or this buffer; of the rest, only headers are there
    kRecvRows,
    kMaxRecvRows,
    kPermutedRows,
    kOverflow,
    kHasHoles,
    kNumWords
  };
  uint32_t num_ranks = 1, num_nodes = 1, num_local_experts = 1;

  HEP_HOST_DEVICE static CountNotification make(const CountsLayout& c) {
    return {c.num_ranks, c.num_nodes, c.num_experts / c.num_ranks};
  }
  HEP_HOST_DEVICE uint32_t headers_at() const { return kNumWords; }  // [R][kCountHeaderWords]
  HEP_HOST_DEVICE uint32_t rank_rows_at() const { return headers_at() + num_ranks * kCountHeaderWords; }  // [R] of each
  HEP_HOST_DEVICE uint32_t source_rows_at() const { return rank_rows_at() + num_ranks; }  // [R] from each, of ours
  HEP_HOST_DEVICE uint32_t dropped_at() const { return source_rows_at() + num_ranks; }    // [R] pairs lost to budgets
  HEP_HOST_DEVICE uint32_t from_nodes_at() const { return dropped_at() + num_ranks; }     // [N]
  HEP_HOST_DEVICE uint32_t tokens_per_expert_at() const { return from_nodes_at() + num_nodes; }  // [local experts]
  HEP_HOST_DEVICE uint32_t padded_at() const { return tokens_per_expert_at() + num_local_experts; }
  HEP_HOST_DEVICE uint32_t words() const { return padded_at() + num_local_experts; }
  uint64_t bytes() const { return 64 + 4ull * words(); }

  // At this address, aligned to 8.
  HEP_HOST_DEVICE static uint64_t* ticket(unsigned char* notification) {
    return reinterpret_cast<uint64_t*>(notification);
  }
  HEP_HOST_DEVICE static uint64_t* started(unsigned char* notification) { return ticket(notification) + 1; }
  HEP_HOST_DEVICE static uint32_t* word(unsigned char* notification) {
    return reinterpret_cast<uint32_t*>(notification + 64);
  }
};

}  // namespace hep
