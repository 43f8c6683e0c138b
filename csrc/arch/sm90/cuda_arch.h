// hep::Arch on CUDA, sm_90a and sm_100: mbarriers, bulk copies and system-scope flags. One object is one lane and
// lives in registers.
//
// Why the orderings hold (docs/memory_model.md has the table):
// * A wait acquires through the generic proxy, but what it licenses is usually a bulk load, which reads through the
//   async proxy. So every acquire of a global flag ends with fence.proxy.async.global, by the lane that acquired, which
//   is the lane that issues the loads.
// * bulk_wait<0> is cp.async.bulk.wait_group (without .read): the writes are complete, and completion of a bulk copy is
//   followed by an implicit generic-async proxy fence. They are then writes that this lane has observed, and its next
//   release, being cumulative, carries them. No further fence is needed between the two.
// * A lane that leaves after a deadline leaves nobody waiting for it. Waits for something to happen poll, meetings of
//   a reduce group too (group_sync is an mbarrier and not bar.sync). Meetings of a warp and of a block are the
//   hardware's, which counts lanes that have exited as come: where lanes meet behind a wait they ask whether all did
//   (warp_whole, block_whole), and a warp that is not whole does not arrive for its group.
#pragma once
#include <bit>
#include <type_traits>

#include "arch/concept.h"
#include "arch/sm90/timeout.h"

namespace hep {

class CudaArch {
 public:
  struct Mbarrier {
    uint64_t word;
  };
  static constexpr int kLanes = 32, kLineLanes = line_lanes(kLanes), kLineWords = Line::kWords / kLineLanes;
  static constexpr int kGroupWarps = 4;  // warps of every named group
  static constexpr int kGroups = 4;      // ids 0..3

  // By every lane at the start of a kernel, which calls block_sync before anything meets.
  HEP_DEVICE explicit CudaArch(CudaControl* control) : control_(control) {
    if (threadIdx.x == 0)
      for (int i = 0; i < kGroups; ++i) ptx::mbarrier_init(group_bars() + i, kGroupWarps);
  }

  HEP_DEVICE int lane() const { return int(threadIdx.x % kLanes); }
  HEP_DEVICE int warp_idx() const { return int(threadIdx.x / kLanes); }
  HEP_DEVICE int num_warps() const { return int(blockDim.x / kLanes); }
  HEP_DEVICE int block_idx() const { return int(blockIdx.x); }
  HEP_DEVICE int num_blocks() const { return int(gridDim.x); }
  HEP_DEVICE void set_role(Role role) { role_ = role; }
  HEP_DEVICE void did(LoopStep) {}

  HEP_DEVICE bool elect_one() { return ptx::elect_sync(); }
  HEP_DEVICE void warp_sync() { __syncwarp(); }
  HEP_DEVICE void block_sync() { __syncthreads(); }
  HEP_DEVICE bool warp_whole() {
    const bool whole = ptx::lanes_here() == ~0u;
    __syncwarp();  // a vote orders no memory
    return whole;
  }
  HEP_DEVICE bool warp_any(bool yes) { return ptx::ballot(yes) != 0; }
  HEP_DEVICE bool block_whole() { return __syncthreads_count(1) == int(blockDim.x); }
  // A lane of the block looks at the host's word, about a microsecond away, and all others at the device's.
  HEP_DEVICE bool given_up() const { return raised(threadIdx.x == 0); }
  // One arrival a warp, behind a __syncwarp: the lanes' accesses are ordered before it, and the arrival (release, cta)
  // pairs with everybody's wait (acquire, cta). A warp arrives for phase k + 1 only after all its lanes saw phase k, so
  // no lane is lapped. Without one of its lanes a warp's part of the tile is missing: it leaves, and the others follow.
  HEP_DEVICE void group_sync(int id, int /*num_warps: kGroupWarps*/) {
    if (!warp_whole()) {
      death::leave();
      __builtin_unreachable();
    }
    if (lane() == 0) ptx::mbarrier_arrive(group_bars() + id);
    wait_phase(group_bars() + id, (group_phases_ >> id) & 1, {Site::kBlockSync, -1, id});
    group_phases_ ^= 1u << id;
  }

