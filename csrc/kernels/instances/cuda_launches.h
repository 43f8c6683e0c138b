// The launches of CudaExecutor. What a host's plan needs of the device is brought there and back here.
#pragma once
#include "kernels/instances/cuda_executor.h"

namespace hep::cuda {

template <class Net>
void CudaExecutor<Net>::exchange(const ExchangeParams& host, const LaunchSettings& s) {
  const World& w = host.world;
  ExchangeParams p = host;
  if (p.place.numbers)  // the results stay on the device
    return launch<ExchangeParams>(exchange_entry<Net>, p, s, 1, kThreads<kExchangeWarps<CudaArch>>, 0);
  const uint64_t cells = uint64_t(host.num_tokens) * host.topk;
  const uint64_t columns = uint64_t(host.layout.num_ranks) + host.layout.num_nodes + host.layout.num_experts;
  const uint64_t weight_bytes = 4ull * host.num_tokens * host.weight_stride,
                 pos_bytes = 4ull * host.num_tokens * w.num_nodes;
  const uint64_t sizes[] = {
      4 * cells, weight_bytes, 4 * cells, 4 * cells, pos_bytes, pos_bytes, 4ull * kExchangeWarps<CudaArch> * columns};
  uint64_t offsets[7], total = 0;
  for (int i = 0; i < 7; ++i) offsets[i] = total, total = align_up(total + sizes[i], 128);
  const Block results(total, device_.stream());
  auto at = [&](int i) { return static_cast<unsigned char*>(results.data) + offsets[i]; };
  p.pair_expert = reinterpret_cast<int32_t*>(at(0)), p.pair_weight = reinterpret_cast<float*>(at(1));
  p.pair_pos = reinterpret_cast<uint32_t*>(at(2)), p.row_pos = reinterpret_cast<uint32_t*>(at(3));
  p.node_pos = reinterpret_cast<int32_t*>(at(4)), p.node_tokens = reinterpret_cast<uint32_t*>(at(5));
  p.columns = reinterpret_cast<uint32_t*>(at(6));
  launch<ExchangeParams>(exchange_entry<Net>, p, s, 1, kThreads<kExchangeWarps<CudaArch>>, 0);
  device_.wait(s.interrupted);  // first: a copy to pageable memory would wait inside the driver, where others want in
  auto bring = [&](void* to, int i) {
    if (sizes[i])
      check(cudaMemcpyAsync(to, at(i), sizes[i], cudaMemcpyDeviceToHost, device_.stream()), "reading the routing");
  };
  bring(host.pair_expert, 0), bring(host.pair_weight, 1), bring(host.pair_pos, 2), bring(host.row_pos, 3);
  bring(host.node_pos, 4), bring(host.node_tokens, 5);
  device_.wait({});
}

template <class Net>
void CudaExecutor<Net>::dispatch(DispatchParams& host, const LaunchSettings& s) {
  plan_dispatch_smem<CudaArch>(host, uint64_t(budget_));
  DispatchParams p = host;
  PlanCopy* copy = nullptr;
  p.plan = plan_view(host.plan, host.world, host.message.record_bytes, s, &copy);
  // The weights of a host's plan lie on the host, a caller's own on the device.
  Image image;
  if (copy && host.weights && host.plan.num_tokens && !on_device(host.weights)) {
    const uint64_t at = image.add(host.weights, 4ull * host.plan.num_tokens * host.plan.weight_stride);
    image.upload(device_.stream());
    p.weights = image.at<const float>(at);
  }
  launch<DispatchParams>(dispatch_entry<Net>, p, s, s.num_blocks, kThreads<kDispatchWarps>, p.smem_bytes);
  if (p.deliver_apart) {
    plan_deliver_smem<CudaArch>(p, uint64_t(budget_));
    launch<DispatchParams>(deliver_entry<Net>, p, s, s.deliver_blocks, kThreads<kDeliverWarps>, p.smem_bytes);
  }
  if (!copy || !host.plan.fresh) return;
  device_.wait(s.interrupted);
  copy->bring_back(device_.stream());
  device_.wait({});
}

template <class Net>
void CudaExecutor<Net>::sum(void (*entry)(CombineParams, Net, CudaControl*), CombineParams& host,
                            const LaunchSettings& s, int threads) {
  plan_combine_smem<CudaArch>(host, uint64_t(budget_));
  CombineParams p = host;
  p.plan = plan_view(host.plan, host.world, host.record_bytes, s);
  launch<CombineParams>(entry, p, s, s.num_blocks, threads, p.smem_bytes);
}

template <class Net>
void CudaExecutor<Net>::unpermute(CombineParams& host, const LaunchSettings& s) {
  sum(unpermute_entry<Net>, host, s, kThreads<kUnpermuteWarps<CudaArch>>);
}

template <class Net>
void CudaExecutor<Net>::combine(CombineParams& host, const LaunchSettings& s) {
  sum(combine_entry<Net>, host, s, kThreads<kCombineWarps<CudaArch>>);
}

}  // namespace hep::cuda
