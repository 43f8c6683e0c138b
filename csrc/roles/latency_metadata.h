// Latency dispatch: record and weights of the token that a warp has in work, in its scratch memory, and what they say:
// the rows of its pairs, their weights, and what the plan keeps.
#pragma once
#include <bit>

#include "roles/exchange_share.h"
#include "roles/latency_sources.h"

namespace hep {

template <Arch A>
struct LatencyMetadata {
  A& a;
  const LatencyDispatchParams& p;
  unsigned char* const scratch;  // [record | weights], then how many rows of the result the token has here, then which

  HEP_DEVICE LatencyMetadata(A& arch, const LatencyDispatchParams& params, std::byte* smem)
      : a(arch),
        p(params),
        scratch(reinterpret_cast<unsigned char*>(smem + params.scratch_at) +
                uint64_t(arch.warp_idx()) * params.scratch_bytes) {}

  HEP_DEVICE uint64_t* words() const { return reinterpret_cast<uint64_t*>(scratch); }
  HEP_DEVICE RecordHeader header() const {
    return std::bit_cast<RecordHeader>(a.ld_shared(reinterpret_cast<const Vec16*>(scratch)));
  }
  HEP_DEVICE uint32_t num_rows() const { return a.ld_shared(rows()); }
  HEP_DEVICE uint32_t row(uint32_t k) const { return a.ld_shared(rows() + 1 + k); }

  // By all lanes of the warp, in this order, which meet between the two.
  // From positions among the source's pairs to rows, as placement has them: -1 without one, or of other ranks.
  HEP_DEVICE void place_pairs(const LatencySources<A>& sources, int source, uint32_t room) {
    const uint32_t n = header().num_pairs;
    for (uint32_t k = uint32_t(a.lane()); k < n; k += A::kLanes) {
      PairEntry e = pair(k);
      const uint32_t local = uint32_t(e.expert) - p.plan.first_expert;
      const bool here = local < p.plan.num_local_experts;
      const uint32_t row = here ? sources.row_of(source, local, uint32_t(e.row)) : 0;
      e.row = here && (room == ExchangeSmem::kUnlimited || row < room) ? int32_t(row) : -1;
      a.st_shared(pairs() + k, std::bit_cast<uint64_t>(e));
    }
  }
  // For receive row `row`: the rows of the result.
  HEP_DEVICE void find_rows(uint32_t row) {
    if (a.lane() != 0) return;
    const uint32_t pairs = p.permute ? header().num_pairs : 0;
    uint32_t found = 0;
    for (uint32_t k = 0; k < pairs; ++k)
      if (const PairEntry e = pair(k); p.plan.has_row(e)) a.st_shared(rows() + ++found, uint32_t(e.row));
    if (!p.permute) a.st_shared(rows() + ++found, row);
    a.st_shared(rows(), found);
  }
  // The weights there, and what the plan keeps.
  HEP_DEVICE void use(uint32_t row) {
    const RecordHeader h = header();
    if (p.plan.fresh) keep(row);
    if (p.out_weights) p.permute ? permuted_weights(h) : node_weights(h, row);
  }

 private:
  HEP_DEVICE uint32_t* rows() const { return reinterpret_cast<uint32_t*>(scratch + p.message.metadata_bytes()); }
  HEP_DEVICE uint64_t* pairs() const { return reinterpret_cast<uint64_t*>(scratch + p.message.pairs_at()); }
  HEP_DEVICE PairEntry pair(uint32_t k) const { return std::bit_cast<PairEntry>(a.ld_shared(pairs() + k)); }
  HEP_DEVICE float weight(const RecordHeader& h, uint32_t k) const {
    return a.ld_shared(reinterpret_cast<const float*>(scratch + p.message.weights_at()) + h.first_pair + k);
  }
  HEP_DEVICE void keep(uint32_t row) {
    auto* record = reinterpret_cast<uint64_t*>(p.plan.row_records + uint64_t(row) * p.message.record_bytes);
    auto* weights = reinterpret_cast<uint64_t*>(p.plan.row_weights + uint64_t(row) * p.plan.weight_stride);
    const uint32_t of_record = p.message.record_bytes / 8;
    for (uint32_t m = uint32_t(a.lane()); m < p.message.metadata_bytes() / 8; m += A::kLanes)
      a.st_global(m < of_record ? record + m : weights + (m - of_record), a.ld_shared(words() + m));
  }
  HEP_DEVICE void permuted_weights(const RecordHeader& h) {
    for (uint32_t k = uint32_t(a.lane()); k < h.num_pairs; k += A::kLanes)
      if (const PairEntry e = pair(k); p.plan.has_row(e)) a.st_global(p.out_weights + e.row, weight(h, k));
  }
  HEP_DEVICE void node_weights(const RecordHeader& h, uint32_t row) {
    float* weights = p.out_weights + uint64_t(row) * p.num_node_experts;
    for (uint32_t e = uint32_t(a.lane()); e < p.num_node_experts; e += A::kLanes) a.st_global(weights + e, 0.f);
    a.warp_sync();
    for (uint32_t k = uint32_t(a.lane()); k < h.num_pairs; k += A::kLanes)
      a.st_global(weights + (uint32_t(pair(k).expert) - p.first_node_expert), weight(h, k));
  }
};

}  // namespace hep