  // The fence makes the new barrier known to the async proxy, which completes bytes on it.
  HEP_DEVICE void mbar_init(Mbarrier& bar, uint32_t arrivals, bool /*guards_refill*/) {
    ptx::mbarrier_init(&bar, arrivals);
    ptx::fence_proxy_async_shared();
  }
  HEP_DEVICE void mbar_arrive(Mbarrier& bar) { ptx::mbarrier_arrive(&bar); }
  HEP_DEVICE void mbar_arrive_expect_tx(Mbarrier& bar, uint32_t bytes) { ptx::mbarrier_arrive_expect_tx(&bar, bytes); }
  HEP_DEVICE void mbar_wait(Mbarrier& bar, uint32_t parity, const WaitInfo& info) { wait_phase(&bar, parity, info); }
  HEP_DEVICE bool mbar_test(Mbarrier& bar, uint32_t parity) { return ptx::mbarrier_test_wait(&bar, parity); }

  HEP_DEVICE void bulk_g2s(void* dst, const void* src, uint32_t bytes, Mbarrier& bar) {
    ptx::bulk_g2s(dst, src, bytes, &bar);
  }
  HEP_DEVICE void bulk_s2g(void* dst, const void* src, uint32_t bytes) { ptx::bulk_s2g(dst, src, bytes); }
  HEP_DEVICE void bulk_commit() { ptx::bulk_commit_group(); }
  template <int kNewest>
  HEP_DEVICE void bulk_wait_read() {
    ptx::bulk_wait_group_read<kNewest>();
  }
  template <int kNewest>
  HEP_DEVICE void bulk_wait() {
    ptx::bulk_wait_group<kNewest>();
  }
  HEP_DEVICE void publish_shared() { ptx::fence_proxy_async_shared(); }

  template <class T>
  HEP_DEVICE T ld_shared(const T* p) const {
    check_type<T>();
    if constexpr (sizeof(T) == 16)
      return std::bit_cast<T>(ptx::ld_shared_v4(p));
    else if constexpr (sizeof(T) == 8)
      return std::bit_cast<T>(ptx::ld_shared_u64(p));
    else if constexpr (sizeof(T) == 4)
      return std::bit_cast<T>(ptx::ld_shared_u32(p));
    else
      return *static_cast<const volatile T*>(p);
  }
  template <class T>
  HEP_DEVICE void st_shared(T* p, const std::type_identity_t<T>& v) const {
    check_type<T>();
    if constexpr (sizeof(T) == 16)
      ptx::st_shared_v4(p, std::bit_cast<ptx::Word16>(v));
    else if constexpr (sizeof(T) == 8)
      ptx::st_shared_u64(p, std::bit_cast<uint64_t>(v));
    else if constexpr (sizeof(T) == 4)
      ptx::st_shared_u32(p, std::bit_cast<uint32_t>(v));
    else
      *static_cast<volatile T*>(p) = v;
  }
  // Weak accesses; the acquire before a load makes the SM drop what its L1 holds from before.
  template <class T>
  HEP_DEVICE T ld_global(const T* p) const {
    check_type<T>();
    return *p;
  }
  template <class T>
  HEP_DEVICE void st_global(T* p, const std::type_identity_t<T>& v) const {
    check_type<T>();
    *p = v;
  }

