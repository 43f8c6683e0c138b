// S2G of dispatch: of every staged token, the metadata goes to the entry of its receive row on each destination rank of
// the node, scales and payload to where that rank wants them (layout/landing.h). Rows come from the token's record:
// there is no scan over ranks.
#pragma once
#include "common/bugs.h"
#include "pipeline/landed_rows.h"
#include "roles/landing_table.h"
#include "roles/stored_rows.h"
#include "roles/token_loader.h"

namespace hep {

template <Arch A, Transport<A> Net>
struct DispatchS2GRole {
  A& a;
  Net& net;
  const DispatchParams& p;
  StageConsumer<A, TokenHead> from;
  LandedTally<A> landed;
  LandingTable<A> landings;
  StoredRows to_node, to_self;
  uint32_t from_slot = 0;    // stages of the chunk in progress that this warp has had
  uint32_t first_token = 0;  // of those whose rows are not told as landed
  uint32_t held = 0;         // stages that stores may still read

  HEP_DEVICE DispatchS2GRole(A& arch, Net& n, const DispatchParams& params, const StageFifo<A, TokenHead>& fifo,
                             std::byte* smem, int index, int stride)
      : a(arch),
        net(n),
        p(params),
        from(fifo, index, stride),
        landed{arch, params.peers.recv, params.peers.landed_below,
               reinterpret_cast<Vec16*>(smem + params.untold_at) + index * params.world.num_local_ranks,
               params.world.num_local_ranks},
        landings(arch, params, smem, index) {}

  // By all lanes of a warp, of which `elected` does the work. False: a lane has left in its
  // wait. counts: see NodeGate.
  HEP_DEVICE bool run(bool elected, int parties, bool counts) {
    a.set_role(Role::kS2g);
    if (!p.gate.wait_all_ready(a, counts) || !landings.read()) return false;  // before anybody's memory is touched
    bool last = false;
    if (elected) {
      copy();
      last = last_of(a.add_acq_rel_sys(p.exit_counter, 1), p.exit_counter, uint64_t(parties));
    }
    if (a.warp_any(last || injected(Bug::kEveryRoleDone))) p.gate.announce_done(a);
    if (elected) a.template bulk_wait<0>();
    return true;
  }

