// The PTX of the CUDA machine, one function an instruction and named after it. All of it exists since sm_90; the same
// text is assembled for sm_90a and sm_100. Every statement but the conversions is volatile and clobbers memory: the
// compiler keeps their order, the hardware's order is what each instruction's own words say.
#pragma once
#include <cstdint>

#include "common/macros.h"

namespace hep::ptx {

HEP_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Warp and time
HEP_DEVICE bool elect_sync() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected) : : "memory");
  return elected != 0;
}
// The lanes of the warp that are still here, one bit each: a lane that has exited has no vote.
HEP_DEVICE uint32_t lanes_here() {
  uint32_t lanes;
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(lanes)
               :
               : "memory");
  return lanes;
}
// One bit a lane, of those that are still here.
HEP_DEVICE uint32_t ballot(bool yes) {
  uint32_t lanes;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(lanes)
               : "r"(uint32_t(yes))
               : "memory");
  return lanes;
}
// The largest of all lanes' values; orders no memory.
HEP_DEVICE uint32_t redux_max(uint32_t value) {
  uint32_t most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(value) : "memory");
  return most;
}
HEP_DEVICE int32_t redux_max(int32_t value) {
  int32_t most;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(value) : "memory");
  return most;
}
HEP_DEVICE uint64_t globaltimer() {  // nanoseconds; steps of up to a microsecond
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}
HEP_DEVICE void exit() {
  asm volatile("exit;" ::: "memory");
}

// ---- mbarrier
HEP_DEVICE void mbarrier_init(void* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
HEP_DEVICE void mbarrier_arrive(void* bar) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.release.cta.shared::cta.b64 s, [%0]; }" ::"r"(shared_address(bar))
               : "memory");
}
HEP_DEVICE void mbarrier_arrive_expect_tx(void* bar, uint32_t bytes) {
  asm volatile(
      "{ .reg .b64 s; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 s, [%0], %1; }" ::"r"(shared_address(bar)),
      "r"(bytes)
      : "memory");
}
// May suspend the thread for a while that the hardware chooses; false = not yet.
HEP_DEVICE bool mbarrier_try_wait(void* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return done != 0;
}
HEP_DEVICE bool mbarrier_test_wait(void* bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- Bulk copies and proxies
// .shared::cluster names the window; a block's own addresses in it are its own shared memory.
HEP_DEVICE void bulk_g2s(void* dst, const void* src, uint32_t bytes, void* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(dst)),
               "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}
HEP_DEVICE void bulk_s2g(void* dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(dst)),
               "r"(shared_address(src)), "r"(bytes)
               : "memory");
}
HEP_DEVICE void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kNewest>
HEP_DEVICE void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewest) : "memory");
}
template <int kNewest>
HEP_DEVICE void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewest) : "memory");
}
HEP_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
HEP_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- Global flags
HEP_DEVICE void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
HEP_DEVICE uint64_t ld_relaxed_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
HEP_DEVICE void st_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
HEP_DEVICE uint64_t ld_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}
HEP_DEVICE void st_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
HEP_DEVICE void red_add_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
HEP_DEVICE void red_add_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
HEP_DEVICE uint64_t atom_add_acq_rel_gpu(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(__cvta_generic_to_global(p)), "l"(v)
               : "memory");
  return old;
}
HEP_DEVICE uint64_t atom_add_acq_rel_sys(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(__cvta_generic_to_global(p)), "l"(v)
               : "memory");
  return old;
}
HEP_DEVICE uint64_t atom_add_relaxed_gpu(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(__cvta_generic_to_global(p)), "l"(v)
               : "memory");
  return old;
}
HEP_DEVICE void red_add_relaxed_gpu(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(v) : "memory");
}
HEP_DEVICE uint32_t ld_relaxed_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(p)) : "memory");
  return v;
}

// ---- Lines: 16 bytes of a lane
HEP_DEVICE void st_volatile_v2(uint64_t* p, uint64_t first, uint64_t second) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "l"(first), "l"(second)
               : "memory");
}
HEP_DEVICE void ld_volatile_v2(const uint64_t* p, uint64_t* words) {
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(__cvta_generic_to_global(p))
               : "memory");
}

// ---- Shared memory through the generic proxy, by width
struct Word16 {
  uint32_t w[4];
};
HEP_DEVICE Word16 ld_shared_v4(const void* p) {
  Word16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(shared_address(p))
               : "memory");
  return v;
}
HEP_DEVICE uint64_t ld_shared_u64(const void* p) {
  uint64_t v;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
HEP_DEVICE uint32_t ld_shared_u32(const void* p) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}
HEP_DEVICE void st_shared_v4(void* p, const Word16& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(v.w[0]), "r"(v.w[1]),
               "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}
HEP_DEVICE void st_shared_u64(void* p, uint64_t v) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(shared_address(p)), "l"(v) : "memory");
}
HEP_DEVICE void st_shared_u32(void* p, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}

// ---- Conversions of pairs, the first in the lower half: to nearest even, NaN to 0x7fff
HEP_DEVICE uint32_t cvt_rn_bf16x2(float lower, float upper) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
  return word;
}
HEP_DEVICE uint32_t cvt_rn_f16x2(float lower, float upper) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(upper), "f"(lower));
  return word;
}
HEP_DEVICE float cvt_f32_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace hep::ptx