  HEP_DEVICE uint64_t ld_acquire_sys(const uint64_t* flag) {
    const uint64_t v = ptx::ld_acquire_sys(flag);
    ptx::fence_proxy_async_global();  // bulk loads that the value licenses come after it, see above
    return v;
  }
  HEP_DEVICE void st_release_sys(uint64_t* flag, uint64_t value) { ptx::st_release_sys(flag, value); }
  HEP_DEVICE void add_release_sys(uint64_t* flag, uint64_t value) { ptx::red_add_release_sys(flag, value); }
  HEP_DEVICE uint64_t add_acq_rel_rank(uint64_t* flag, uint64_t value) {
    return ptx::atom_add_acq_rel_gpu(flag, value);
  }
  HEP_DEVICE uint64_t add_acq_rel_sys(uint64_t* flag, uint64_t value) { return ptx::atom_add_acq_rel_sys(flag, value); }
  HEP_DEVICE uint64_t take_rank(uint64_t* word) { return ptx::atom_add_relaxed_gpu(word, 1); }
  HEP_DEVICE uint64_t clock_ns() { return ptx::globaltimer(); }
  HEP_DEVICE void count_rank(uint64_t* word, uint64_t value) { ptx::red_add_relaxed_gpu(word, value); }
  HEP_DEVICE void wait_ge_sys(const uint64_t* flag, uint64_t value, const WaitInfo& info) {
    uint64_t since = 0;
    for (;;) {
      const uint64_t seen = ptx::ld_acquire_sys(flag);
      if (seen >= value) break;
      look_up(since, info, value, seen);
    }
    ptx::fence_proxy_async_global();
  }
  // Cumulative, as each release would be: fence and relaxed stores are a release pattern for every one of the flags.
  template <class Flag>
  HEP_DEVICE void st_release_sys_each(int n, const Flag& flag, uint64_t value) {
    ptx::fence_acq_rel_sys();
    for (int i = 0; i < n; ++i) ptx::st_relaxed_sys(flag(i), value);
  }
  template <class Flag, class Value>
  HEP_DEVICE void add_release_sys_each(int n, const Flag& flag, const Value& value) {
    ptx::fence_acq_rel_sys();
    for (int i = 0; i < n; ++i)
      if (const uint64_t v = value(i)) ptx::red_add_relaxed_sys(flag(i), v);
  }
  // By one lane, a flag after the other; what it saw is acquired by the fence behind.
  template <class Flag, class Info, class Waited = NotCounted>
  HEP_DEVICE void wait_ge_sys_each(int n, const Flag& flag, uint64_t value, const Info& info,
                                   const Waited& waited = {}) {
    uint64_t begin = 0;
    for (int i = 0; i < n; ++i) look_for(flag(i), value, i, info, begin, waited);
    ptx::fence_acq_rel_sys();
    ptx::fence_proxy_async_global();
  }
  // All lanes fence, by one instruction of their warp: each lane's store needs a fence of its own before it to be a
  // release pattern, and the meeting makes what the others did part of what it releases.
  template <class Flag>
  HEP_DEVICE void st_release_sys_warp(int n, const Flag& flag, uint64_t value) {
    __syncwarp();
    ptx::fence_acq_rel_sys();
    for (int i = lane(); i < n; i += kLanes) ptx::st_relaxed_sys(flag(i), value);
  }
  // A load of every lane is in flight at a time. They come together first, so that none polls beside a lane at work.
  template <class Flag, class Info, class Waited = NotCounted>
  HEP_DEVICE bool wait_ge_sys_warp(int n, const Flag& flag, uint64_t value, const Info& info,
                                   const Waited& waited = {}) {
    __syncwarp();
    uint64_t begin = 0;
    for (int i = lane(); i < n; i += kLanes) look_for(flag(i), value, i, info, begin, waited);
    const bool whole = ptx::lanes_here() == ~0u;
    ptx::fence_acq_rel_sys();
    ptx::fence_proxy_async_global();
    __syncwarp();  // what a lane acquired is the warp's
    return whole;
  }

  // A combine on sm_90a has no registers left for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
  static constexpr bool kMayLookTogether = false;
#else
  static constexpr bool kMayLookTogether = true;
#endif
  HEP_DEVICE bool looks_together() const { return kMayLookTogether; }
  template <class Flag, class Info>
  HEP_DEVICE void acquire_ge_sys_warp(int n, const Flag& flag, uint64_t value, const Info& info) {
    __syncwarp();
    HEP_NO_UNROLL
    for (int i = lane(); i < n; i += kLanes)
      if (const uint64_t* const word = flag(i)) {
        uint64_t since = 0;
        for (uint64_t seen; (seen = ptx::ld_acquire_sys(word)) < value;) look_up(since, info(i), value, seen);
      }
    if (ptx::lanes_here() != ~0u) {
      death::leave();
      __builtin_unreachable();
    }
    ptx::fence_proxy_async_global();
    __syncwarp();  // what a lane acquired is the warp's
  }

  // Eight lanes store a line by one instruction of their warp, in one transaction of 128 bytes, which NVLink keeps
  // together (docs/latency.md): they come together first, for lanes that have gone apart would store it in parts. A
  // lane that has left has no vote, so that nothing comes for its warp.
  HEP_DEVICE void st_line(Line* dst, const uint64_t* words, uint64_t flag) {
    static_assert(kLineWords == 2);
    __syncwarp();
    if (dst) ptx::st_volatile_v2(dst->words + first_line_word(), words[0], has_line_flag() ? flag : words[1]);
  }
  HEP_DEVICE bool ld_line(const Line* src, uint64_t flag, uint64_t* words) {
    __syncwarp();
    if (src) ptx::ld_volatile_v2(src->words + first_line_word(), words);
    return ptx::ballot(!src || !has_line_flag() || words[1] == flag) == ~0u;
  }

  HEP_DEVICE void poll_idle(const WaitInfo& info, uint64_t expected, uint64_t seen) {
    look_up(idle_since_, info, expected, seen);
    __nanosleep(64);  // the flags that the role polls share a link with the data
  }
  HEP_DEVICE void poll_reset() { idle_since_ = 0; }

