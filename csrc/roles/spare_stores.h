// How a warp stores parts of experts into slots: one lane is both ends of its small stage FIFO, loads running ahead of
// stores, and says when what it has stored is complete.
#pragma once
#include "pipeline/node_gate.h"
#include "pipeline/stage_fifo.h"
#include "roles/spare_copies.h"

namespace hep {

struct alignas(16) SpareHead {
  uint64_t to;  // where the stage goes
  uint32_t bytes;
  uint32_t piece;    // of a slot of the group: slot * pieces + piece
  uint32_t parties;  // with the last stage that this warp has for the piece: warps that have some; else 0
};

template <Arch A>
class SpareStores {
 public:
  HEP_DEVICE SpareStores(A& arch, const SpareParams& params, const StageFifo<A, SpareHead>& fifo)
      : a(arch), p(params), in_(fifo), out_(fifo, 0, 1), epoch_(params.progress->pushes + 1) {}

  HEP_DEVICE uint64_t epoch() const { return epoch_; }
  HEP_DEVICE void put(const SpareHead& head, const unsigned char* from) {
    in_.acquire(a);
    in_.commit(a, head, head.bytes);
    in_.load(a, 0, from, head.bytes);
    in_.advance();
    if (++loaded_ > in_.fifo.num_stages - 2) store();  // loads in flight before the first store
  }
  // Before a wait for another rank: what was put is stored, and told.
  HEP_DEVICE void drain() {
    while (loaded_ > 0) store();
  }
  HEP_DEVICE void finish() {
    drain();
    if (!held_) return;
    a.template bulk_wait_read<0>();
    out_.release(a);
    a.template bulk_wait<0>();
    held_ = false;
  }

 private:
  HEP_DEVICE void store() {
    const SpareHead head = out_.wait(a);
    const int holder = int(head.piece) / SpareParams::kPieces / int(p.spare_slots);
    if (holder != free_) await_free(holder, head);
    a.bulk_s2g(reinterpret_cast<void*>(head.to), out_.data(), head.bytes);
    a.bulk_commit();
    out_.advance();
    --loaded_;
    if (held_) {
      a.template bulk_wait_read<1>();
      out_.release(a);
    }
    held_ = true;
    if (head.parties) tell(head);
  }
  HEP_DEVICE void await_free(int holder, const SpareHead& head) {
    if (!injected(Bug::kSlotNotAwaitedFree))
      a.wait_ge_sys(p.flag(p.world.rank, p.free, holder), epoch_,
                    {Site::kSlotsFree, p.name(holder), int64_t(head.piece) / SpareParams::kPieces});
    free_ = holder;
  }
  // This warp has stored its share of the piece.
  HEP_DEVICE void tell(const SpareHead& head) {
    if (!injected(Bug::kSlotFullBeforeStores)) a.template bulk_wait<0>();
    uint64_t* const stored = p.stored + head.piece;
    const bool last = last_of(a.add_acq_rel_sys(stored, 1), stored, head.parties);
    if (!last && !injected(Bug::kSlotFullByEveryWarp)) return;
    const int j = int(head.piece) / SpareParams::kPieces, slots = int(p.spare_slots);
    a.st_release_sys(p.full_flag(j / slots, j % slots, p.world.rank, int(head.piece) % SpareParams::kPieces), epoch_);
  }

  A& a;
  const SpareParams& p;
  StageProducer<A, SpareHead> in_;
  StageConsumer<A, SpareHead> out_;
  const uint64_t epoch_;
  uint32_t loaded_ = 0;  // stages between load and store
  int free_ = -1;        // holder that was last waited for
  bool held_ = false;    // a stage that its store may still read
};

}  // namespace hep
