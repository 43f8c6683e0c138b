// The four launches of CudaExecutor: each gathers the tables of its call into one upload, points the parameters at the
// device's copies and launches.
#pragma once
#include "kernels/instances/cuda_executor.h"

namespace hep::cuda {

template <class Net>
void CudaExecutor<Net>::exchange(const ExchangeParams& host, const LaunchSettings& s) {
  const World& w = host.world;
  const uint64_t cells = uint64_t(host.num_tokens) * host.topk, locals = uint64_t(w.num_local_ranks);
  const uint64_t columns = uint64_t(host.layout.num_ranks) + host.layout.num_nodes + host.layout.num_experts;
  Image image;
  const uint64_t counts = image.add(host.peer_counts, 8 * locals), flags = image.add(host.peer_node_flags, 8 * locals),
                 segments = image.add(rail_segments_, 8ull * w.num_nodes);
  // Results: not part of the upload, which is small.
  const uint64_t weight_bytes = 4ull * host.num_tokens * host.weight_stride,
                 pos_bytes = 4ull * host.num_tokens * w.num_nodes;
  const uint64_t sizes[] = {
      4 * cells, weight_bytes, 4 * cells, 4 * cells, pos_bytes, pos_bytes, 4ull * kExchangeWarps<CudaArch> * columns};
  uint64_t offsets[7], total = 0;
  for (int i = 0; i < 7; ++i) offsets[i] = total, total = align_up(total + sizes[i], 128);
  const Block results(total, device_.stream());
  auto at = [&](int i) { return static_cast<unsigned char*>(results.data) + offsets[i]; };
  std::vector<unsigned char*> node_tokens;
  for (int n = 0; n < w.num_nodes; ++n) node_tokens.push_back(at(5) + 4ull * n * host.num_tokens);
  const uint64_t token_table = image.add(node_tokens);
  image.upload(device_.stream());

  ExchangeParams p = host;
  p.peer_counts = image.at<unsigned char* const>(counts);
  p.peer_node_flags = image.at<uint64_t* const>(flags);
  p.node_tokens = image.at<uint32_t* const>(token_table);
  p.pair_expert = reinterpret_cast<int32_t*>(at(0)), p.pair_weight = reinterpret_cast<float*>(at(1));
  p.pair_pos = reinterpret_cast<uint32_t*>(at(2)), p.row_pos = reinterpret_cast<uint32_t*>(at(3));
  p.node_pos = reinterpret_cast<int32_t*>(at(4)), p.columns = reinterpret_cast<uint32_t*>(at(6));
  launch<ExchangeParams>(exchange_entry<Net>, p, s, 1, kThreads<kExchangeWarps<CudaArch>>, 0,
                         image.at<unsigned char* const>(segments));
  device_.wait(s.interrupted);  // first: a copy to pageable memory would wait inside the driver, where others want in
  auto bring = [&](void* to, int i) {
    if (sizes[i])
      check(cudaMemcpyAsync(to, at(i), sizes[i], cudaMemcpyDeviceToHost, device_.stream()), "reading the routing");
  };
  bring(host.pair_expert, 0), bring(host.pair_weight, 1), bring(host.pair_pos, 2), bring(host.row_pos, 3);
  bring(host.node_pos, 4);
  for (int n = 0; n < w.num_nodes && host.num_tokens; ++n)
    check(cudaMemcpyAsync(host.node_tokens[n], node_tokens[size_t(n)], 4ull * host.num_tokens, cudaMemcpyDeviceToHost,
                          device_.stream()),
          "reading the routing");
  device_.wait({});
}

template <class Net>
void CudaExecutor<Net>::dispatch(DispatchParams& host, const LaunchSettings& s) {
  plan_dispatch_smem<CudaArch>(host, uint64_t(budget_));
  PlanCopy& plan = plan_copy(host.plan, host.world, host.message.record_bytes, s);
  Image image;
  const Tables tables = add_tables(image, host);
  // The weights of the routing lie in the host's plan, a caller's own on the device.
  const bool upload_weights = host.weights && host.plan.num_tokens && !on_device(host.weights);
  const uint64_t weights =
      upload_weights ? image.add(host.weights, 4ull * host.plan.num_tokens * host.plan.weight_stride) : 0;
  image.upload(device_.stream());
  DispatchParams p = host;
  p.plan = plan.view(host.plan, device_.stream());
  point_to(p, image, tables);
  if (upload_weights) p.weights = image.at<const float>(weights);
  launch<DispatchParams>(dispatch_entry<Net>, p, s, s.num_blocks, kThreads<kDispatchWarps>, p.smem_bytes,
                         image.at<unsigned char* const>(tables.rail_segments));
  if (!host.plan.fresh) return;
  device_.wait(s.interrupted);
  plan.bring_back(device_.stream());
  device_.wait({});
}

template <class Net>
void CudaExecutor<Net>::sum(void (*entry)(CombineParams, Net, CudaControl*), CombineParams& host,
                            const LaunchSettings& s, int threads) {
  plan_combine_smem<CudaArch>(host, uint64_t(budget_));
  PlanCopy& plan = plan_copy(host.plan, host.world, host.record_bytes, s);
  Image image;
  const Tables tables = add_tables(image, host);
  image.upload(device_.stream());
  CombineParams p = host;
  p.plan = plan.view(host.plan, device_.stream());
  point_to(p, image, tables);
  launch<CombineParams>(entry, p, s, s.num_blocks, threads, p.smem_bytes,
                        image.at<unsigned char* const>(tables.rail_segments));
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
