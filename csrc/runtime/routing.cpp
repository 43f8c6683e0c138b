// One pass over the caller's routing: is it sane, and how many pairs has a token at most?
#include "runtime/routing.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "layout/headers.h"

namespace hep {
namespace {

uint32_t check_topk(const RoutingInput& in, uint32_t num_experts) {
  for (uint64_t i = 0; i < uint64_t(in.num_tokens) * in.topk; ++i) {
    const int64_t e = in.topk_idx[i];
    if (e < -1 || e >= int64_t(num_experts))
      throw std::invalid_argument("topk_idx: token " + std::to_string(i / in.topk) + " names expert " +
                                  std::to_string(e) + "; experts are 0.." + std::to_string(num_experts - 1) +
                                  ", -1 means dropped");
  }
  return in.topk;
}

uint32_t widest_row(const RoutingInput& in, uint32_t num_experts) {
  uint32_t widest = 0;
  for (uint32_t t = 0; t < in.num_tokens; ++t) {
    const unsigned char* row = in.routing_map + uint64_t(t) * num_experts;
    uint32_t n = 0, e = 0;
    for (; e + 8 <= num_experts; e += 8) {
      uint64_t word;
      std::memcpy(&word, row + e, 8);
      n += uint32_t(std::popcount(word));  // a bool is a 0 or a 1 byte
    }
    for (; e < num_experts; ++e) n += row[e];
    widest = std::max(widest, n);
  }
  return widest;
}

}  // namespace

ExchangeParams prepare_routing(const RoutingInput& in, const World& world, const CountsLayout& layout, Routing& r) {
  if (in.header.size() > size_t(kCountHeaderWords - kHeaderFirstFree))
    throw std::invalid_argument("header: at most " + std::to_string(kCountHeaderWords - kHeaderFirstFree) + " words");
  const uint32_t pairs = in.topk_idx ? check_topk(in, layout.num_experts) : widest_row(in, layout.num_experts);
  r.world = world;
  r.counts_layout = layout;
  r.num_tokens = in.num_tokens;
  r.topk = std::max(1u, std::min(pairs, layout.num_experts));
  r.weight_stride = MessageLayout::weight_section_bytes(std::max(r.topk, 1u)) / 4;
  const uint64_t cells = uint64_t(in.num_tokens) * r.topk;
  r.pair_expert.resize(cells);
  r.pair_weight.resize(uint64_t(in.num_tokens) * r.weight_stride);
  r.pair_pos.resize(cells);
  r.row_pos.resize(cells);
  r.node_pos.resize(uint64_t(in.num_tokens) * world.num_nodes);
  r.node_tokens.resize(uint64_t(in.num_tokens) * world.num_nodes);
  ExchangeParams p{};
  p.world = world;
  p.layout = layout;
  p.topk_idx = in.topk_idx;
  p.routing_map = in.routing_map;
  p.weights = in.weights;
  p.num_tokens = in.num_tokens, p.topk_in = in.topk, p.topk = r.topk;
  p.weight_stride = r.weight_stride;
  p.pair_expert = r.pair_expert.data();
  p.pair_weight = r.pair_weight.data();
  p.pair_pos = r.pair_pos.data();
  p.row_pos = r.row_pos.data();
  p.node_pos = r.node_pos.data(), p.node_tokens = r.node_tokens.data();
  return p;
}

}  // namespace hep
