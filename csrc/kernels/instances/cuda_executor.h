// The kernels on a GPU, launched on the caller's stream. No launch is waited for: plans are placed by the exchange
// kernel and lie on the device, and a host that wants the counts polls pinned memory for the kernel's notification,
// while the stream runs on. A deadline that expires in a launch is reported by that poll or by the next call.
//
// Forward progress: blocks of one launch wait for one another and for other ranks' launches, so all must be resident:
// a launch has at most as many blocks as the device has SMs; beside kernels that hold SMs for long (a collective that
// waits for another GPU), grant the two together no more SMs than there are. Virtual ranks on one device need a stream
// each and as many hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) as there are streams.
#pragma once
#include "kernels/instances/cuda_device.h"

namespace hep::cuda {

template <class Net>
class CudaExecutor final : public Executor {
 public:
  CudaExecutor(unsigned char* const* rail_segments, uint64_t seed) : rail_segments_(rail_segments), seed_(seed) {
    load(exchange_entry<Net>);
    load(dispatch_entry<Net>);
    load(combine_entry<Net>);
    load(balance_entry<Net>);
    load(latency_dispatch_entry<Net>);
    load(latency_combine_entry<Net>);
    load(latency_dispatch_nodes_entry<Net>);
    load(latency_combine_nodes_entry<Net>);
    load(push_weights_entry<Net>);
    load(await_weights_entry<Net>);
    load(collect_gradients_entry<Net>);
    load(push_nodes_entry<Net>);
    load(collect_nodes_entry<Net>);
  }

