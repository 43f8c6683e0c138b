// Kernel: latency combine. All warps do the same: a header to every rank, this rank's partial rows to their sources,
// then the sums of its own tokens. Partials wait for nobody, so the sums get theirs. The step ends when every rank has
// been heard of, with or without a row: what the next steps overwrite is licensed by that (pipeline/latency_link.h).
#pragma once
#include "kernels/latency_dispatch.h"
#include "roles/latency_partial.h"
#include "roles/latency_sum.h"

namespace hep {

template <class In, class P, Arch A>
HEP_DEVICE void latency_rows(A& a, const LatencyCombineParams& p, uint64_t flag, std::byte* smem) {
  const uint32_t warp = uint32_t(a.block_idx() * a.num_warps() + a.warp_idx()),
                 warps = uint32_t(a.num_blocks() * a.num_warps());
  std::byte* const scratch = smem + uint64_t(a.warp_idx()) * p.scratch_bytes;
  LatencyPartialRole<A, In, P>(a, p, flag, scratch).run(warp, warps);
  LatencySumRole<A, In, P>(a, p, flag, scratch).run(warp, warps);
}

template <Arch A>
HEP_DEVICE void latency_combine_kernel(A& a, const LatencyCombineParams& p, std::byte* smem) {
  if (!enter_kernel(a)) return;
  const uint64_t flag = p.link.flag(LatencyCall::word(LatencyCall::kCombines, p.lines(), p.dtype, p.partial_dtype));
  const bool first = a.block_idx() == 0 && a.warp_idx() == 0;
  LatencyHello<A> hello{a, p.link, flag};
  if (first) hello.send();
  const bool wide = p.partial_dtype == DType::kFp32;
  if (p.dtype == DType::kBf16)
    wide ? latency_rows<Bf16, float>(a, p, flag, smem) : latency_rows<Bf16, Bf16>(a, p, flag, smem);
  else if (p.dtype == DType::kFp16)
    wide ? latency_rows<Fp16, float>(a, p, flag, smem) : latency_rows<Fp16, Fp16>(a, p, flag, smem);
  else
    latency_rows<float, float>(a, p, flag, smem);
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