 private:
  HEP_DEVICE int first_line_word() const { return lane() % kLineLanes * kLineWords; }
  HEP_DEVICE bool has_line_flag() const { return lane() % kLineLanes == kLineLanes - 1; }
  // A whole line, so that stages behind it are aligned to lines: a linker of device code, as NVSHMEM needs, begins the
  // rest of a block's shared memory right behind this, whatever alignment that asks for.
  struct alignas(128) GroupBars {
    Mbarrier bars[kGroups];
    unsigned char rest[128 - kGroups * sizeof(Mbarrier)];
  };
  static HEP_DEVICE Mbarrier* group_bars() {
    __shared__ GroupBars group;
    return group.bars;
  }
  template <class T>
  static HEP_DEVICE constexpr void check_type() {
    static_assert(std::is_trivially_copyable_v<T>);
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  }
  HEP_DEVICE void wait_phase(Mbarrier* bar, uint32_t parity, const WaitInfo& info) {
    uint64_t since = 0;
    for (uint32_t rounds = 1; !ptx::mbarrier_try_wait(bar, parity); ++rounds)
      if (rounds % 64 == 0) look_up(since, info, 1, 0);  // expected: one more phase
  }
  // For the i-th of several flags, by one lane, whose first wait for one of them began at `begin`, 0: none yet.
  template <class Info, class Waited>
  HEP_DEVICE void look_for(const uint64_t* flag, uint64_t value, int i, const Info& info, uint64_t& begin,
                           const Waited& waited) {
    uint64_t since = 0;
    for (uint64_t seen; (seen = ptx::ld_relaxed_sys(flag)) < value;) look_up(since, info(i), value, seen);
    if constexpr (!std::is_same_v<Waited, NotCounted>) {
      if (since == 0) return;
      if (begin == 0) begin = since;
      if (uint64_t* word = waited(i)) count_rank(word, ptx::globaltimer() - begin);
    }
  }
  HEP_DEVICE bool raised(bool by_host) const {
    return ptx::ld_relaxed_sys(by_host ? &control_->timeout_report->raised_by_host : &control_->abort) != 0;
  }
  // In a wait that is not over: has the rank been given up, or is the deadline past? `since` starts at 0. The clock
  // says which word to ask, so that a wait keeps no count: the host's in 4 of 65 microseconds, for a look across PCIe
  // takes longer than a round of most waits. A wait that
  // names nobody (rows of any rank, a stage that another warp fills), or this rank, ends an eighth later: the first
  // report is the only one, and that of another lane may say who is missing.
  HEP_DEVICE void look_up(uint64_t& since, const WaitInfo& info, uint64_t expected, uint64_t seen) {
    const uint64_t now = ptx::globaltimer();
    if (since == 0) since = now;
    if (raised((now >> 12) % 16 == 0)) {
      death::leave();
      __builtin_unreachable();
    }
    const bool names_another = info.peer >= 0 && info.peer != control_->rank;
    if (now - since > control_->timeout_ns + (names_another ? 0 : control_->timeout_ns / 8)) {
      death::expire(control_, role_, info, expected, seen, now - since);
      __builtin_unreachable();
    }
  }

  CudaControl* control_;
  Role role_ = Role::kNone;
  uint64_t idle_since_ = 0;
  uint32_t group_phases_ = 0;
};

static_assert(Arch<CudaArch>);

template <>
struct WarpMath<CudaArch> {
  static constexpr bool kOffered = true;
  // The upper halves decide; of those that are largest the lower ones.
  static HEP_DEVICE int64_t largest(int64_t mine) {
    const int32_t upper = int32_t(mine >> 32), most = ptx::redux_max(upper);
    const uint32_t lower = ptx::redux_max(upper == most ? uint32_t(mine) : 0);
    return int64_t(uint64_t(uint32_t(most)) << 32 | lower);
  }
};

template <>
struct PairMath<CudaArch> {
  template <class T>
  HEP_DEVICE static void widen(uint32_t word, float* v) {
    if constexpr (std::is_same_v<T, Bf16>) {
      v[0] = std::bit_cast<float>(word << 16);
      v[1] = std::bit_cast<float>(word & 0xffff0000u);
    } else {
      v[0] = ptx::cvt_f32_f16(uint16_t(word));
      v[1] = ptx::cvt_f32_f16(uint16_t(word >> 16));
    }
  }
  template <class T>
  HEP_DEVICE static uint32_t round(float lower, float upper) {
    return std::is_same_v<T, Bf16> ? ptx::cvt_rn_bf16x2(lower, upper) : ptx::cvt_rn_f16x2(lower, upper);
  }
};

}  // namespace hep
