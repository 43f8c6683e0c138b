// Latency dispatch, the receiving half: every row of this rank, as soon as its lines have come, from its slot to where
// its experts read it. On a plan's first dispatch it also finds the rows of the token's pairs, which nobody knew when
// it was sent, and keeps record and weights, which the way back needs.
#pragma once
#include <bit>

#include "common/bugs.h"
#include "roles/exchange_share.h"
#include "roles/latency_sources.h"

namespace hep {

template <Arch A>
struct LatencyReceiveRole {
  A& a;
  const LatencyDispatchParams& p;
  const LatencySources<A> sources;
  const uint64_t flag;
  const LinePart<A> part;
  unsigned char* const scratch;  // of this warp: record, weights, and the rows of the token

  HEP_DEVICE LatencyReceiveRole(A& arch, const LatencyDispatchParams& params, std::byte* shared, uint64_t step)
      : a(arch),
        p(params),
        sources{arch, params, shared},
        flag(step),
        part(arch),
        scratch(reinterpret_cast<unsigned char*>(shared + params.scratch_at) +
                uint64_t(arch.warp_idx()) * params.scratch_bytes) {}

  // By all lanes of a warp. room: permuted rows of this rank.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers, uint32_t room) {
    a.set_role("latency_receive");
    const uint32_t rows = p.plan.numbers->recv_rows;
    int source = 0;
    for (uint32_t i = worker; i < rows; i += workers) {
      while (sources.begin_of(source + 1) <= i) ++source;
      const auto* record =
          reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.message.record_bytes);
      const uint32_t slot = p.routes ? i - sources.begin_of(source) : record->source_token;
      const Line* lines = p.link.slot(flag, p.world.rank, source, slot);
      take_metadata(i, source, lines, room);
      take_payload(i, source, lines);
      a.warp_sync();  // the next row's metadata come to the same place
    }
  }

 private:
  HEP_DEVICE uint64_t* scratch_words() const { return reinterpret_cast<uint64_t*>(scratch); }
  // [0]: how many rows of the result the token has here, then which.
  HEP_DEVICE uint32_t* rows() const { return reinterpret_cast<uint32_t*>(scratch + p.message.metadata_bytes()); }
  HEP_DEVICE PairEntry* pairs() const { return reinterpret_cast<PairEntry*>(scratch + p.message.pairs_at()); }
  HEP_DEVICE PairEntry pair(uint32_t k) const {
    return std::bit_cast<PairEntry>(a.ld_shared(reinterpret_cast<const uint64_t*>(pairs()) + k));
  }
  HEP_DEVICE RecordHeader header() const {
    return std::bit_cast<RecordHeader>(a.ld_shared(reinterpret_cast<const Vec16*>(scratch)));
  }
  HEP_DEVICE void wait(const Line* lines, uint32_t line, uint32_t n, uint64_t* words, uint32_t row, int source) {
    const WaitInfo info{Site::kLatencyRow, source, int64_t(row)};
    if (injected(Bug::kRestOfRowUnawaited) && line - part.group > 0)
      (void)a.ld_line(line < n ? lines + line : nullptr, flag, words);
    else
      p.link.wait(a, line < n ? lines + line : nullptr, flag, words, info);
  }
  HEP_DEVICE void take_metadata(uint32_t row, int source, const Line* lines, uint32_t room) {
    const uint32_t bytes = p.message.metadata_bytes(), n = Line::lines_of(bytes), lane = uint32_t(a.lane());
    for (uint32_t line = part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      wait(lines, line, n, words, row, source);
      part.each_word(line, [&](uint32_t i, uint32_t m) {
        if (m < bytes / 8) a.st_shared(scratch_words() + m, words[i]);
      });
    }
    a.warp_sync();
    const RecordHeader h = header();
    for (uint32_t k = lane; p.routes && k < h.num_pairs; k += A::kLanes) place_pair(k, source, room);
    a.warp_sync();
    if (p.plan.fresh) keep(row);
    if (lane == 0) {
      uint32_t found = 0;
      for (uint32_t k = 0; p.permute && k < h.num_pairs; ++k)
        if (const PairEntry e = pair(k); p.plan.has_row(e)) a.st_shared(rows() + ++found, uint32_t(e.row));
      if (!p.permute) a.st_shared(rows() + ++found, row);
      a.st_shared(rows(), found);
    }
    if (p.out_weights) p.permute ? permuted_weights(h) : node_weights(h, row);
    a.warp_sync();
  }
  // From its position among the source's pairs to its row, as placement has it: -1 without one, or of other ranks.
  HEP_DEVICE void place_pair(uint32_t k, int source, uint32_t room) {
    PairEntry e = pair(k);
    const uint32_t local = uint32_t(e.expert) - p.plan.first_expert;
    const bool here = local < p.plan.num_local_experts;
    const uint32_t row = here ? sources.row_of(source, local, uint32_t(e.row)) : 0;
    e.row = here && (room == ExchangeSmem::kUnlimited || row < room) ? int32_t(row) : -1;
    a.st_shared(reinterpret_cast<uint64_t*>(pairs()) + k, std::bit_cast<uint64_t>(e));
  }
  HEP_DEVICE void keep(uint32_t row) {
    auto* record = reinterpret_cast<uint64_t*>(p.plan.row_records + uint64_t(row) * p.message.record_bytes);
    auto* weights = reinterpret_cast<uint64_t*>(p.plan.row_weights + uint64_t(row) * p.plan.weight_stride);
    for (uint32_t m = uint32_t(a.lane()); m < p.message.metadata_bytes() / 8; m += A::kLanes) {
      const bool of_record = m < p.message.record_bytes / 8;
      a.st_global(of_record ? record + m : weights + (m - p.message.record_bytes / 8),
                  a.ld_shared(scratch_words() + m));
    }
  }
  HEP_DEVICE float weight(const RecordHeader& h, uint32_t k) const {
    return a.ld_shared(reinterpret_cast<const float*>(scratch + p.message.weights_at()) + h.first_pair + k);
  }
  HEP_DEVICE void permuted_weights(const RecordHeader& h) {
    for (uint32_t k = uint32_t(a.lane()); k < h.num_pairs; k += A::kLanes)
      if (const PairEntry e = pair(k); p.plan.has_row(e)) a.st_global(p.out_weights + e.row, weight(h, k));
  }
  HEP_DEVICE void node_weights(const RecordHeader& h, uint32_t row) {
    float* weights = p.out_weights + uint64_t(row) * p.num_node_experts;
    for (uint32_t e = uint32_t(a.lane()); e < p.num_node_experts; e += A::kLanes) a.st_global(weights + e, 0.f);
    a.warp_sync();
    for (uint32_t k = uint32_t(a.lane()); k < h.num_pairs; k += A::kLanes)
      a.st_global(weights + (uint32_t(pair(k).expert) - p.first_node_expert), weight(h, k));
  }
  // Lines that metadata and payload share are looked at again.
  HEP_DEVICE void take_payload(uint32_t row, int source, const Line* lines) {
    const MessageLayout& l = p.message;
    const uint32_t found = a.ld_shared(rows()), n = p.lines(), payload = l.payload_at() / 8, scales = l.scales_at() / 8;
    for (uint32_t line = scales / Line::kFlag + part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      wait(lines, line, n, words, row, source);
      for (uint32_t k = 1; k <= found; ++k) {
        const uint64_t to = a.ld_shared(rows() + k);
        auto* x = reinterpret_cast<uint64_t*>(p.out_x + to * l.row_bytes);
        auto* scale = reinterpret_cast<uint64_t*>(p.out_scales + to * l.scale_bytes);
        part.each_word(line, [&](uint32_t i, uint32_t m) {
          if (m < scales || m >= l.token_bytes() / 8) return;
          m < payload ? a.st_global(scale + (m - scales), words[i]) : a.st_global(x + (m - payload), words[i]);
        });
      }
    }
  }
};

}  // namespace hep
