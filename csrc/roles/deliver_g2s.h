// G2S of deliver: groups of receive rows as they land, their metadata and the rows that have to be copied, into the
// deliver FIFO.
#pragma once
#include "common/bugs.h"
#include "roles/group_walk.h"
#include "roles/token_loader.h"

namespace hep {

// Metadata of a group of rows, in shared memory, where it is looked up which of them are to be copied: in global memory
// that would be two loads or more a row, each waited for. One lane is both ends of the FIFO, a group ahead.
struct LookUp {
  static constexpr uint32_t kStages = 2;
  static uint32_t stage_bytes(const MessageLayout& m) { return BufferLayout::kGroupRows * m.metadata_bytes(); }
};

template <Arch A>
struct DeliverG2SRole {
  A& a;
  const DispatchParams& p;
  StageProducer<A, TokenHead> to, looks;
  StageConsumer<A, TokenHead> found;
  GroupWalk<A> walk;
  const unsigned char *const recv, *const x, *const scales;  // metadata of receive rows; where their payloads landed
  const uint32_t rows, tiles;

  HEP_DEVICE DeliverG2SRole(A& arch, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo,
                            const StageFifo<A, TokenHead>& look_up, std::byte* smem)
      : a(arch),
        p(params),
        to(fifo),
        looks(look_up),
        found(look_up, 0, 1),
        walk{arch, reinterpret_cast<const uint32_t*>(smem + params.source_begins_at),
             uint32_t(params.world.num_ranks()), params.blocks.worker(uint32_t(arch.block_idx())),
             params.blocks.workers()},
        recv(params.peers.recv[params.world.local_rank()]),
        x(params.peers.at(params.world.local_rank(), params.landing.x)),
        scales(params.peers.at(params.world.local_rank(), params.landing.scales)),
        rows(params.plan.numbers->recv_rows),
        tiles(num_tiles(params.message, params.tile_bytes)) {}

  HEP_DEVICE void run() {
    a.set_role(Role::kDeliverG2s);
    if (p.landing.followed) follow();
    TokenHead head{};
    head.stop = 1;
    to.stop(a, head, 1);
  }

 private:
  HEP_DEVICE void follow() {
    const bool looks_up = p.landing.in == LandIn::kFirstPair;
    bool waiting = false;  // a group whose metadata are on their way, or there
    uint32_t loaded = 0;
    walk.run([&](uint32_t group, uint32_t) {
      const uint32_t stores = rows_of(group) * tiles;
      if (!waiting || !p.landed.take(a, group, stores)) {
        if (waiting) deliver_found(loaded);  // in place of waiting
        waiting = false;
        p.landed.await(a, group, stores);
      }
      if (!looks_up) return deliver(group, false);
      look_up(group);
      if (waiting) deliver_found(loaded);
      loaded = group;
      waiting = true;
    });
    if (waiting) deliver_found(loaded);
  }
  HEP_DEVICE uint32_t rows_of(uint32_t group) const {
    const uint32_t left = rows - group * BufferLayout::kGroupRows;
    return left < BufferLayout::kGroupRows ? left : BufferLayout::kGroupRows;
  }
  HEP_DEVICE const unsigned char* metadata_of(uint32_t row) const {
    return recv + uint64_t(row) * p.message.metadata_bytes();
  }
  HEP_DEVICE void look_up(uint32_t group) {
    const uint32_t bytes = rows_of(group) * p.message.metadata_bytes();
    looks.acquire(a);
    looks.commit(a, TokenHead{}, bytes);
    looks.load(a, 0, metadata_of(group * BufferLayout::kGroupRows), bytes);
    looks.advance();
  }
  HEP_DEVICE void deliver_found(uint32_t group) {
    found.wait(a);
    deliver(group, true);
    found.advance();
    found.release(a);
  }
  // looked_up: the metadata of the group's rows have come to be looked up; else all rows or none are copied.
  HEP_DEVICE void deliver(uint32_t group, bool looked_up) {
    const uint32_t begin = group * BufferLayout::kGroupRows, n = rows_of(group);
    for (uint32_t i = 0; i < n; ++i) {
      TokenHead head{};
      head.index = begin + i;
      const int64_t landed = !p.copies ? -1 : looked_up ? row_to_copy(i) : head.index;
      const unsigned char* own = metadata_of(head.index);
      head.bare = landed < 0;
      if (head.bare) {
        if (p.reads_metadata()) load_metadata(a, to, p.message, own, head);
        continue;
      }
      const TokenSource src{own, p.message.weight_bytes ? own + p.message.weights_at() : nullptr,
                            p.message.scale_bytes ? scales + landed * p.message.scale_bytes : nullptr,
                            x + landed * p.message.row_bytes};
      for (; head.tile < tiles; ++head.tile) {
        load_tile(a, to, p.message, p.tile_bytes, src, head);
        a.did(LoopStep::kDeliverLoad);
      }
    }
  }
  // Where the i-th token of the group landed, if it has to be copied from there; else -1.
  HEP_DEVICE int64_t row_to_copy(uint32_t i) {
    const unsigned char* metadata = found.data() + i * p.message.metadata_bytes();
    const auto rec = std::bit_cast<RecordHeader>(a.ld_shared(reinterpret_cast<const Vec16*>(metadata)));
    const auto* pairs = reinterpret_cast<const uint64_t*>(metadata + p.message.pairs_at());
    int64_t first = -1;
    for (uint32_t k = 0; k < rec.num_pairs; ++k) {
      const PairEntry e = std::bit_cast<PairEntry>(a.ld_shared(pairs + k));
      if (!p.plan.has_row(e)) continue;
      if (first >= 0) return first;  // there is another
      first = e.row;
    }
    return -1;
  }
};

}  // namespace hep
