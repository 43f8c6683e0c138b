// Operations of the latency path: parameters of their launches.
#include <algorithm>
#include <string>

#include "runtime/engine_call.h"
#include "runtime/host_pages.h"

namespace hep {

void Engine::require_latency(uint32_t tokens) const {
  if (!shape_.latency_tokens)
    throw std::invalid_argument("path: this buffer has no latency path; give it latency_tokens");
  if (tokens > shape_.latency_tokens)
    throw std::invalid_argument("path: this rank has " + std::to_string(tokens) + " tokens and latency_tokens is " +
                                std::to_string(shape_.latency_tokens) + "; use the throughput path on all ranks");
}

LatencyLink Engine::latency_link() const {
  const LatencyRailLink rail{world_,
                             layout_.latency_rail,
                             own() + layout_.latency_send,
                             own() + layout_.latency_recv,
                             reinterpret_cast<uint64_t*>(own() + layout_.latency_signals),
                             layout_.latency_recv,
                             layout_.latency_signals,
                             latency_stored_};
  return {world_, layout_.slabs, &progress_->steps, view_.recv, layout_.recv - layout_.latency, rail};
}

LatencyDispatchParams Engine::latency_params(const DispatchCall& c, const PlanView& plan, uint32_t topk,
                                             const float* weights) const {
  LatencyDispatchParams p{};
  p.world = world_;
  p.link = latency_link();
  p.message = MessageLayout::make(world_, topk, weights != nullptr, c.scale_bytes, c.row_bytes);
  if (p.lines() > layout_.slabs.token_lines)
    throw std::logic_error("latency dispatch: a message of " + std::to_string(p.message.token_bytes()) +
                           " bytes does not fit this buffer; it must grow first");
  p.plan = plan;
  p.x = c.x;
  p.scales = c.scale_bytes ? c.scales : nullptr;
  p.weights = weights;
  p.out_x = c.out_x;
  p.out_scales = c.out_scales;
  p.out_weights = weights ? c.out_weights : nullptr;
  p.out_rows = uint32_t(c.out_rows);
  p.permute = c.permute;
  p.num_node_experts = plan.num_local_experts * uint32_t(world_.num_local_ranks);
  p.first_node_expert = uint32_t(world_.node()) * p.num_node_experts;
  p.progress = progress_;
  p.traffic = traffic_;
  return p;
}

void Engine::launch_latency(Call& call, LatencyDispatchParams& p, int num_blocks) {
  LaunchSettings settings = settings_;
  settings.num_blocks = num_blocks;
  call.run([&] { executor_->latency_dispatch(p, settings); });
}

std::shared_ptr<Plan> Engine::latency_dispatch(const RoutingInput& in, const PlaceCall& place, const DispatchCall& c,
                                               bool with_weights) {
  require_latency(in.num_tokens);
  require_placeable(in, place, layout_.counts.num_experts);
  require_sizes(c.row_bytes, c.scale_bytes);
  require_blocks("num_blocks", c.num_blocks);
  if (place.header.topk > shape_.max_topk)
    throw std::logic_error("latency dispatch: more experts per token than this buffer was laid out for");
  if (const auto budget = place.header.budget(); c.permute && c.out_rows < budget.value_or(~0u))
    throw std::logic_error("latency dispatch: out_rows is smaller than the budget of permuted rows");
  Call call(*this);
  ExchangeParams route{};
  const PlacedPlan placed = describe_place(route, in, place, false);
  route.counts = latency_counts_;
  auto plan = std::make_shared<Plan>(placed);
  LatencyDispatchParams p = latency_params(c, plan->view(), place.header.topk, with_weights ? placed.weights : nullptr);
  p.routes = true;
  p.route = route;
  executor_->require_shared_memory(p, c.num_blocks);
  launch_latency(call, p, c.num_blocks);
  if (executor_->shares_memory()) plan = std::make_shared<Plan>(placed, latency_counts(placed));
  plan->freeze();
  return plan;
}

// What a notification would have told. A launch on the host has ended when it returns, so that there it may be read.
PlacedCounts Engine::latency_counts(const PlacedPlan& placed) const {
  const CountsView all{layout_.counts, latency_counts_ + (progress_->exchanges + 1) % 2 * layout_.num_ranks *
                                                             layout_.counts.vector_bytes()};
  const PlanMemory m = PlanMemory::make(world_, layout_.counts, placed.view.num_tokens, placed.view.topk);
  const auto take = [&]<class T, class From>(std::vector<T>& to, uint64_t at, uint64_t count, From) {
    const auto* from = reinterpret_cast<const From*>(placed.memory.data() + at);
    to.assign(from, from + count);
  };
  PlacedCounts c;
  c.placed = true;
  c.numbers = *placed.view.numbers;
  const uint64_t ranks = layout_.num_ranks, experts = placed.view.num_local_experts;
  for (int r = 0; r < world_.num_ranks(); ++r) {
    CallHeader::Words header;
    std::copy_n(all.vector(r), header.size(), header.begin());
    c.headers.push_back(CallHeader::of(header));
  }
  take(c.rank_rows, m.rank_rows, ranks, uint32_t{});
  take(c.source_rows, m.source_rows, ranks, uint32_t{});
  take(c.dropped, m.dropped, ranks, uint64_t{});
  take(c.tokens_per_expert, m.tokens_per_expert, experts, int64_t{});
  take(c.padded_tokens_per_expert, m.padded_tokens_per_expert, experts, int64_t{});
  for (int n = 0; n < world_.num_nodes; ++n)
    c.from_nodes.push_back(all.node_tokens(world_.rail_peer(n), world_.node()));
  return c;
}

void Engine::latency_dispatch(Plan& plan, const DispatchCall& c) {
  require_world(plan);
  require_latency(plan.num_tokens());
  require_sizes(c.row_bytes, c.scale_bytes);
  require_blocks("num_blocks", c.num_blocks);
  if (!plan.complete())
    throw std::invalid_argument("handle: the first dispatch of what route() returned takes the throughput path");
  if (c.permute && c.out_rows < plan.num_permuted_rows())
    throw std::logic_error("dispatch: out_rows is smaller than the plan's rows");
  Call call(*this);
  LatencyDispatchParams p = latency_params(c, plan.view(), plan.topk(), c.weights);
  executor_->require_shared_memory(p, c.num_blocks);
  launch_latency(call, p, c.num_blocks);
}

void Engine::latency_combine(Plan& plan, const CombineCall& c) {
  require_world(plan);
  require_latency(plan.num_tokens());
  require_sizes(uint64_t(c.hidden) * dtype_bytes(c.dtype), 0);
  require_blocks("num_blocks", c.num_blocks);
  if (!plan.complete()) throw std::invalid_argument("handle: its dispatch has not run");
  LatencyCombineParams p{};
  describe_sum(p, c, plan);
  p.link = latency_link();
  if (p.lines() > layout_.slabs.token_lines)
    throw std::logic_error("latency combine: a partial row of " + std::to_string(p.partial.row_bytes()) +
                           " bytes does not fit this buffer; it must grow first");
  Call call(*this);
  LaunchSettings settings = settings_;
  settings.num_blocks = c.num_blocks;
  call.run([&] { executor_->latency_combine(p, settings); });
}

}  // namespace hep
