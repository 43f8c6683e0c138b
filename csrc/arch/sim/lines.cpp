// Lines of the latency path, in exploration: they land late and in any order, whole. A line is free again when the rank
// whose memory it is has read it; who stores over one that has not been read, or is still on its way, breaks a rule.
#include <algorithm>
#include <cstring>
#include <utility>

#include "arch/sim/clockwork.h"
#include "arch/sim/machine.h"
#include "common/bugs.h"

namespace hep::sim {

Region& Machine::line_region(const Lane& me, const Line* line, const char* operation) const {
  Region& r = memory_.require(me, line, sizeof *line, operation);
  if (r.use != Region::Use::kSlabs) throw_rule(me, "outside_rows", std::string(operation) + " in " + r.name);
  if (r.offset(line) % sizeof *line) throw_rule(me, "alignment", std::string(operation) + " at no line's begin");
  return r;
}

void Machine::store_line(Lane& me, Line* dst, const uint64_t* words, uint64_t flag) {
  if (timed()) {
    const Region& to = line_region(me, dst, "st_line");
    return clockwork_->store_line(me, to.rank, to.offset(dst) / sizeof *dst, words, flag);
  }
  step(me);
  Region& r = line_region(me, dst, "st_line");
  const int slab = int(r.offset(dst) / sizeof *dst / layout_->slabs.slab_lines() % uint64_t(num_ranks()));
  const int locals = config_.num_local_ranks;  // those of other nodes' ranks are written in their names
  if (slab % locals != me.rank % locals || r.rank / locals != me.rank / locals)
    throw_rule(me, "outside_rows",
               "a line into the slab of rank " + std::to_string(slab) + " on rank " + std::to_string(r.rank));
  memory_.check_write(me, r, dst, sizeof *dst, "st_line");
  LinePiece piece{dst, {}, 0, Line::kWords, false, &r};
  std::memcpy(piece.line.words, words, Line::kPayloadBytes);
  piece.line.words[Line::kFlag] = flag;
  send_pieces(piece, wires_[size_t(me.rank)]);
  set_ready(uint32_t(me.rank), wires_[size_t(me.rank)].ready);
  if (config_.log) note(me, "stores a line to rank " + std::to_string(r.rank) + ", flag = " + std::to_string(flag));
}

void Machine::send_pieces(const LinePiece& piece, Wire& wire) {
  const auto send = [&](int first, int count, bool flag_first) {
    const GranuleSpan to(piece.region->offset(piece.dst), sizeof(Line));
    hep::sim::add(piece.region->writing, to.at, to.n, 1);
    wire.lines.push_back({piece.dst, piece.line, first, count, flag_first, piece.region});
  };
  if (injected(Bug::kTornLine)) {
    send(0, Line::kWords / 2, false);
    send(Line::kWords / 2, Line::kWords / 2, false);
  } else if (injected(Bug::kFlagBeforePayload)) {
    send(Line::kFlag, 1, true);
  } else {
    send(0, Line::kWords, false);
  }
}

void Machine::land_line(Wire& wire, size_t at) {
  std::swap(wire.lines[at], wire.lines.back());
  LinePiece piece = wire.lines.back();
  wire.lines.pop_back();
  std::memcpy(piece.dst->words + piece.first, piece.line.words + piece.first, 8 * size_t(piece.count));
  const GranuleSpan to(piece.region->offset(piece.dst), sizeof(Line));
  if (piece.flag_first) {
    piece.flag_first = false;
    piece.first = 0;
    piece.count = Line::kFlag;
    wire.lines.push_back(piece);
  } else {
    hep::sim::add(piece.region->writing, to.at, to.n, 0xff);
    if (!any(piece.region->writing, to.at, to.n)) set(piece.region->written, to.at, to.n, 0xff);
  }
  if (config_.log)
    log_.push_back(std::to_string(steps_) + " a line of rank " + std::to_string(wire.src) + " lands on rank " +
                   std::to_string(piece.region->rank));
  wake_flag_waiters(piece.region->rank);
}

bool Machine::look_at_line(Lane& me, const Line* src, uint64_t flag, uint64_t* words) {
  if (timed()) {
    clockwork_->await_line(me, line_region(me, src, "ld_line").offset(src) / sizeof *src, flag, words);
    return true;
  }
  step(me);
  Region& r = line_region(me, src, "ld_line");
  if (r.rank != me.rank) throw_rule(me, "outside_memory", "ld_line of another rank's slabs");
  words[Line::kFlag] = src->words[Line::kFlag];
  if (words[Line::kFlag] != flag) return false;
  const GranuleSpan from(r.offset(src), sizeof *src);
  if (any(r.writing, from.at, from.n))
    throw_rule(me, "read_races_write", "a line has the flag that is waited for, and is still on its way");
  set(r.written, from.at, from.n, 0);
  std::memcpy(words, src->words, Line::kPayloadBytes);
  return true;
}

// ---------------------------------------------------------------- payload of timed worlds

bool Machine::has_payload(Lane& me, const void* p) {
  if (!timed()) return false;
  const Rank& r = rank(me.rank);
  const auto* at = static_cast<const unsigned char*>(p);
  return (at >= r.phantom_begin && at < r.phantom_end) || (r.has_on_rail(at) && !clockwork_->is_rail_fact(me, at));
}

void Machine::load_payload(Lane& me, const void* p, uint64_t bytes) {
  if (rank(me.rank).has_on_rail(static_cast<const unsigned char*>(p))) return clockwork_->load_rail(me, p, bytes);
  spend(me, me.launch->word_load_ps * Ps(bytes) / 8);
  clockwork_->stream(me, bytes);
}

}  // namespace hep::sim
