// hep::Arch on the host. HostArch is a handle to one lane; the Model says what memory does (plain or
// checked), the Model's Exec says how lanes wait (fibers or threads). What is common is here: identity,
// meetings of lanes, flags.
#pragma once
#include <atomic>
#include <type_traits>
#include <utility>

#include "arch/concept.h"
#include "arch/host/checked_model.h"
#include "arch/host/lane.h"
#include "arch/host/plain_model.h"
#include "arch/host/scheduler.h"
#include "arch/host/threads.h"

namespace hep::host {

template <class ModelOf, int kLanesOf>
class HostArch {
 public:
  using Model = ModelOf;
  using Exec = typename Model::Exec;
  using Lane = typename Model::Lane;
  using Mbarrier = host::Mbarrier;
  static constexpr int kLanes = kLanesOf, kLineLanes = line_lanes(kLanes), kLineWords = Line::kWords / kLineLanes;

  explicit HostArch(Lane& lane) : me_(&lane) {}

  int lane() const { return kLanes == 1 ? 0 : me_->lane; }
  int warp_idx() const { return me_->warp; }
  int num_warps() const { return me_->block->config->num_warps; }
  int block_idx() const { return me_->block->idx; }
  int num_blocks() const { return me_->block->config->num_blocks; }
  void set_role(Role role) { me_->role = role_name(role); }
  void did(LoopStep) {}

  bool elect_one() {
    Model::meets_warp(*me_, true);
    if constexpr (kLanes > 1) meet(warp_word(), kLanes, std::memory_order_relaxed);
    return kLanes == 1 || me_->lane == me_->elected_lane;
  }
  void warp_sync() {
    Model::meets_warp(*me_, false);
    if constexpr (kLanes > 1) meet(warp_word(), kLanes, std::memory_order_acq_rel);
  }
  void group_sync(int id, int num_warps_in_group) {
    Model::meets_group(*me_, id, num_warps_in_group);
    meet(me_->block->group_arrived[id & 15], uint64_t(num_warps_in_group) * kLanes, std::memory_order_acq_rel);
  }
  void block_sync() {
    Model::step(*me_);
    meet(me_->block->block_arrived, uint64_t(num_warps()) * kLanes, std::memory_order_acq_rel);
  }
  // A lane that fails ends all the others in their next meeting: whoever comes back from one was not missed.
  bool warp_whole() { return warp_sync(), true; }
  bool warp_any(bool yes) { return !all_of_warp(!yes); }
  bool block_whole() { return block_sync(), true; }
  bool given_up() const { return me_->block->config->given_up; }

  void mbar_init(Mbarrier& bar, uint32_t arrivals, bool guards_refill) {
    Model::mbar_init(*me_, bar, arrivals, guards_refill);
  }
  void mbar_arrive(Mbarrier& bar) { Model::mbar_arrive(*me_, bar); }
  void mbar_arrive_expect_tx(Mbarrier& bar, uint32_t bytes) { Model::mbar_arrive_expect_tx(*me_, bar, bytes); }
  void mbar_wait(Mbarrier& bar, uint32_t parity, const WaitInfo& info) { Model::mbar_wait(*me_, bar, parity, info); }
  bool mbar_test(Mbarrier& bar, uint32_t parity) { return Model::mbar_test(*me_, bar, parity); }

  void bulk_g2s(void* dst, const void* src, uint32_t bytes, Mbarrier& bar) {
    Model::bulk_g2s(*me_, dst, src, bytes, bar);
  }
  void bulk_s2g(void* dst, const void* src, uint32_t bytes) { Model::bulk_s2g(*me_, dst, src, bytes); }
  void bulk_commit() { Model::bulk_commit(*me_); }
  template <int kNewest>
  void bulk_wait_read() {
    Model::bulk_wait_read(*me_, kNewest);
  }
  template <int kNewest>
  void bulk_wait() {
    Model::bulk_wait(*me_, kNewest);
  }
  void publish_shared() { Model::publish_shared(*me_); }

