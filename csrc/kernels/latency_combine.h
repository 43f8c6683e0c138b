// Kernel: latency combine. All warps do the same: a header to every rank, this rank's partial rows to their sources, or
// to who sums them for a source on another node, these sums, then those of its own tokens. Partials wait for nobody,
// sums of the node for nothing but them, so all get theirs. The step ends when every rank has been heard of, with or
// without a row: what the next steps overwrite is licensed by that (pipeline/latency_link.h).
#pragma once
#include "kernels/latency_dispatch.h"
#include "roles/latency_node_sum.h"
#include "roles/latency_partial.h"
#include "roles/latency_sum.h"

namespace hep {

// A block's part of a step, by all warps alike.
template <Arch A, Transport<A> Net>
struct LatencyCombineBlock {
  A& a;
  Net& net;
  const LatencyCombineParams& p;
  const uint64_t flag;
  std::byte* const scratch;  // of this warp

  HEP_DEVICE uint32_t warp() const { return uint32_t(a.block_idx() * a.num_warps() + a.warp_idx()); }
  HEP_DEVICE uint32_t warps() const { return uint32_t(a.num_blocks() * a.num_warps()); }
  HEP_DEVICE void run() {
    if constexpr (kHasRail<Net>) {
      by_types([&](auto types) { partials(types); });
      if (p.partial_dtype == DType::kBf16)
        node_sums<Bf16>();
      else
        p.partial_dtype == DType::kFp16 ? node_sums<Fp16>() : node_sums<float>();
      by_types([&](auto types) { sums(types); });
    } else {  // one choice for both
      by_types([&](auto types) {
        partials(types);
        sums(types);
      });
    }
  }

 private:
  template <class I, class Q>
  struct Types {
    using In = I;
    using P = Q;
  };

  // f(Types) of rows and of partial rows.
  template <class F>
  HEP_DEVICE void by_types(F&& f) {
    const bool wide = p.partial_dtype == DType::kFp32;
    if (p.dtype == DType::kBf16)
      wide ? f(Types<Bf16, float>{}) : f(Types<Bf16, Bf16>{});
    else if (p.dtype == DType::kFp16)
      wide ? f(Types<Fp16, float>{}) : f(Types<Fp16, Fp16>{});
    else
      f(Types<float, float>{});
  }
  template <class T>
  HEP_DEVICE void partials(T) {
    LatencyPartialRole<A, Net, typename T::In, typename T::P>(a, p, flag, scratch).run(warp(), warps());
  }
  template <class P>
  HEP_DEVICE void node_sums() {
    LatencyNodeSumRole<A, Net, P>(a, net, p, flag, scratch).run(warp(), warps());
  }
  template <class T>
  HEP_DEVICE void sums(T) {
    LatencySumRole<A, Net, typename T::In, typename T::P>(a, net, p, flag, scratch).run(warp(), warps());
  }
};

template <Arch A, Transport<A> Net>
HEP_DEVICE void latency_combine_kernel(A& a, Net& net, const LatencyCombineParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  const uint64_t flag =
      p.link.flag(LatencyCall::word(LatencyCall::kCombines, p.partial.row_bytes() / 8, p.dtype, p.partial_dtype));
  const bool first = a.block_idx() == 0 && a.warp_idx() == 0;
  LatencyHello<A, Net> hello{a, net, p.link, flag};
  if (first) hello.send();
  LatencyCombineBlock<A, Net>{a, net, p, flag, smem + uint64_t(a.warp_idx()) * p.scratch_bytes}.run();
  a.set_role(Role::kLatencyLeave);
  if (first) hello.await();
  if (a.block_whole()) leave_step(a, p.progress);
}

// Fills in a warp's scratch memory; returns the bytes that a block needs.
template <Arch A>
inline uint64_t plan_latency_combine(LatencyCombineParams& p) {
  if constexpr (TileMath<A>::kReadsRows) p.scratch_bytes = align_up(LatencyRows<A>::bytes(p), 64);
  return p.scratch_bytes * kExchangeWarps<A>;
}

}  // namespace hep
