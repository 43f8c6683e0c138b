// The kernels on the simulated machine, for one rank of a world. Unlike other executors it is not in the table:
// it exists only inside a world, whose ranks it shares a machine with.
#pragma once
#include "arch/sim/sim_arch.h"
#include "kernels/instances/executor.h"

namespace hep {

class SimExecutor final : public Executor {
 public:
  SimExecutor(sim::Machine& machine, int rank, uint64_t smem_budget)
      : m_(machine), rank_(rank), smem_budget_(smem_budget) {}

  void balance(const BalanceParams& p, const LaunchSettings& s) override;
  void push_weights(const SpareParams& p, const LaunchSettings& s) override;
  void await_weights(const SpareParams& p, const LaunchSettings& s) override;
  void collect_gradients(const SpareParams& p, const LaunchSettings& s) override;
  void push_nodes(const SpareRailParams& p, const LaunchSettings& s) override;
  void collect_nodes(const SpareRailParams& p, const LaunchSettings& s) override;
  void exchange(const ExchangeParams& p, const LaunchSettings& s) override;
  void dispatch(DispatchParams& p, const LaunchSettings& s) override;
  void combine(CombineParams& p, const LaunchSettings& s) override;
  void latency_dispatch(LatencyDispatchParams& p, const LaunchSettings& s) override;
  void latency_combine(LatencyCombineParams& p, const LaunchSettings& s) override;

  // What kernels are not told: rows of combine's input, the first receive row of each source (see Rank), how many warps
  // a block of the latency path has, and, in timed worlds, where payload would lie.
  uint64_t combine_rows = 0;
  int latency_warps = 1;
  const unsigned char *phantom_begin = nullptr, *phantom_end = nullptr;
  std::vector<uint32_t> first_row;

 private:
  template <class Body>
  void launch(const char* kernel, int blocks, int warps, uint64_t smem, const MessageLayout& message, Body body);
  void add_spares(const SpareParams& p, uint64_t element_bytes, sim::Region::Use use);
  void add(const char* name, const void* p, uint64_t bytes, sim::Region::Use use, bool payload);
  void end_operation();
  void end_latency();

  sim::Machine& m_;
  int rank_;
  uint64_t smem_budget_;
  sim::Ps placing_ = 0;  // of the next launch, see CostModel::place_token_ps
};

}  // namespace hep
