// The words of failures: who, where, at which line; and who waits for whom.
#include <map>

#include "arch/sim/machine.h"

namespace hep::sim {
namespace {

std::string line_text(const Lane& lane) {
  std::string file = lane.where.file_name();
  return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(lane.where.line());
}

}  // namespace

std::string lane_text(const Lane& lane) {
  std::string text = "rank " + std::to_string(lane.rank);
  if (lane.block) text += ", block " + std::to_string(lane.block->idx);
  return text + ", role " + (*lane.role ? lane.role : "-");
}

std::string wait_text(const Lane& lane) {
  const Wait& w = lane.wait;
  std::string text = lane_text(lane) + " waits ";
  if (w.kind == Wait::kLaunch) return text + "for its kernel " + lane.machine->rank(lane.rank).launch.kernel;
  text += std::string("at ") + site_name(w.info.site);
  if (w.info.peer >= 0) text += " for rank " + std::to_string(w.info.peer);
  if (w.info.chunk >= 0) text += ", chunk " + std::to_string(w.info.chunk);
  if (w.kind == Wait::kWord) text += ", expects " + std::to_string(w.value) + ", sees " + std::to_string(*w.word);
  if (w.kind == Wait::kPoll) text += ", expects " + std::to_string(w.expected) + ", sees " + std::to_string(w.seen);
  if (w.kind == Wait::kPhase) {
    const uint64_t bar = *w.word;
    text += ", " + std::to_string(host::mbar::pending(bar)) + " arrivals and " + std::to_string(host::mbar::tx(bar)) +
            " bytes missing";
  }
  return text + " (" + line_text(lane) + ")";
}

void throw_rule(const Lane& lane, const char* rule, const std::string& detail) {
  std::string text = std::string(rule) + ": " + detail + " (" + lane_text(lane);
  const int64_t chunk = lane.wait.info.chunk;
  if (chunk >= 0) text += ", last waited for chunk or stage " + std::to_string(chunk);
  throw RuleError(rule, text + "; " + line_text(lane) + ")");
}

void Machine::note(const Lane& me, const std::string& what) {
  if (!config_.log) return;
  log_.push_back(std::to_string(timed() ? me.now : Ps(steps_)) + " " + lane_text(me) + ": " + what + " (" +
                 line_text(me) + ")");
}

// Every wait, and a ring of ranks if there is one: rank -> ranks that its lanes wait for.
std::string Machine::wait_graph() const {
  std::string text = "no lane can run and nothing is in flight";
  std::map<int, int> edge;  // the first peer that a rank waits for
  for (const auto& lane : lanes_) {
    if (!lane->alive || lane->wait.kind == Wait::kNothing || lane->wait.kind == Wait::kLaunch) continue;
    text += "\n  " + wait_text(*lane);
    if (lane->wait.info.peer >= 0 && lane->wait.info.peer != lane->rank) edge.emplace(lane->rank, lane->wait.info.peer);
  }
  for (const auto& start : edge) {
    std::string path = std::to_string(start.first);
    int at = start.first;
    for (size_t i = 0; i <= edge.size() && edge.contains(at); ++i) {
      at = edge[at];
      path += " -> " + std::to_string(at);
      if (at == start.first) return text + "\n  ring of ranks: " + path;
    }
  }
  return text;
}

}  // namespace hep::sim
