// What the runtime hands to the kernels of the latency path.
#pragma once
#include "pipeline/latency_link.h"
#include "roles/params.h"

namespace hep {

struct LatencyDispatchParams {
  World world;
  LatencyLink link;
  bool routes;           // the plan is made by this very kernel, as `route` says; else it is complete
  ExchangeParams route;  // `counts` is memory of this rank alone
  MessageLayout message;
  PlanView plan;
  const unsigned char *x, *scales;  // [T][row_bytes], [T][scale_bytes]
  const float* weights;             // [T][weight_stride] in plan order, null = none
  unsigned char *out_x, *out_scales;
  float* out_weights;  // permuted: [out_rows]; else [M][experts of this node]
  uint32_t out_rows;
  bool permute;
  uint32_t first_node_expert, num_node_experts;
  RankProgress* progress;
  TrafficCounters* traffic;
  // Shared memory, behind that of the exchange.
  uint64_t source_begins_at;  // [R + 1] words: receive rows of each source
  uint64_t pair_bases_at;     // [R][local experts] words: permuted rows of each source's pairs
  uint64_t rail_bases_at;     // [N - 1][L + experts of the node] words: where rows and pairs of rail peers begin
  uint64_t scratch_at;        // of each warp: metadata of a token and its rows
  uint32_t scratch_bytes;     // of a warp
  uint64_t smem_bytes;

  HEP_HOST_DEVICE uint32_t lines() const { return Line::lines_of(message.token_bytes()); }
};

struct LatencyCombineParams : SumParams {
  LatencyLink link;
  uint64_t scratch_bytes;  // shared memory of a warp, see LatencyRows; 0: it needs none

  HEP_HOST_DEVICE uint32_t lines() const { return Line::lines_of(partial.row_bytes()); }
};

// Rows that a warp sends, by lines, all of as many, and along the rail, for the counters of the rank.
struct LineTraffic {
  uint64_t node_rows = 0, self_rows = 0, rail_rows = 0;

  HEP_DEVICE void add(bool own) { own ? ++self_rows : ++node_rows; }
  template <class A>
  HEP_DEVICE void report(A& a, TrafficCounters* traffic, uint32_t lines, uint64_t rail_row_bytes) const {
    if (a.lane() != 0) return;
    const uint64_t bytes = lines * sizeof(Line);
    a.count_rank(&traffic->node_rows, node_rows);
    a.count_rank(&traffic->node_bytes, node_rows * bytes);
    a.count_rank(&traffic->self_rows, self_rows);
    a.count_rank(&traffic->self_bytes, self_rows * bytes);
    if (rail_rows == 0) return;
    a.count_rank(&traffic->rail_rows, rail_rows);
    a.count_rank(&traffic->rail_bytes, rail_rows * rail_row_bytes);
  }
};

}  // namespace hep
