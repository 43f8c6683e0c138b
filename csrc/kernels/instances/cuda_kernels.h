// The kernels as CUDA entry points, for one device Transport. The whole machine-dependent part of a kernel is here: an
// Arch and a Transport are made, and the shared role ladder runs.
#pragma once
#include "arch/sm90/cuda_arch.h"
#include "kernels/balance.h"
#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/exchange.h"
#include "kernels/latency_combine.h"
#include "kernels/spare_rails.h"
#include "transport/none.h"

namespace hep {

static_assert(kReduceWarps<CudaArch> == CudaArch::kGroupWarps);

template <int kWarps>
inline constexpr int kThreads = kWarps * CudaArch::kLanes;

HEP_DEVICE std::byte* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char hep_dynamic_shared[];
  return reinterpret_cast<std::byte*>(hep_dynamic_shared);
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kExchangeWarps<CudaArch>>, 1)
    exchange_entry(const __grid_constant__ ExchangeParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  exchange_kernel<CudaArch, Net>(a, net, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kBalanceWarps<CudaArch>>, 1)
    balance_entry(const __grid_constant__ BalanceParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  balance_kernel<CudaArch, Net>(a, net, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kDispatchWarps>, 1)
    dispatch_entry(const __grid_constant__ DispatchParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  dispatch_kernel<CudaArch, Net>(a, net, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kCombineWarps<CudaArch>>, 1)
    combine_entry(const __grid_constant__ CombineParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  combine_kernel<CudaArch, Net>(a, net, p, dynamic_shared());
}

// The latency path of one node.
template <class Net>
__global__ void __launch_bounds__(kThreads<kExchangeWarps<CudaArch>>, 1)
    latency_dispatch_entry(const __grid_constant__ LatencyDispatchParams p, Net, CudaControl* control) {
  CudaArch a(control);
  NoRail none;
  latency_dispatch_kernel(a, none, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kExchangeWarps<CudaArch>>, 1)
    latency_combine_entry(const __grid_constant__ LatencyCombineParams p, Net, CudaControl* control) {
  CudaArch a(control);
  NoRail none;
  latency_combine_kernel(a, none, p, dynamic_shared());
}

// Of several nodes. Kernels of their own, for those of one node are shorter by half and keep less.
template <class Net>
__global__ void __launch_bounds__(kThreads<kExchangeWarps<CudaArch>>, 1)
    latency_dispatch_nodes_entry(const __grid_constant__ LatencyDispatchParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  latency_dispatch_kernel(a, net, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kExchangeWarps<CudaArch>>, 1)
    latency_combine_nodes_entry(const __grid_constant__ LatencyCombineParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  latency_combine_kernel(a, net, p, dynamic_shared());
}

// Of spare slots: within a node, in memory that its ranks map.
template <class Net>
__global__ void __launch_bounds__(kThreads<kSpareWarps<CudaArch>>, 1)
    push_weights_entry(const __grid_constant__ SpareParams p, Net, CudaControl* control) {
  CudaArch a(control);
  push_weights_kernel(a, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kSpareWarps<CudaArch>>, 1)
    await_weights_entry(const __grid_constant__ SpareParams p, Net, CudaControl* control) {
  CudaArch a(control);
  await_weights_kernel(a, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kSpareWarps<CudaArch>>, 1)
    collect_gradients_entry(const __grid_constant__ SpareParams p, Net, CudaControl* control) {
  CudaArch a(control);
  collect_gradients_kernel(a, p, dynamic_shared());
}

// And between nodes, too.
template <class Net>
__global__ void __launch_bounds__(kThreads<kRailWarps<CudaArch>>, 1)
    push_nodes_entry(const __grid_constant__ SpareRailParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  push_nodes_kernel<CudaArch, Net>(a, net, p, dynamic_shared());
}

template <class Net>
__global__ void __launch_bounds__(kThreads<kRailWarps<CudaArch>>, 1)
    collect_nodes_entry(const __grid_constant__ SpareRailParams p, Net net, CudaControl* control) {
  CudaArch a(control);
  collect_nodes_kernel<CudaArch, Net>(a, net, p, dynamic_shared());
}

}  // namespace hep