  template <class T>
  T ld_shared(const T* p) const {
    return check_type<T>(), Model::ld_shared(*me_, p);
  }
  template <class T>
  void st_shared(T* p, const std::type_identity_t<T>& v) const {
    check_type<T>(), Model::st_shared(*me_, p, v);
  }
  template <class T>
  T ld_global(const T* p) const {
    return check_type<T>(), Model::ld_global(*me_, p);
  }
  template <class T>
  void st_global(T* p, const std::type_identity_t<T>& v) const {
    check_type<T>(), Model::st_global(*me_, p, v);
  }

  uint64_t ld_acquire_sys(const uint64_t* flag) {
    touch(flag);
    return load_word(flag, std::memory_order_acquire);
  }
  void st_release_sys(uint64_t* flag, uint64_t value) {
    touch(flag);
    std::atomic_ref(*flag).store(value, std::memory_order_release);
  }
  void add_release_sys(uint64_t* flag, uint64_t value) {
    touch(flag);
    std::atomic_ref(*flag).fetch_add(value, std::memory_order_release);
  }
  uint64_t add_acq_rel_rank(uint64_t* flag, uint64_t value) {
    touch(flag);
    return std::atomic_ref(*flag).fetch_add(value, std::memory_order_acq_rel);
  }
  uint64_t add_acq_rel_sys(uint64_t* flag, uint64_t value) { return add_acq_rel_rank(flag, value); }
  uint64_t take_rank(uint64_t* word) {
    touch(word);
    return std::atomic_ref(*word).fetch_add(1, std::memory_order_relaxed);
  }
  void count_rank(uint64_t* word, uint64_t value) {
    touch(word);
    std::atomic_ref(*word).fetch_add(value, std::memory_order_relaxed);
  }
  void wait_ge_sys(const uint64_t* flag, uint64_t value, const WaitInfo& info) {
    touch(flag);
    Exec::wait(*me_, {flag, value}, info);
  }
  template <class Flag>
  void st_release_sys_each(int n, const Flag& flag, uint64_t value) {
    for (int i = 0; i < n; ++i) st_release_sys(flag(i), value);
  }
  template <class Flag, class Value>
  void add_release_sys_each(int n, const Flag& flag, const Value& value) {
    for (int i = 0; i < n; ++i)
      if (const uint64_t v = value(i)) add_release_sys(flag(i), v);
  }
  template <class Flag, class Info, class Waited = NotCounted>
  void wait_ge_sys_each(int n, const Flag& flag, uint64_t value, const Info& info, const Waited& waited = {}) {
    uint64_t begin = 0;
    for (int i = 0; i < n; ++i) wait_for(flag(i), value, i, info, begin, waited);
  }
  template <class Flag>
  void st_release_sys_warp(int n, const Flag& flag, uint64_t value) {
    warp_sync();
    for (int i = lane(); i < n; i += kLanes) st_release_sys(flag(i), value);
  }
  template <class Flag, class Info, class Waited = NotCounted>
  bool wait_ge_sys_warp(int n, const Flag& flag, uint64_t value, const Info& info, const Waited& waited = {}) {
    warp_sync();
    uint64_t begin = 0;
    for (int i = lane(); i < n; i += kLanes) wait_for(flag(i), value, i, info, begin, waited);
    return warp_whole();
  }
  static constexpr bool kMayLookTogether = true;
  bool looks_together() const { return true; }
  template <class Flag, class Info>
  void acquire_ge_sys_warp(int n, const Flag& flag, uint64_t value, const Info& info) {
    warp_sync();
    for (int i = lane(); i < n; i += kLanes)
      if (const uint64_t* const word = flag(i)) wait_ge_sys(word, value, info(i));
    if (!warp_whole())
      for (;;) poll_idle(info(0), value, 0);  // ends as the lane's wait did that has left
  }
  uint64_t clock_ns() { return uint64_t(now_ns()); }

