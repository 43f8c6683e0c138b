// The same loop twice: rows go through a FIFO of shared-memory stages, a warp adds their two halves and a bulk store
// takes the sum away. `templated` says it with the pipeline's types, as the roles do; `written` is the same by hand,
// phases and addresses included. scripts/twin_check.py compares the machine code of the two: what the types cost must
// be next to nothing. Both wait through CudaArch, deadline included, so that the difference is the abstraction's
// alone. Never launched.
#include "arch/sm90/cuda_arch.h"
#include "pipeline/stage_fifo.h"

namespace hep {

struct alignas(16) TwinHead {
  uint32_t stop, row, unused[2];
};
struct TwinParams {
  const unsigned char* rows;  // [num_rows][2][half_bytes]
  unsigned char* sums;        // [num_rows][half_bytes]
  uint32_t num_rows, half_bytes;
  FifoLayout fifo;
  uint64_t sum_at;  // two output tiles in shared memory
};

HEP_DEVICE std::byte* twin_shared() {
  extern __shared__ __align__(128) unsigned char hep_twin_shared[];
  return reinterpret_cast<std::byte*>(hep_twin_shared);
}

HEP_DEVICE float4 add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

#ifdef HEP_TWIN_MUTANT  // what the check is to notice: a loop that is unrolled in one of the two
#define HEP_TWIN_UNROLL _Pragma("unroll 32")
#else
#define HEP_TWIN_UNROLL
#endif

template <class A>
HEP_DEVICE void templated_producer(A& a, const TwinParams& p, const StageFifo<A, TwinHead>& fifo) {
  StageProducer<A, TwinHead> to(fifo);
  for (uint32_t row = uint32_t(a.block_idx()); row < p.num_rows; row += uint32_t(a.num_blocks())) {
    to.acquire(a);
    to.commit(a, {0, row, {}}, 2 * p.half_bytes);
    const unsigned char* from = p.rows + uint64_t(row) * 2 * p.half_bytes;
    to.load(a, 0, from, p.half_bytes);
    to.load(a, p.half_bytes, from + p.half_bytes, p.half_bytes);
    to.advance();
  }
  to.stop(a, {1, 0, {}}, 1);
}

template <class A>
HEP_DEVICE void templated_consumer(A& a, const TwinParams& p, const StageFifo<A, TwinHead>& fifo, std::byte* smem) {
  WarpConsumer<A, TwinHead> from(a, fifo);
  for (uint32_t tile = 0;; tile ^= 1) {
    const TwinHead head = from.wait(a);
    if (head.stop) break;
    auto* out = reinterpret_cast<float4*>(smem + p.sum_at + uint64_t(tile) * p.half_bytes);
    const auto* in = reinterpret_cast<const float4*>(from.data());
    if (a.elect_one()) a.template bulk_wait_read<1>();
    a.warp_sync();
    const uint32_t words = p.half_bytes / 16;
    HEP_TWIN_UNROLL
    for (uint32_t i = uint32_t(a.lane()); i < words; i += A::kLanes)
      a.st_shared(out + i, add(a.ld_shared(in + i), a.ld_shared(in + words + i)));
    from.pass(a);
    if (a.elect_one()) {
      a.bulk_s2g(p.sums + uint64_t(head.row) * p.half_bytes, out, p.half_bytes);
      a.bulk_commit();
    }
  }
  from.pass(a);
  if (a.elect_one()) a.template bulk_wait<0>();
}

__global__ void __launch_bounds__(64, 1) templated(const __grid_constant__ TwinParams p, CudaControl* control) {
  CudaArch a(control);
  const StageFifo<CudaArch, TwinHead> fifo(twin_shared(), p.fifo);
  if (threadIdx.x == 0) fifo.init(a, 1);
  a.block_sync();
  if (a.warp_idx() == 0) {
    if (a.elect_one()) templated_producer(a, p, fifo);
  } else {
    templated_consumer(a, p, fifo, twin_shared());
  }
}

__global__ void __launch_bounds__(64, 1) written(const __grid_constant__ TwinParams p, CudaControl* control) {
  CudaArch a(control);
  std::byte* smem = twin_shared();
  unsigned char* data = reinterpret_cast<unsigned char*>(smem + p.fifo.data_at);
  uint4* heads = reinterpret_cast<uint4*>(smem + p.fifo.heads_at);
  auto* full = reinterpret_cast<CudaArch::Mbarrier*>(smem + p.fifo.full_at);
  auto* empty = reinterpret_cast<CudaArch::Mbarrier*>(smem + p.fifo.empty_at);
  const uint32_t stages = p.fifo.num_stages, stage_bytes = p.fifo.stage_bytes, half = p.half_bytes;
  if (threadIdx.x == 0)
    for (uint32_t i = 0; i < stages; ++i) {
      ptx::mbarrier_init(full + i, 1);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_init(empty + i, 1);
      ptx::fence_proxy_async_shared();
    }
  __syncthreads();
  uint32_t stage = 0, phase = 0;
  if (threadIdx.x / 32 == 0) {
    if (!ptx::elect_sync()) return;
    for (uint32_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
      a.mbar_wait(empty[stage], phase ^ 1, {Site::kStageEmpty, -1, int64_t(stage)});
      ptx::st_shared_v4(heads + stage, {0, row, 0, 0});
      ptx::mbarrier_arrive_expect_tx(full + stage, 2 * half);
      const unsigned char* from = p.rows + uint64_t(row) * 2 * half;
      unsigned char* to = data + uint64_t(stage) * stage_bytes;
      ptx::bulk_g2s(to, from, half, full + stage);
      ptx::bulk_g2s(to + half, from + half, half, full + stage);
      if (++stage == stages) stage = 0, phase ^= 1;
    }
    a.mbar_wait(empty[stage], phase ^ 1, {Site::kStageEmpty, -1, int64_t(stage)});
    ptx::st_shared_v4(heads + stage, {1, 0, 0, 0});
    ptx::mbarrier_arrive(full + stage);
    return;
  }
  for (uint32_t tile = 0;; tile ^= 1) {
    a.mbar_wait(full[stage], phase, {Site::kStageFull, -1, int64_t(stage)});
    const ptx::Word16 head = ptx::ld_shared_v4(heads + stage);
    if (head.w[0]) break;
    float4* out = reinterpret_cast<float4*>(smem + p.sum_at + uint64_t(tile) * half);
    const float4* in = reinterpret_cast<const float4*>(data + uint64_t(stage) * stage_bytes);
    if (ptx::elect_sync()) ptx::bulk_wait_group_read<1>();
    __syncwarp();
    for (uint32_t i = threadIdx.x % 32; i < half / 16; i += 32) {
      const float4 sum = add(std::bit_cast<float4>(ptx::ld_shared_v4(in + i)),
                             std::bit_cast<float4>(ptx::ld_shared_v4(in + half / 16 + i)));
      ptx::st_shared_v4(out + i, std::bit_cast<ptx::Word16>(sum));
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::elect_sync()) {
      ptx::mbarrier_arrive(empty + stage);
      ptx::bulk_s2g(p.sums + uint64_t(head.w[1]) * half, out, half);
      ptx::bulk_commit_group();
    }
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  if (ptx::elect_sync()) ptx::bulk_wait_group<0>();
}

}  // namespace hep
