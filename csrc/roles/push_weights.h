// Weights of this rank's experts, to the spare slots of the ranks that hold their clones. Warps of all blocks share the
// chunks of each expert; one lane of a warp is both ends of its small stage FIFO, loads running ahead of stores.
//
// A slot may be written when its holder has entered this push: it does so in the order of its stream, behind whatever
// has used the slot before (`free`, counted in pushes). It may be read when the last of the warps that store into it
// has seen its stores complete and says so for all of them (`full`, likewise counted, of each slot).
#pragma once
#include "pipeline/node_gate.h"
#include "pipeline/stage_fifo.h"
#include "roles/spare_params.h"

namespace hep {

struct alignas(16) SpareHead {
  uint64_t to;  // where the stage goes
  uint32_t bytes;
  uint32_t slot;  // of the group, twice, and 1 with the last stage that this warp has for it
};

template <Arch A>
class PushWeightsRole {
 public:
  HEP_DEVICE PushWeightsRole(A& arch, const SpareParams& params, const int32_t* clones,
                             const StageFifo<A, SpareHead>& fifo)
      : a(arch),
        p(params),
        clones_(clones),
        in_(fifo),
        out_(fifo, 0, 1),
        epoch_(params.progress->pushes + 1),
        worker_(uint32_t(arch.block_idx() * arch.num_warps() + arch.warp_idx())),
        workers_(uint32_t(arch.num_blocks() * arch.num_warps())) {}

  // This rank's slots may be written, by anyone. By one lane of the grid.
  HEP_DEVICE void free_slots() {
    a.st_release_sys_each(p.world.num_ranks(), [this](int r) { return p.flag(r, p.free, p.world.rank); }, epoch_);
  }
  // By one lane of every warp.
  HEP_DEVICE void run() {
    for (uint32_t m = 0; m < p.num_matrices; ++m) chunks_ += chunks_of(m);
    const int slots = p.num_slots();
    // Owners begin behind themselves, so that they do not all store into the same rank.
    for (int i = 0, j = (p.world.rank + 1) * int(p.spare_slots); i < slots; ++i, ++j) {
      if (j >= slots) j -= slots;
      if (const int owned = a.ld_shared(clones_ + j); owned >= 0) push(uint32_t(j), owned);
    }
    while (loaded_ > 0) store();
    let_go();
  }

 private:
  HEP_DEVICE uint32_t chunks_of(uint32_t matrix) const {
    return uint32_t(div_up(p.matrices[matrix].bytes, p.chunk_bytes));
  }
  // Chunks are counted through all experts, so that warps have alike even where an expert has few.
  HEP_DEVICE void push(uint32_t slot, int owned) {
    const uint32_t lag = in_.fifo.num_stages - 2;  // loads in flight before the first store
    uint32_t matrix = 0, before = 0;               // chunks of the matrices before this one
    for (uint32_t c = (worker_ + workers_ - base_) % workers_; c < chunks_; c += workers_) {
      while (c - before >= chunks_of(matrix)) before += chunks_of(matrix++);
      load(slot, owned, matrix, uint64_t(c - before) * p.chunk_bytes, c + workers_ >= chunks_);
      if (++loaded_ > lag) store();
    }
    base_ = (base_ + chunks_) % workers_;
  }
  HEP_DEVICE void load(uint32_t slot, int owned, uint32_t matrix, uint64_t begin, bool last) {
    const SpareMatrix& m = p.matrices[matrix];
    const uint64_t rest = m.bytes - begin;
    const uint32_t bytes = rest < p.chunk_bytes ? uint32_t(rest) : p.chunk_bytes;
    const uint32_t holder = slot / p.spare_slots, there = slot % p.spare_slots;
    const uint32_t lands = injected(Bug::kWeightsInAnotherSlot) ? (there + 1) % p.spare_slots : there;
    SpareHead head{};
    head.to = reinterpret_cast<uint64_t>(p.at(int(holder), p.weights) + m.weights_at + lands * m.bytes + begin);
    head.bytes = bytes;
    head.slot = 2 * slot + uint32_t(last);
    const uint64_t from = a.ld_global(p.experts + uint64_t(uint32_t(owned)) * p.num_matrices + matrix);
    in_.acquire(a);
    in_.commit(a, head, bytes);
    in_.load(a, 0, reinterpret_cast<const unsigned char*>(from) + begin, bytes);
    in_.advance();
  }
  HEP_DEVICE void store() {
    const SpareHead head = out_.wait(a);
    const uint32_t slot = head.slot / 2;
    if (slot != free_) await_free(slot);
    a.bulk_s2g(reinterpret_cast<void*>(head.to), out_.data(), head.bytes);
    a.bulk_commit();
    out_.advance();
    --loaded_;
    if (held_) {
      a.template bulk_wait_read<1>();
      out_.release(a);
    }
    held_ = true;
    if (head.slot & 1) tell(slot);
  }
  HEP_DEVICE void await_free(uint32_t slot) {
    const int holder = int(slot / p.spare_slots);
    if (!injected(Bug::kSlotNotAwaitedFree))
      a.wait_ge_sys(p.flag(p.world.rank, p.free, holder), epoch_, {Site::kSlotsFree, holder, int64_t(slot)});
    free_ = slot;
  }
  // This warp has stored its part of the slot.
  HEP_DEVICE void tell(uint32_t slot) {
    if (!injected(Bug::kSlotFullBeforeStores)) a.template bulk_wait<0>();
    const uint64_t parties = workers_ < chunks_ ? workers_ : chunks_, before = a.add_acq_rel_sys(p.stored + slot, 1);
    if (last_of(before, p.stored + slot, parties) || injected(Bug::kSlotFullByEveryWarp))
      a.st_release_sys(p.flag(int(slot / p.spare_slots), p.full, int(slot % p.spare_slots)), epoch_);
  }
  HEP_DEVICE void let_go() {
    if (!held_) return;
    a.template bulk_wait_read<0>();
    out_.release(a);
    a.template bulk_wait<0>();
    held_ = false;
  }

  static constexpr uint32_t kNone = ~0u;

  A& a;
  const SpareParams& p;
  const int32_t* const clones_;
  StageProducer<A, SpareHead> in_;
  StageConsumer<A, SpareHead> out_;
  const uint64_t epoch_;
  const uint32_t worker_, workers_;
  uint32_t chunks_ = 0;    // of an expert
  uint32_t base_ = 0;      // warp that has the first chunk of the next expert
  uint32_t loaded_ = 0;    // stages between load and store
  uint32_t free_ = kNone;  // slot whose holder was last waited for
  bool held_ = false;      // a stage that its store may still read
};

}  // namespace hep
