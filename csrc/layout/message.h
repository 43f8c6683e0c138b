// One token on the wire: [record | weights | scales | payload], contiguous, every section 16-byte aligned.
// The same bytes travel over the rail and into a stage, so there is one layout. At their destination they part: the
// metadata, [record | weights], into the entry of the receive row; scales and payload to where its rank wants them.
#pragma once
#include <cstdint>

#include "common/world.h"

namespace hep {

// The rows of one token for one destination node. The sender computes them when all counts are known, so
// that nobody downstream searches or scans. Followed by DstEntry[max_dsts], PairEntry[max_pairs].
struct alignas(16) RecordHeader {
  uint16_t num_dsts;     // ranks of this node that receive the token
  uint16_t num_pairs;    // (expert, weight) pairs on this node
  uint32_t first_pair;   // index of the first of them in the token's weights section
  uint32_t source_rank;  // for diagnosis
  uint32_t source_token;
};
struct DstEntry {
  uint32_t local_rank;  // in the destination node, ascending
  uint32_t row;         // receive row there
};
struct PairEntry {
  int32_t expert;  // in the group, ascending
  int32_t row;     // permuted row on the expert's rank, -1 when a budget dropped the pair
};
static_assert(sizeof(RecordHeader) == 16 && sizeof(DstEntry) == 8 && sizeof(PairEntry) == 8);

struct MessageLayout {
  uint32_t max_pairs = 0, max_dsts = 0;  // per token; max_dsts <= ranks of a node
  uint32_t record_bytes = 0, weight_bytes = 0, scale_bytes = 0, row_bytes = 0;

  // topk: most pairs of any token of any rank. scale_bytes, row_bytes: multiples of 16.
  static MessageLayout make(const World& w, uint32_t topk, bool weights, uint32_t scale_bytes, uint32_t row_bytes) {
    MessageLayout m;
    m.max_pairs = topk;
    m.max_dsts = topk < uint32_t(w.num_local_ranks) ? topk : uint32_t(w.num_local_ranks);
    m.record_bytes = uint32_t(align_up(sizeof(RecordHeader) + 8ull * m.max_dsts + 8ull * m.max_pairs, 16));
    m.weight_bytes = weights ? weight_section_bytes(topk) : 0;
    m.scale_bytes = scale_bytes;
    m.row_bytes = row_bytes;
    return m;
  }
  HEP_HOST_DEVICE static uint32_t weight_section_bytes(uint32_t topk) { return uint32_t(align_up(4ull * topk, 16)); }

  HEP_HOST_DEVICE uint32_t weights_at() const { return record_bytes; }
  HEP_HOST_DEVICE uint32_t metadata_bytes() const { return record_bytes + weight_bytes; }
  HEP_HOST_DEVICE uint32_t scales_at() const { return record_bytes + weight_bytes; }
  HEP_HOST_DEVICE uint32_t payload_at() const { return record_bytes + weight_bytes + scale_bytes; }
  HEP_HOST_DEVICE uint32_t token_bytes() const { return payload_at() + row_bytes; }
  HEP_HOST_DEVICE static uint32_t dsts_at() { return sizeof(RecordHeader); }
  HEP_HOST_DEVICE uint32_t pairs_at() const { return sizeof(RecordHeader) + 8 * max_dsts; }
};

// A row of combine's partial sums: [payload | weights]; payload in the partial dtype.
struct PartialLayout {
  uint32_t payload_bytes = 0, weight_bytes = 0;
  HEP_HOST_DEVICE uint32_t weights_at() const { return payload_bytes; }
  HEP_HOST_DEVICE uint32_t row_bytes() const { return payload_bytes + weight_bytes; }
};

}  // namespace hep
