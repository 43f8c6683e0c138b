// Lines in virtual time. A warp's lines of one slot travel some together: a copy each would be most of a world's
// events. They land as one, so that the first of them come a little late; what is left of a slot goes when the warp
// turns to others. Words have only the lines that addresses come from.
#include <algorithm>
#include <cstring>
#include <utility>

#include "arch/sim/clockwork.h"

namespace hep::sim {
namespace {

constexpr uint32_t kLinesTogether = 16;
constexpr uint64_t kRowBytesTogether = 4096;

}  // namespace

Clockwork::LineAt Clockwork::line_at(int owner, uint64_t line) {
  const LatencySlabs& s = m_.layout_->slabs;
  if (slots_.empty()) slots_.resize(m_.ranks_.size());
  auto& of_rank = slots_[size_t(owner)];
  if (of_rank.empty()) of_rank.resize(2 * s.num_ranks * (1 + uint64_t(s.tokens)));
  const uint64_t slab = line / s.slab_lines(), at = line % s.slab_lines();
  const bool header = at < s.header_lines;
  const uint64_t slot = header ? 0 : 1 + (at - s.header_lines) / s.token_lines;
  return {of_rank[slab * (1 + uint64_t(s.tokens)) + slot],
          uint32_t(header ? at : (at - s.header_lines) % s.token_lines), header};
}

void Clockwork::store_line(Lane& me, int owner, uint64_t line, const uint64_t* words, uint64_t flag) {
  m_.spend(me, me.launch->line_store_ps);
  const LineAt to = line_at(owner, line);
  if (to.header || to.line < me.launch->fact_lines) {
    auto& facts = to.slot.facts;
    if (facts.size() < (to.line + 1) * size_t(Line::kFlag)) facts.resize((to.line + 1) * size_t(Line::kFlag));
    std::memcpy(&facts[to.line * size_t(Line::kFlag)], words, Line::kPayloadBytes);
  }
  auto run = std::find_if(me.line_runs.begin(), me.line_runs.end(), [&](const LineRun& r) {
    return r.slot == &to.slot && r.flag == flag && r.first + r.count == to.line;
  });
  if (run == me.line_runs.end()) {
    // Slots that it stores side by side, a line to each, begin at the same line; those of an earlier row are through.
    const auto is_beside = [&](const LineRun& r) { return r.first == to.line && r.count == 1; };
    if (!std::all_of(me.line_runs.begin(), me.line_runs.end(), is_beside)) flush(me);
    run = me.line_runs.insert(me.line_runs.end(), {&to.slot, flag, to.line, 0, owner});
  }
  if (++run->count < kLinesTogether) return;
  post_run(me, *run);
  me.line_runs.erase(run);
}

void Clockwork::post_run(Lane& me, const LineRun& run) {
  const CostModel& c = m_.config_.costs;
  Item item = of_lane(me, Item::kLines, run.count * sizeof(Line));
  item.slot = run.slot;
  item.value = run.flag;
  item.first_line = run.first;
  item.owner = run.owner;
  Rank &mine = m_.rank(me.rank), &to = m_.rank(run.owner);
  add_hop(item, me.block->line_store, c.line_mbps, "line_store");
  if (run.owner != me.rank) {
    add_hop(item, mine.egress, c.nvlink_egress_mbps, "nvlink_egress");
    add_hop(item, to.ingress, c.nvlink_ingress_mbps, "nvlink_ingress");
    item.latency = c.nvlink_latency_ps;
  }
  add_hop(item, to.hbm, c.hbm_mbps, "hbm");
  post(take(item), std::max(me.now, m_.clock_));
}

void Clockwork::land_lines(const Item& item) {
  LineSlot& slot = *item.slot;
  if (slot.flag != item.value) {
    slot.flag = item.value;
    std::fill(slot.landed.begin(), slot.landed.end(), 0);
  }
  const uint32_t end = item.first_line + uint32_t(item.bytes / sizeof(Line));
  if (slot.landed.size() < (end + 63) / 64) slot.landed.resize((end + 63) / 64);
  for (uint32_t i = item.first_line; i < end; ++i) slot.landed[i / 64] |= uint64_t(1) << i % 64;
  Lane* waiting = std::exchange(slot.waiting, nullptr);
  while (waiting) {
    Lane& lane = *std::exchange(waiting, waiting->next_waiting);
    if (lane.wait.value >= item.first_line && lane.wait.value < end) {
      resume(lane, m_.config_.costs.line_wait_ps);
      m_.wake(lane);
    } else {
      lane.next_waiting = std::exchange(slot.waiting, &lane);
    }
  }
}

// Where exploration looks again and again, here the lane waits until the line is there.
void Clockwork::await_line(Lane& me, uint64_t line, uint64_t flag, uint64_t* words) {
  const LineAt from = line_at(me.rank, line);
  const auto there = [&] {
    return from.slot.flag == flag && from.line / 64 < from.slot.landed.size() &&
           (from.slot.landed[from.line / 64] >> from.line % 64 & 1);
  };
  if (!there()) sync(me);
  if (there()) {
    m_.spend(me, me.launch->line_load_ps);
  } else {
    me.wait = {Wait::kLine, nullptr, from.line, {from.header ? Site::kLatencyHeader : Site::kLatencyRow}};
    me.next_waiting = std::exchange(from.slot.waiting, &me);
    m_.block(me);
  }
  words[Line::kFlag] = flag;
  if (const size_t at = from.line * size_t(Line::kFlag); at < from.slot.facts.size())
    std::memcpy(words, &from.slot.facts[at], Line::kPayloadBytes);
}

void Clockwork::stream(Lane& me, uint64_t bytes) {
  me.row_bytes += bytes;
  if (me.row_bytes >= kRowBytesTogether) post_rows(me);
}

void Clockwork::post_rows(Lane& me) {
  const CostModel& c = m_.config_.costs;
  Item item = of_lane(me, Item::kRows, std::exchange(me.row_bytes, 0));
  add_hop(item, m_.rank(me.rank).hbm, c.hbm_mbps, "hbm");
  ++me.rows_in_flight;
  post(take(item), std::max(me.now, m_.clock_));
}

// A kernel ends when what it stored has been written.
void Clockwork::finish_streams(Lane& me) {
  if (me.row_bytes) post_rows(me);
  while (me.rows_in_flight) {
    me.wait = {Wait::kGroups, nullptr, 0, {Site::kStageEmpty}};
    m_.block(me);
    me.now = std::max(me.now, m_.clock_);
  }
}

}  // namespace hep::sim
