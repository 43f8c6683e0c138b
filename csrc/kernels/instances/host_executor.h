// The kernels on a host Arch: launches of fibers or threads in this process.
#pragma once
#include <atomic>

#include "arch/host/launch.h"
#include "arch/host/tile_math.h"
#include "kernels/balance.h"
#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/exchange.h"
#include "kernels/instances/executor.h"
#include "kernels/latency_combine.h"
#include "kernels/spare_rails.h"

namespace hep {

template <class A, class Net>
class HostExecutor final : public Executor {
 public:
  // Not what an SM has: copies here are immediate, so deep FIFOs hide nothing, and stages that stay in a core's L1
  // made a dispatch of 4096 rows of 4 KiB on 4 ranks twice as fast as 192 KiB of them.
  static constexpr uint64_t kSmemBudget = 24 * 1024, kNoBudget = std::numeric_limits<uint64_t>::max();

  template <class... Args>
  explicit HostExecutor(Args&&... args) : net_(std::forward<Args>(args)...) {}

  void abort() noexcept override { given_up_ = true; }
  bool adds_parts() const override { return TileMath<A>::kReadsRows; }

  void exchange(const ExchangeParams& params, const LaunchSettings& s) override {
    ExchangeParams p = params;
    const uint64_t smem = plan_exchange<A>(p, kSmemBudget, s.num_blocks);
    launch(s, s.num_blocks, kExchangeWarps<A>, smem,
           [&](A& a, std::byte* at) { exchange_kernel<A, Net>(a, net_, p, at); });
  }
  void dispatch(DispatchParams& p, const LaunchSettings& s) override {
    plan_dispatch_smem<A>(p, kSmemBudget);
    launch(s, s.num_blocks, kDispatchWarps, p.smem_bytes,
           [&](A& a, std::byte* smem) { dispatch_kernel<A, Net>(a, net_, p, smem); });
  }
  void combine(CombineParams& p, const LaunchSettings& s) override {
    plan_combine_smem<A>(p, kSmemBudget);
    launch(s, s.num_blocks, kCombineWarps<A>, p.smem_bytes,
           [&](A& a, std::byte* smem) { combine_kernel<A, Net>(a, net_, p, smem); });
  }
  void latency_dispatch(LatencyDispatchParams& p, const LaunchSettings& s) override {
    plan_latency_dispatch<A>(p, kSmemBudget, s.num_blocks);
    launch(s, s.num_blocks, kExchangeWarps<A>, p.smem_bytes,
           [&](A& a, std::byte* smem) { latency_dispatch_kernel(a, net_, p, smem); });
  }
  void latency_combine(LatencyCombineParams& p, const LaunchSettings& s) override {
    const uint64_t smem_bytes = plan_latency_combine<A>(p);
    launch(s, s.num_blocks, kExchangeWarps<A>, smem_bytes,
           [&](A& a, std::byte* smem) { latency_combine_kernel(a, net_, p, smem); });
  }
  void balance(const BalanceParams& params, const LaunchSettings& s) override {
    BalanceParams p = params;
    const uint64_t smem_bytes = plan_balance<A>(p, kSmemBudget + CloneLayout::make(p.shape, 1, 1).bytes, s.num_blocks);
    launch(s, s.num_blocks, kBalanceWarps<A>, smem_bytes,
           [&](A& a, std::byte* smem) { balance_kernel<A, Net>(a, net_, p, smem); });
  }
  void push_weights(const SpareParams& params, const LaunchSettings& s) override {
    SpareParams p = params;
    const uint64_t smem_bytes = plan_push<A>(p, kSpareWarps<A>, kNoBudget);
    launch(s, s.num_blocks, kSpareWarps<A>, smem_bytes,
           [&](A& a, std::byte* smem) { push_weights_kernel(a, p, smem); });
  }
  void await_weights(const SpareParams& p, const LaunchSettings& s) override {
    launch(s, 1, 1, SpareTable<A>::bytes(p), [&](A& a, std::byte* smem) { await_weights_kernel(a, p, smem); });
  }
  void collect_gradients(const SpareParams& p, const LaunchSettings& s) override {
    launch(s, s.num_blocks, kSpareWarps<A>, SpareTable<A>::bytes(p),
           [&](A& a, std::byte* smem) { collect_gradients_kernel(a, p, smem); });
  }
  void push_nodes(const SpareRailParams& params, const LaunchSettings& s) override {
    SpareRailParams p = params;
    const uint64_t smem_bytes = plan_push_nodes<A, Net>(p, kNoBudget);
    launch(s, p.num_blocks(), kRailWarps<A>, smem_bytes,
           [&](A& a, std::byte* smem) { push_nodes_kernel<A, Net>(a, net_, p, smem); });
  }
  void collect_nodes(const SpareRailParams& p, const LaunchSettings& s) override {
    launch(s, p.num_blocks(), kRailWarps<A>, collect_nodes_bytes<A>(p),
           [&](A& a, std::byte* smem) { collect_nodes_kernel<A, Net>(a, net_, p, smem); });
  }

 private:
  template <class Body>
  void launch(const LaunchSettings& s, int blocks, int warps, uint64_t smem, Body body) {
    host::LaunchConfig c;
    c.num_blocks = blocks;
    c.num_warps = warps;
    c.smem_bytes = smem;
    c.rank = s.world.rank;
    c.node = s.world.node();
    c.num_local_ranks = s.world.num_local_ranks;
    c.timeout_s = s.timeout_s;
    c.seed = s.seed + ++launches_;
    c.given_up = given_up_;
    c.progress = [this] { return net_.progress(); };
    c.interrupted = s.interrupted;
    host::launch<A>(c, body);
    net_.settle();
  }

  Net net_;
  std::atomic<bool> given_up_{false};
};

}  // namespace hep