  // The flag behind the words, when all lanes of the line have stored theirs.
  void st_line(Line* dst, const uint64_t* words, uint64_t flag) {
    Model::step(*me_);
    if (dst) Model::st_line_words(*me_, dst, lane() / kLineLanes, first_line_word(), words, kLineWords);
    if constexpr (kLineLanes > 1) warp_sync();
    if (dst && has_line_flag()) Model::st_line_flag(*me_, dst, lane() / kLineLanes, flag);
    if constexpr (kLineLanes > 1 && Model::kChecked) warp_sync();  // it has taken what the lanes left for it
  }
  bool ld_line(const Line* src, uint64_t flag, uint64_t* words) {
    Model::step(*me_);
    return all_of_warp(!src || Model::ld_line(*me_, src, flag, first_line_word(), words, kLineWords));
  }

  void poll_idle(const WaitInfo& info, uint64_t expected, uint64_t seen) {
    Exec::poll_idle(*me_, info, expected, seen);
  }
  void poll_reset() { Exec::poll_reset(*me_); }

 private:
  // Only whether there is something to wait for, and to take the time of: nothing is acquired.
  static uint64_t peek(const uint64_t* flag) {
    return std::atomic_ref(*const_cast<uint64_t*>(flag)).load(std::memory_order_relaxed);
  }
  // Arrives at a counter that only grows and waits until everyone of this round has. Relaxed: the lanes
  // meet, but no memory is ordered (elect_one).
  void meet(uint64_t& arrived, uint64_t participants, std::memory_order order) {
    const uint64_t before = Exec::swap_word(arrived, order, [](uint64_t n) { return n + 1; });
    const uint64_t target = (before / participants + 1) * participants;
    Exec::wait(*me_, {&arrived, target}, WaitInfo{Site::kBlockSync},
               order == std::memory_order_relaxed ? order : std::memory_order_acquire);
  }
  int first_line_word() const { return lane() % kLineLanes * kLineWords; }
  bool has_line_flag() const { return lane() % kLineLanes == kLineLanes - 1; }
  // By all lanes of the warp. A counter's next vote but one begins when all have looked at this one's.
  bool all_of_warp(bool yes) {
    if constexpr (kLanes == 1) return yes;
    const uint64_t turn = me_->num_votes++ & 1;
    uint64_t& votes = me_->block->warp_votes[2 * static_cast<size_t>(me_->warp) + turn];
    if (yes) Exec::swap_word(votes, std::memory_order_relaxed, [](uint64_t n) { return n + 1; });
    warp_sync();
    const uint64_t now = load_word(&votes, std::memory_order_relaxed);
    return now - std::exchange(me_->votes_seen[turn], now) == uint64_t(kLanes);
  }
  // For the i-th of several flags, by one lane, whose first wait for one of them began at `begin`, 0: none yet.
  template <class Info, class Waited>
  void wait_for(const uint64_t* flag, uint64_t value, int i, const Info& info, uint64_t& begin, const Waited& waited) {
    const bool there = std::is_same_v<Waited, NotCounted> || peek(flag) >= value;
    if (!there && begin == 0) begin = clock_ns();
    wait_ge_sys(flag, value, info(i));
    if (uint64_t* word = there ? nullptr : waited(i)) count_rank(word, clock_ns() - begin);
  }
  uint64_t& warp_word() { return me_->block->warp_arrived[static_cast<size_t>(me_->warp)]; }
  void touch(const uint64_t* flag) {
    Model::flag_access(*me_, flag);
    Model::step(*me_);
  }
  template <class T>
  static constexpr void check_type() {
    static_assert(std::is_trivially_copyable_v<T>);
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  }

  Lane* me_;
};

using PlainFibers = HostArch<PlainModel<FiberExec>, 1>;  // what users run
template <int kLanes>
using PlainThreads = HostArch<PlainModel<ThreadExec>, kLanes>;
template <int kLanes>
using CheckedFibers = HostArch<CheckedModel<FiberExec>, kLanes>;
template <int kLanes>
using CheckedThreads = HostArch<CheckedModel<ThreadExec>, kLanes>;

static_assert(Arch<PlainFibers>);
static_assert(Arch<PlainThreads<1>> && Arch<PlainThreads<4>>);
static_assert(Arch<CheckedFibers<1>> && Arch<CheckedFibers<4>>);
static_assert(Arch<CheckedThreads<1>> && Arch<CheckedThreads<4>>);

}  // namespace hep::host
