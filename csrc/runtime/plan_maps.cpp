#include "runtime/plan_maps.h"

#include <algorithm>
#include <cstring>

namespace hep {
namespace {

template <class F>
void for_each_record(const unsigned char* records, uint64_t count, uint32_t record_bytes, F&& f) {
  for (uint64_t j = 0; j < count; ++j) f(j, records + j * record_bytes);
}
const RecordHeader& header_of(const unsigned char* record) {
  return *reinterpret_cast<const RecordHeader*>(record);
}

void write_rails(const Plan& plan, const PlanMaps& maps) {
  const World& w = plan.world();
  const PlanView v = plan.view();
  const uint64_t locals = uint64_t(w.num_local_ranks), rows = num_rail_rows(plan);
  std::fill_n(maps.sparse_to_dense, rows * locals, -1);
  std::memset(maps.rail_to_node, 0, rows);
  uint64_t first = 0;
  for (int n = 0; n < w.num_nodes; ++n) {
    const bool own = n == w.node();
    const unsigned char* records = own ? v.records[n] : v.rail_records + uint64_t(n) * v.rail_record_stride;
    for_each_record(records, own ? v.node_count[n] : v.rail_count[n], plan.record_bytes(),
                    [&](uint64_t, const unsigned char* record) {
                      const RecordHeader& h = header_of(record);
                      const auto* dsts = reinterpret_cast<const DstEntry*>(record + MessageLayout::dsts_at());
                      maps.rail_to_node[first + h.source_token] = 1;
                      for (uint32_t i = 0; i < h.num_dsts; ++i)
                        maps.sparse_to_dense[(first + h.source_token) * locals + dsts[i].local_rank] =
                            int32_t(dsts[i].row);
                    });
    first += plan.num_rail_tokens(n);
  }
  for (uint64_t t = 0; t < plan.num_tokens(); ++t)
    for (int n = 0, column = 0; n < w.num_nodes; ++n)
      if (n != w.node())
        maps.node_to_rail[t * uint64_t(w.num_nodes - 1) + uint64_t(column++)] =
            v.node_pos[t * uint64_t(w.num_nodes) + uint64_t(n)] >= 0;
}

void write_experts(const Plan& plan, const PlanMaps& maps) {
  const PlanView v = plan.view();
  const uint64_t experts = plan.num_local_experts(), rows = plan.num_recv_rows();
  std::memset(maps.local_routing, 0, rows * experts);
  if (maps.permuted_rows) std::fill_n(maps.permuted_rows, rows * experts, -1);
  for_each_record(v.row_records, rows, plan.record_bytes(), [&](uint64_t row, const unsigned char* record) {
    const auto* pairs = reinterpret_cast<const PairEntry*>(record + plan.pairs_at());
    for (uint32_t k = 0; k < header_of(record).num_pairs; ++k) {
      const uint32_t e = uint32_t(pairs[k].expert) - v.first_expert;
      if (e >= experts) continue;
      maps.local_routing[row * experts + e] = 1;
      if (maps.permuted_rows) maps.permuted_rows[row * experts + e] = pairs[k].row;
    }
  });
}

}  // namespace

uint64_t num_rail_rows(const Plan& plan) {
  uint64_t rows = 0;
  for (int n = 0; n < plan.world().num_nodes; ++n) rows += plan.num_rail_tokens(n);
  return rows;
}

void write_maps(const Plan& plan, const PlanMaps& maps) {
  write_rails(plan, maps);
  write_experts(plan, maps);
  if (!maps.source_ends) return;
  uint32_t end = 0;
  for (size_t s = 0; s < plan.counts().source_rows.size(); ++s) {
    end = std::min(plan.num_recv_rows(), end + plan.counts().source_rows[s]);
    maps.source_ends[s] = int32_t(end);
  }
}

}  // namespace hep