 private:
  HEP_DEVICE void copy() {
    landed.clear();
    const uint32_t kept = from.fifo.num_stages / from.stride >= kManyStages;
    for (;;) {
      const TokenHead head = from.wait(a);
      if (head.stop) break;
      if (landed.any && head.index - first_token >= BufferLayout::kGroupRows) tell_landed();
      if (!landed.any) first_token = head.index;
      scatter(head);
      a.did(LoopStep::kS2gToken);
      from.advance();
      if (++held > kept) {
        if (kept) {
          if (!injected(Bug::kHeldStageBackWhileStoring)) a.template bulk_wait_read<1>();
        } else if (!injected(Bug::kStageBackWhileStoring)) {
          a.template bulk_wait_read<0>();
        }
        from.release(a);
        --held;
      }
      // What comes next may be long in coming.
      if (landed.any && head.stage + uint32_t(from.stride) >= head.chunk_stages) tell_landed();
    }
    a.template bulk_wait_read<0>();
    for (; held > 0; --held) from.release(a);
    from.release(a);  // the stop stage
    if (!injected(Bug::kDoneBeforeStores)) a.template bulk_wait<0>();
    to_node.count(a, p, &p.traffic->node_rows, &p.traffic->node_bytes);
    to_self.count(a, p, &p.traffic->self_rows, &p.traffic->self_bytes);
  }
  HEP_DEVICE void tell_landed() {
    if (!injected(Bug::kLandedBeforeStores)) {
      a.template bulk_wait<0>();
      for (; held > 0; --held) from.release(a);
    }
    landed.tell();
  }
  HEP_DEVICE void scatter(const TokenHead& head) {
    const unsigned char* stage = from.data();
    if (head.peer) {
      const RailPeer& peer = p.rail.peers[head.peer - 1];
      ++from_slot;  // its loads have left the slot; a chunk's stages follow each other, the warps taking turns
      if (head.stage + uint32_t(from.stride) >= head.chunk_stages) {
        RailReceiver::consume(a, net, p.rail.geometry, peer, head.chunk, from_slot, head.chunk_stages);
        from_slot = 0;
      }
      if (p.plan.fresh && head.tile == 0 && !injected(Bug::kRecordsNotKept))  // combine will need its destinations
        a.bulk_s2g(p.plan.rail_record(peer.node, head.index, p.message.record_bytes), stage, p.message.record_bytes);
    }
    const RecordHeader rec = std::bit_cast<RecordHeader>(a.ld_shared(reinterpret_cast<const Vec16*>(stage)));
    const auto* dsts = reinterpret_cast<const uint64_t*>(stage + MessageLayout::dsts_at());
    uint32_t pair = 0;
    for (uint32_t i = 0; i < rec.num_dsts; ++i) {
      const DstEntry dst = std::bit_cast<DstEntry>(a.ld_shared(dsts + i));
      const LandingOfRank landing = landings.of(dst.local_rank);
      if (head.tile == 0)
        a.bulk_s2g(landing.recv + uint64_t(dst.row) * p.message.metadata_bytes(), stage, p.message.metadata_bytes());
      uint32_t stores = 1;
      if (landing.in == LandIn::kReceiveRow)
        store(head, stage, landing, dst.row);
      else
        stores = store_pairs(head, stage, landing, rec.num_pairs, pair, dst.local_rank);
      if (landing.followed) landed.add(dst.local_rank, dst.row);
      a.did(LoopStep::kS2gDestination);
      if (head.tile != 0) continue;
      dst.local_rank == uint32_t(p.world.local_rank()) ? to_self.add(stores) : to_node.add(stores);
    }
    a.bulk_commit();
  }
  // To the permuted rows of the token's pairs on a rank; how many it has got there. pair: where to look from, for ranks
  // and pairs ascend.
  HEP_DEVICE uint32_t store_pairs(const TokenHead& head, const unsigned char* stage, const LandingOfRank& landing,
                                  uint32_t num_pairs, uint32_t& pair, uint32_t local_rank) {
    const auto* pairs = reinterpret_cast<const uint64_t*>(stage + p.message.pairs_at());
    const uint32_t first = p.first_node_expert + local_rank * p.plan.num_local_experts;
    uint32_t stored = 0;
    for (; pair < num_pairs; ++pair) {
      const PairEntry e = std::bit_cast<PairEntry>(a.ld_shared(pairs + pair));
      if (uint32_t(e.expert) < first) continue;  // of a rank that had no receive row for the token, or is dealt with
      if (uint32_t(e.expert) - first >= p.plan.num_local_experts) break;
      if (e.row < 0) continue;
      store(head, stage, landing, uint32_t(e.row));
      if (stored++) a.did(LoopStep::kS2gPair);
      if (landing.in == LandIn::kFirstPair) break;
    }
    return stored;
  }
  HEP_DEVICE void store(const TokenHead& head, const unsigned char* stage, const LandingOfRank& landing, uint32_t row) {
    const TileShape t = tile_shape(p.message, p.tile_bytes, head.tile);
    while (row >= landing.rows) a.poll_idle({Site::kLanding}, landing.rows, row);  // a handle that is not the owner's
    const uint64_t lands = uint64_t(row) + injected(Bug::kLandsOneRowOff);
    a.bulk_s2g(landing.x + lands * p.message.row_bytes + t.begin, stage + p.message.payload_at(), t.bytes);
    if (head.tile == 0 && p.message.scale_bytes)
      a.bulk_s2g(landing.scales + lands * p.message.scale_bytes, stage + p.message.scales_at(), p.message.scale_bytes);
  }
};
}  // namespace hep
