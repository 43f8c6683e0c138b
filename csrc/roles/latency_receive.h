// Latency dispatch, the receiving half: every row of this rank, as soon as its lines have come, from its slot to where
// its experts read it. On a plan's first dispatch it also finds the rows of the token's pairs, which nobody knew when
// it was sent, and keeps record and weights, which the way back needs.
#pragma once
#include <cstring>

#include "common/bugs.h"
#include "roles/latency_metadata.h"

namespace hep {

template <Arch A, class Net>
struct LatencyReceiveRole {
  // On plain memory a row is put together once, and copied as a whole to the token's other rows.
  static constexpr bool kCopies = TileMath<A>::kReadsRows;

  A& a;
  const LatencyDispatchParams& p;
  const LatencySources<A> sources;
  const uint64_t flag;
  const LinePart<A> part;
  LatencyMetadata<A> metadata;  // of this warp's token

  HEP_DEVICE LatencyReceiveRole(A& arch, const LatencyDispatchParams& params, std::byte* shared, uint64_t step)
      : a(arch), p(params), sources{arch, params, shared}, flag(step), part(arch), metadata(arch, params, shared) {}

  // By all lanes of a warp. room: permuted rows of this rank.
  HEP_DEVICE void run(uint32_t worker, uint32_t workers, uint32_t room) {
    a.set_role(Role::kLatencyReceive);
    const uint32_t rows = p.plan.numbers->recv_rows;
    int source = 0;
    const auto share = LineShare<A>::of(rows, p.lines(), workers, 4, kCopies);
    for (uint32_t w = worker; w < share.count(); w += workers) {
      const uint32_t i = share.row(w), first = share.first(w);
      if (first >= p.lines()) continue;
      while (sources.begin_of(source + 1) <= i) ++source;
      const auto* record =
          reinterpret_cast<const RecordHeader*>(p.plan.row_records + uint64_t(i) * p.message.record_bytes);
      const uint32_t slot = p.routes ? i - sources.begin_of(source) : record->source_token;
      const Line* lines = p.link.slot(flag, p.link.template own<Net>(), source, slot);
      take_metadata(i, source, lines, room, first == 0);
      take_payload(i, source, lines, first, share.end(first, p.lines()));
      a.warp_sync();  // the next row's metadata come to the same place
    }
  }

 private:
  HEP_DEVICE void wait(const Line* lines, uint32_t line, uint32_t n, uint64_t* words, uint32_t row, int source) {
    const WaitInfo info{Site::kLatencyRow, source, int64_t(row)};
    if (injected(Bug::kRestOfRowUnawaited) && line - part.group > 0)
      (void)a.ld_line(line < n ? lines + line : nullptr, flag, words);
    else
      p.link.wait(a, line < n ? lines + line : nullptr, flag, words, info);
  }
  // Every warp of a row looks at its metadata, and the first one uses them up.
  HEP_DEVICE void take_metadata(uint32_t row, int source, const Line* lines, uint32_t room, bool leads) {
    const uint32_t end = p.message.metadata_bytes() / 8, n = Line::lines_of(8 * end);
    for (uint32_t line = part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      wait(lines, line, n, words, row, source);
      part.each_word(line, [&](uint32_t i, uint32_t m) {
        if (m < end) a.st_shared(metadata.words() + m, words[i]);
      });
    }
    a.warp_sync();
    if (p.routes) metadata.place_pairs(sources, source, room);
    a.warp_sync();
    metadata.find_rows(row);
    if (leads) metadata.use(row);
    a.warp_sync();
  }
  // Of its lines [first, n); those that metadata and payload share are looked at again.
  HEP_DEVICE void take_payload(uint32_t row, int source, const Line* lines, uint32_t first, uint32_t n) {
    const MessageLayout& l = p.message;
    const uint32_t found = metadata.num_rows(), by_lines = kCopies && found > 1 ? 1 : found;
    const uint32_t payload = l.payload_at() / 8, scales = l.scales_at() / 8;
    const uint32_t with_payload = scales / Line::kFlag, begin = first < with_payload ? with_payload : first;
    for (uint32_t line = begin + part.group; line - part.group < n; line += part.kAtOnce) {
      uint64_t words[A::kLineWords] = {};
      wait(lines, line, n, words, row, source);
      if (line >= n) continue;  // another warp's: a first step that begins behind the metadata ends behind the share
      for (uint32_t k = 0; k < by_lines; ++k) {
        const uint64_t to = metadata.row(k);
        auto* x = reinterpret_cast<uint64_t*>(p.out_x + to * l.row_bytes);
        auto* scale = reinterpret_cast<uint64_t*>(p.out_scales + to * l.scale_bytes);
        const uint32_t m = part.word(line), count = part.count(line, l.token_bytes() / 8);
        if (m >= payload && m + A::kLineWords <= l.token_bytes() / 8) {  // most lines hold payload alone
          part.each_word(line, [&](uint32_t i, uint32_t) { a.st_global(x + (m - payload) + i, words[i]); });
          continue;
        }
        part.each_word(line, [&](uint32_t i, uint32_t at) {
          if (at < scales || i >= count) return;
          at < payload ? a.st_global(scale + (at - scales), words[i]) : a.st_global(x + (at - payload), words[i]);
        });
      }
    }
    if constexpr (kCopies)
      for (uint32_t k = 1; k < found; ++k) {
        const uint64_t from = metadata.row(0), to = metadata.row(k);
        std::memcpy(p.out_x + to * l.row_bytes, p.out_x + from * l.row_bytes, l.row_bytes);
        if (l.scale_bytes)
          std::memcpy(p.out_scales + to * l.scale_bytes, p.out_scales + from * l.scale_bytes, l.scale_bytes);
      }
  }
};

}  // namespace hep