  // One upload for the life of the buffer. With the deadline's: a launch then needs none, and can be captured.
  TableView adopt(const RankTables& t, const LaunchSettings& s) override {
    const auto add = [&](const auto& v) { return tables_.add(v.data(), v.size() * sizeof v[0]); };
    const uint64_t peers = add(t.peers), ready = add(t.peer_ready), done = add(t.peer_done),
                   node_flags = add(t.peer_node_flags), recv = add(t.recv), arena = add(t.arena),
                   counts = add(t.peer_counts);
    rail_table_ = tables_.add(rail_segments_, 8ull * s.world.num_nodes);
    tables_.upload(device_.stream());
    (void)device_.control(s);
    // The ranks meet once all have come so far. Nothing of this buffer may then be queued that a rank waits for, behind
    // another rank's kernel: virtual ranks have hardware queues for their streams, and none for this one.
    cuda::check(cudaStreamSynchronize(device_.stream()), "upload");
    return {tables_.at<const RailPeer>(peers),       tables_.at<uint64_t* const>(ready),
            tables_.at<uint64_t* const>(done),       tables_.at<uint64_t* const>(node_flags),
            tables_.at<unsigned char* const>(recv),  tables_.at<unsigned char* const>(arena),
            tables_.at<unsigned char* const>(counts)};
  }
  bool shares_memory() const override { return false; }
  std::shared_ptr<void> allocate(uint64_t bytes) override {
    auto block = std::make_shared<Block>(bytes, device_.stream());
    cuda::check(cudaMemsetAsync(block->data, 0, bytes, device_.stream()), "memset");
    return {block, block->data};
  }
  void write(void* to, const void* from, uint64_t bytes) override {
    require_no_capture();
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, device_.stream()), "upload");
  }
  void read(void* to, const void* from, uint64_t bytes) override {
    require_no_capture();
    device_.wait();
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, device_.stream()), "download");
    device_.wait();
  }
  // Pinned, and under unified addressing at the same address for the device. Made with the buffer: pinning may wait for
  // the device.
  std::shared_ptr<void> allocate_notification(uint64_t bytes) override {
    const OutsideCaptures outside;
    void* notification = nullptr;
    cuda::check(cudaHostAlloc(&notification, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "mapped memory");
    std::memset(notification, 0, bytes);
    return {notification, Freed<cudaFreeHost>{}};
  }
  void drain() noexcept override { device_.drain(); }
  void set_stream(void* stream) override { device_.use(static_cast<cudaStream_t>(stream)); }
  std::optional<TimeoutReport> timeout_report() override { return device_.timeout_report(); }
  void check() override { (void)device_.idle(); }
  void abort() noexcept override {
    try {
      device_.abort();
    } catch (const std::exception&) {  // the device is lost, which is worse and will be said
    }
  }

  int most_blocks() const override { return device_.num_sms(); }
  void require_shared_memory(const ExchangeParams& params) const override {
    ExchangeParams p = params;
    const uint64_t shared = plan_exchange<CudaArch>(p, uint64_t(budget_), 1);
    if (shared > uint64_t(budget_))
      throw std::invalid_argument("num_experts: counting the rows for " + std::to_string(p.layout.num_experts) +
                                  " experts on " + std::to_string(p.layout.num_ranks) + " ranks needs " +
                                  std::to_string(shared) + " bytes of shared memory and a block has " +
                                  std::to_string(budget_) + "; use fewer experts");
  }
  void require_shared_memory(const DispatchParams& params) const override {
    DispatchParams p = params;
    require_budget(plan_dispatch_smem<CudaArch>(p, uint64_t(budget_)));
  }
  void require_shared_memory(const CombineParams& params) const override {
    CombineParams p = params;
    require_budget(plan_combine_smem<CudaArch>(p, uint64_t(budget_)));
  }

  void require_shared_memory(const LatencyDispatchParams& params, int num_blocks) const override {
    LatencyDispatchParams p = params;
    require_budget(plan_latency_dispatch<CudaArch>(p, uint64_t(budget_), num_blocks));
  }

  void require_shared_memory(const BalanceParams& params) const override {
    BalanceParams p = params;
    if (const uint64_t shared = plan_balance<CudaArch>(p, uint64_t(budget_), 1); shared > uint64_t(budget_))
      throw std::invalid_argument("clones: planning for " + std::to_string(p.shape.num_experts) + " experts on " +
                                  std::to_string(p.shape.num_ranks) + " ranks with " +
                                  std::to_string(p.shape.spare_slots) + " spare slots each needs " +
                                  std::to_string(shared) + " bytes of shared memory and a block has " +
                                  std::to_string(budget_) + "; use fewer");
  }
  void balance(const BalanceParams& params, const LaunchSettings& s) override {
    BalanceParams p = params;
    const uint64_t shared = plan_balance<CudaArch>(p, uint64_t(budget_), s.num_blocks);
    launch<BalanceParams>(balance_entry<Net>, p, s, s.num_blocks, kThreads<kBalanceWarps<CudaArch>>, shared);
  }
  void exchange(const ExchangeParams& params, const LaunchSettings& s) override {
    ExchangeParams p = params;
    const uint64_t shared = plan_exchange<CudaArch>(p, uint64_t(budget_), s.num_blocks);
    launch<ExchangeParams>(exchange_entry<Net>, p, s, s.num_blocks, kThreads<kExchangeWarps<CudaArch>>, shared);
  }
  void dispatch(DispatchParams& p, const LaunchSettings& s) override {
    plan_dispatch_smem<CudaArch>(p, uint64_t(budget_));
    launch<DispatchParams>(dispatch_entry<Net>, p, s, s.num_blocks, kThreads<kDispatchWarps>, p.smem_bytes);
  }
  void combine(CombineParams& p, const LaunchSettings& s) override {
    plan_combine_smem<CudaArch>(p, uint64_t(budget_));
    launch<CombineParams>(combine_entry<Net>, p, s, s.num_blocks, kThreads<kCombineWarps<CudaArch>>, p.smem_bytes);
  }
  void latency_dispatch(LatencyDispatchParams& p, const LaunchSettings& s) override {
    constexpr int kLatencyThreads = kThreads<kExchangeWarps<CudaArch>>;
    plan_latency_dispatch<CudaArch>(p, uint64_t(budget_), s.num_blocks);
    const auto entry = s.world.num_nodes > 1 ? latency_dispatch_nodes_entry<Net> : latency_dispatch_entry<Net>;
    launch<LatencyDispatchParams>(entry, p, s, s.num_blocks, kLatencyThreads, p.smem_bytes);
  }
  void latency_combine(LatencyCombineParams& p, const LaunchSettings& s) override {
    constexpr int kLatencyThreads = kThreads<kExchangeWarps<CudaArch>>;
    const auto entry = s.world.num_nodes > 1 ? latency_combine_nodes_entry<Net> : latency_combine_entry<Net>;
    launch<LatencyCombineParams>(entry, p, s, s.num_blocks, kLatencyThreads, 0);
  }
  void require_shared_memory(const SpareParams& params) const override {
    SpareParams p = params;
    require_slots(p, p.world.num_ranks(), plan_push<CudaArch>(p, kSpareWarps<CudaArch>, uint64_t(budget_)));
  }
  void require_shared_memory(const SpareRailParams& params) const override {
    if constexpr (kRailIsNic<Net>) require_rdma_order();
    SpareRailParams p = params;
    require_slots(p.node, p.world.num_ranks(), plan_push_nodes<CudaArch, Net>(p, uint64_t(budget_)));
  }
  void push_weights(const SpareParams& params, const LaunchSettings& s) override {
    SpareParams p = params;
    const uint64_t shared = plan_push<CudaArch>(p, kSpareWarps<CudaArch>, uint64_t(budget_));
    launch<SpareParams>(push_weights_entry<Net>, p, s, s.num_blocks, kThreads<kSpareWarps<CudaArch>>, shared);
  }
  void await_weights(const SpareParams& params, const LaunchSettings& s) override {
    SpareParams p = params;
    const uint64_t shared = SpareTable<CudaArch>::bytes(p);
    launch<SpareParams>(await_weights_entry<Net>, p, s, 1, kThreads<kSpareWarps<CudaArch>>, shared);
  }
  void collect_gradients(const SpareParams& params, const LaunchSettings& s) override {
    SpareParams p = params;
    const uint64_t shared = SpareTable<CudaArch>::bytes(p);
    launch<SpareParams>(collect_gradients_entry<Net>, p, s, s.num_blocks, kThreads<kSpareWarps<CudaArch>>, shared);
  }
  void push_nodes(const SpareRailParams& params, const LaunchSettings& s) override {
    SpareRailParams p = params;
    const uint64_t shared = plan_push_nodes<CudaArch, Net>(p, uint64_t(budget_));
    launch<SpareRailParams>(push_nodes_entry<Net>, p, s, p.num_blocks(), kThreads<kRailWarps<CudaArch>>, shared);
  }
  void collect_nodes(const SpareRailParams& params, const LaunchSettings& s) override {
    SpareRailParams p = params;
    const uint64_t shared = collect_nodes_bytes<CudaArch>(p);
    launch<SpareRailParams>(collect_nodes_entry<Net>, p, s, p.num_blocks(), kThreads<kRailWarps<CudaArch>>, shared);
  }

 private:
  template <class Entry>
  void load(Entry* kernel) {  // now: later that could wait for a running one
    const void* entry = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes a{};
    cuda::check(cudaFuncGetAttributes(&a, entry), "this build has no kernel for this device");
    const int budget = device_.max_shared() - int(a.sharedSizeBytes);
    cuda::check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, budget), "shared memory");
    budget_ = std::min(budget_, budget);
  }
  Net net(unsigned char* const* segments, const World& world) const {
    if constexpr (std::is_constructible_v<Net, unsigned char* const*, uint64_t>)
      return Net(segments, seed_);
    else if constexpr (std::is_constructible_v<Net, unsigned char* const*, const World&>)
      return Net(segments, world);
    else
      return Net(segments);
  }
  // What the host reads now, or writes once, is no part of a graph.
  void require_no_capture() const {
    if (Device::capturing(device_.stream()))
      throw std::invalid_argument(
          "the counters of this buffer cannot be read or reset while its stream captures a CUDA graph; ask before the "
          "capture or after it");
  }
  static void require_rdma_order() {
    int device = 0, order = 0;
    cuda::check(cudaGetDevice(&device), "the current device");
    cuda::check(cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, device), "order of RDMA writes");
    if (order < cudaGPUDirectRDMAWritesOrderingAllDevices)
      throw std::invalid_argument("spares: clones_within_node=True, for this GPU orders RDMA writes for itself alone");
  }
  void require_slots(const SpareParams& p, int ranks, uint64_t shared) const {
    if (shared > uint64_t(budget_))
      throw std::invalid_argument("spare_slots: " + std::to_string(p.spare_slots) + " on each of " +
                                  std::to_string(ranks) + " ranks need " + std::to_string(shared) +
                                  " bytes of shared memory and a block has " + std::to_string(budget_) + "; use fewer");
  }
  void require_budget(uint64_t shared) const {
    if (shared > uint64_t(budget_))
      throw std::invalid_argument("a token needs " + std::to_string(shared) +
                                  " bytes of shared memory and a block has " + std::to_string(budget_) +
                                  "; use fewer experts or ranks a token, or smaller scales");
  }
  template <class P>
  void launch(void (*entry)(P, Net, CudaControl*), P& p, const LaunchSettings& s, int blocks, int threads,
              uint64_t shared) {
    Net rail = net(tables_.at<unsigned char* const>(rail_table_), s.world);
    CudaControl* control = device_.control(s);
    ++launches_;
    void* args[] = {&p, &rail, &control};
    cuda::check(cudaLaunchKernel(reinterpret_cast<const void*>(entry), dim3(unsigned(blocks)), dim3(unsigned(threads)),
                                 args, shared, device_.stream()),
                "launch");
  }

  unsigned char* const* rail_segments_;
  uint64_t seed_;
  Device device_;
  Image tables_;
  uint64_t rail_table_ = 0;
  int budget_ = std::numeric_limits<int>::max();  // of any kernel
};

}  // namespace hep::cuda
