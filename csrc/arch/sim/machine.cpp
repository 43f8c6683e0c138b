// Lanes as fibers, the choice of what goes next, and the ends of a world: done, deadlocked, expired, failed.
#include "arch/sim/machine.h"

#include <algorithm>
#include <utility>

#include "arch/host/errors.h"
#include "arch/sim/clockwork.h"

namespace hep::sim {
namespace {

constexpr Ps kStepPs = 1000;  // exploration: what one choice moves the clock, so that waits have an age
thread_local Lane* t_running = nullptr;
thread_local std::vector<std::unique_ptr<host::Fiber>> t_fibers;  // idle ones: making a stack costs system calls

// As on the host: of waits that expire together the one that names another rank is nearest to the cause.
int how_telling(const Lane& lane) {
  const WaitInfo& info = lane.wait.info;
  if (info.peer >= 0) return info.peer != lane.rank ? 3 : 2;
  return info.site != Site::kBlockSync ? 1 : 0;
}

}  // namespace

Lane* Machine::running() {
  return t_running;
}

Machine::Machine(const MachineConfig& config)
    : config_(config),
      world_{config.num_nodes, config.num_local_ranks, 0},
      strategy_(config.strategy, config.seed, *this),
      memory_(!config.timed),
      ranks_(size_t(world_.num_ranks())) {
  for (int r = 0; r < world_.num_ranks(); ++r) wires_.push_back({r, -1});
  for (int r = 0; r < world_.num_ranks(); ++r)
    for (int n = 0; n < config.num_nodes; ++n) wires_.push_back({r, n});
  timeline_.keep_spans = config.trace;
  if (config.timed) clockwork_ = std::make_unique<Clockwork>(*this);
}

// Every lane has ended, so its fiber may serve another world.
Machine::~Machine() {
  for (auto& lane : lanes_)
    if (!lane->alive) t_fibers.push_back(std::move(lane->fiber));
}

void Machine::add_segment(int r, unsigned char* data, const BufferLayout& layout) {
  if (!layout_) layout_.emplace(layout);
  rank(r).segment = data;
  rank(r).rail_begin = data + layout.latency_send;
  rank(r).rail_end = data + layout.latency_recv + layout.latency_rail.bytes();
  using Use = Region::Use;
  const auto add = [&](const char* name, uint64_t at, uint64_t bytes, Use use) {
    if (bytes) memory_.add({name, data + at, bytes, r, use, use != Use::kCounts});
  };
  const uint64_t ring = uint64_t(layout.num_nodes - 1) * layout.rail_slots * layout.slot_bytes;
  add("ready_lines", layout.ready, layout.num_local_ranks * BufferLayout::kFlagStride, Use::kCounts);
  add("counts", layout.counts_at, 2 * layout.num_ranks * layout.counts.vector_bytes(), Use::kCounts);
  add("clone_counts", layout.clone_counts_at, 2 * layout.num_ranks * layout.clone_counts.vector_bytes(), Use::kCounts);
  add("spare_weights", layout.spare_weights, layout.spare_gradients - layout.spare_weights, Use::kCounts);
  add("spare_gradients", layout.spare_gradients, layout.gradient_bytes, Use::kCounts);
  add("spare_channel_rings", layout.channel_rings, layout.channels.ring_bytes(), Use::kCounts);
  add("latency_rail_send", layout.latency_send, layout.latency_rail.bytes(), Use::kRail);
  add("latency_rail_receive", layout.latency_recv, layout.latency_rail.bytes(), Use::kRail);
  add("rail_send_ring", layout.rail_send, ring, Use::kSendRing);
  add("rail_receive_ring", layout.rail_recv, ring, Use::kRecvRing);
  add("receive_rows", layout.recv, layout.recv_bytes, Use::kRecvRows);
  add("arena", layout.arena, layout.arena_bytes, Use::kArena);
  add("latency_slabs", layout.latency, layout.slabs.bytes(), Use::kSlabs);
}

int Machine::rank_of(const void* p) const {
  const Region* region = memory_.find(p, 1);
  return region ? region->rank : -1;
}

// ---------------------------------------------------------------- lanes

Lane& Machine::take_lane(int r) {
  if (free_lanes_.empty()) {
    if (t_fibers.empty()) t_fibers.push_back(std::make_unique<host::Fiber>());
    lanes_.push_back(std::make_unique<Lane>(*this, num_wires() + uint32_t(lanes_.size())));
    free_lanes_.reserve(lanes_.capacity());
    free_lanes_.push_back(lanes_.back().get());
    lanes_.back()->fiber = std::move(t_fibers.back());
    t_fibers.pop_back();
  }
  Lane& lane = *free_lanes_.back();
  free_lanes_.pop_back();
  lane.rank = r;
  lane.warp = 0;
  lane.block = nullptr;
  lane.launch = nullptr;
  lane.role = "host";
  lane.where = Where::current();
  lane.verdict = Verdict::kGo;
  lane.wait = {};
  lane.time = nullptr;
  lane.merged_bar = nullptr;
  lane.first_group = lane.num_released = 0;
  lane.groups.clear();
  lane.open.clear();
  lane.touched.clear();
  lane.line_runs.clear();
  lane.row_bytes = lane.rows_in_flight = 0;
  lane.alive = true;
  lane.ready = false;
  ++alive_;
  lane.fiber->assign(&Machine::lane_entry, &lane);
  return lane;
}

host::FiberContext& Machine::lane_entry(void* arg) {
  Lane& me = *static_cast<Lane*>(arg);
  Machine& m = *me.machine;
  std::exception_ptr error;
  try {
    if (me.verdict != Verdict::kGo) throw Abandoned{};
    if (me.block) {
      me.launch->body(me);
      m.lane_returns(me);
    } else {
      m.program_(me.rank);
    }
  } catch (const Abandoned&) {
  } catch (...) {
    error = std::current_exception();
  }
  me.alive = false;
  --m.alive_;
  t_running = nullptr;
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (const RuleError& e) {
      m.fail("rule", e.rule(), e.what());
    } catch (const WrongResult& e) {
      m.fail("wrong", "wrong_result", e.what());
    } catch (const std::bad_alloc& e) {
      m.reserve_.reset();
      if (!me.block) m.fail("memory", "", e.what());
    } catch (const std::exception& e) {
      if (!me.block) m.fail("error", "", e.what());
    }
  }
  if (me.block) {
    Launch& launch = *me.launch;
    launch.end = std::max(launch.end, me.now);
    if (error && !launch.error) {
      launch.error = error;
      m.abandon(launch, me.rank);
    }
    Lane& host = *m.rank(me.rank).host;
    if (--launch.alive == 0 && host.wait.kind == Wait::kLaunch) m.wake(host);
  }
  m.free_lanes_.push_back(&me);
  return m.next_context();
}

void Machine::run(const std::function<void(int)>& program) {
  program_ = program;
  for (int r = 0; r < num_ranks(); ++r) {
    rank(r).host = &take_lane(r);
    wake(*rank(r).host);
  }
  host::FiberContext& first = next_context();
  if (&first != &main_) host::fiber_switch(main_, first);
  t_running = nullptr;
  program_ = nullptr;
  // A kernel returns with puts in flight; but each has a reader who waits for it, so that in the end they have landed.
  // Credits alone may still be on their way.
  if (config_.fault.kind != Fault::kNone || std::ranges::any_of(ranks_, &Rank::dead)) return;
  for (const Wire& wire : wires_)
    if (!wire.lines.empty())
      fail("rule", "unfinished_line", "all ranks have returned, and nobody has waited for a line");
  for (const Wire& wire : wires_)
    if (std::ranges::any_of(wire.puts, [](const Put& put) { return put.bytes != 0; }))
      fail("rule", "unfinished_put", "all ranks have returned, and nobody has waited for a put");
}

void Machine::take_smem(Block& block, size_t bytes) {
  if (timed()) {
    block.pages.reserve(bytes);
    block.smem = block.pages.data();  // of a page, so that 128 divides it
    return;
  }
  if (block.memory.size() < bytes + 128) block.memory.resize(bytes + 128);
  block.smem = block.memory.data() + (128 - reinterpret_cast<uintptr_t>(block.memory.data()) % 128) % 128;
  block.shadow.reset(bytes);
}

void Machine::launch(int r, Launch call) {
  Rank& rank = ranks_[size_t(r)];
  Lane& host = *rank.host;
  Launch& launch = rank.launch;
  launch = std::move(call);
  launch.alive = uint32_t(launch.num_blocks * launch.num_warps);
  launch.start = host.now;
  launch.end = 0;
  while (rank.blocks.size() < size_t(launch.num_blocks)) rank.blocks.push_back(std::make_unique<Block>());
  for (int b = 0; b < launch.num_blocks; ++b) {
    Block& block = *rank.blocks[size_t(b)];
    block.idx = b;
    block.rank = r;
    block.launch = &launch;
    take_smem(block, launch.smem_bytes);
    block.arrived = 0;
    block.meet_at = 0;
    for (uint64_t& arrived : block.group_arrived) arrived = 0;
    block.lanes.clear();
    for (int w = 0; w < launch.num_warps; ++w) {
      Lane& lane = take_lane(r);
      lane.block = &block;
      lane.launch = &launch;
      lane.warp = w;
      lane.role = "";
      lane.now = host.now + config_.costs.launch_ps;
      lane.seen_changes = rank.changes;
      block.lanes.push_back(&lane);
      wake(lane);
    }
  }
  host.wait = {Wait::kLaunch};
  suspend(host);
  host.now = std::max(host.now, launch.end);
  timeline_.kernels.push_back({launch.kernel, r, 0, launch.start, host.now});
  if (launch.error) {
    wires_[size_t(r)].loads.clear();
    std::rethrow_exception(std::exchange(launch.error, nullptr));
  }
}

void Machine::set_role(Lane& me, const char* role) {
  me.role = role;
  if (std::find_if(roles_.begin(), roles_.end(), [&](const char* r) { return std::string_view(r) == role; }) ==
      roles_.end())
    roles_.push_back(role);
  if (!timed()) return;
  auto& times = rank(me.rank).times;
  const auto it = std::find_if(times.begin(), times.end(), [&](const RoleTime& t) { return t.role == role; });
  me.time = it != times.end() ? &*it : &times.emplace_back(RoleTime{role});
  if (me.launch->charged_role && std::string_view(role) == me.launch->charged_role) spend(me, me.launch->charge);
}

// ---------------------------------------------------------------- what goes next

void Machine::set_ready(uint32_t actor, bool& flag) {
  if (std::exchange(flag, true)) return;
  ready_.push_back(actor);
}

void Machine::unready(size_t at, bool& flag) {
  flag = false;
  ready_[at] = ready_.back();
  ready_.pop_back();
}

void Machine::wake(Lane& lane) {
  lane.wait.kind = Wait::kNothing;
  if (rank(lane.rank).dead && !aborting_) return;
  set_ready(lane.actor, lane.ready);
}

host::FiberContext& Machine::next_context() {
  t_running = nullptr;
  for (;;) {
    if (alive_ == 0) return main_;
    if (ready_.empty()) {
      if (!idle()) abandon_all();
      continue;
    }
    const uint32_t at = timed() || aborting_ ? uint32_t(ready_.size()) - 1 : strategy_.pick(ready_);
    const uint32_t actor = ready_[at];
    ++steps_;
    if (!timed()) clock_ += kStepPs;
    if (!timed() && !aborting_ && steps_ > config_.max_steps) {
      fail("deadlock", "livelock", "lanes run, and nothing comes of it");
      continue;
    }
    Fault& fault = config_.fault;
    if (fault.kind == Fault::kRankDies && !aborting_ && actor_rank(actor) == fault.rank && fault.at-- == 0) {
      fault.kind = Fault::kNone;
      kill(fault.rank);
      continue;
    }
    if (is_lane(actor)) {
      Lane& lane = *lanes_[actor - num_wires()];
      unready(at, lane.ready);
      t_running = &lane;
      return lane.fiber->context();
    }
    Wire& wire = wires_[actor];
    try {
      run_wire(wire);
      if (!aborting_ && (wire.stopped || wire.empty())) unready(at, wire.ready);
    } catch (const RuleError& e) {
      fail("rule", e.rule(), e.what());
    }
  }
}

void Machine::suspend(Lane& me) {
  if (me.verdict == Verdict::kAbandoned) throw Abandoned{};
  host::FiberContext& next = next_context();
  if (&next != &me.fiber->context()) host::fiber_switch(me.fiber->context(), next);
  t_running = &me;
  if (me.verdict != Verdict::kGo) raise(me);
}

void Machine::block(Lane& me) {
  if (timed()) clockwork_->flush(me);
  me.wait.since = timed() ? me.now : clock_;
  suspend(me);
}

void Machine::yield(Lane& me) {
  set_ready(me.actor, me.ready);
  suspend(me);
}

void Machine::step(Lane& me) {
  if (timed()) return;
  if (strategy_.preempts()) yield(me);
}

// Nothing is ready. True: something was made to move.
bool Machine::idle() {
  if (aborting_) {  // cannot happen: abandoned lanes are ready
    fail("error", "", "simulator: an abandoned lane does not end");
    return false;
  }
  if (timed() && clockwork_->advance()) return true;
  bool survivor = false;
  for (const auto& lane : lanes_) survivor |= lane->alive && !rank(lane->rank).dead;
  if (!survivor) return false;
  const bool faulty = config_.fault.kind != Fault::kNone || std::ranges::any_of(ranks_, &Rank::dead);
  if (faulty && config_.timeout_ps > 0) {
    expire();
    return true;
  }
  fail("deadlock", "deadlock", wait_graph());
  return true;
}

// The virtual clock reaches the deadline of one wait: the most telling, then the oldest.
void Machine::expire() {
  Lane* expired = nullptr;
  for (const auto& lane : lanes_) {
    if (!lane->alive || rank(lane->rank).dead || lane->wait.kind == Wait::kLaunch) continue;
    const int more = expired ? how_telling(*lane) - how_telling(*expired) : 1;
    if (more > 0 || (more == 0 && lane->wait.since < expired->wait.since)) expired = lane.get();
  }
  if (!expired) return abandon_all();
  clock_ = std::max(clock_, expired->wait.since + config_.timeout_ps);
  expired->verdict = Verdict::kExpired;
  std::erase(rank(expired->rank).waiting, expired);
  set_ready(expired->actor, expired->ready);
}

void Machine::raise(Lane& me) {
  if (me.verdict == Verdict::kAbandoned) throw Abandoned{};
  me.verdict = Verdict::kGo;
  const Wait& w = me.wait;
  TimeoutReport o;
  o.site = w.info.site;
  o.rank = me.rank;
  o.node = me.rank / config_.num_local_ranks;
  o.peer = w.info.peer;
  o.peer_node = w.info.peer >= 0 ? w.info.peer / config_.num_local_ranks : -1;
  o.block = me.block ? me.block->idx : -1;
  o.warp = me.warp;
  o.role = me.role;
  o.chunk = w.info.chunk;
  o.expected = w.kind == Wait::kPoll ? w.expected : w.kind == Wait::kPhase ? w.value ^ 1 : w.value;
  o.seen = w.kind == Wait::kPoll ? w.seen : w.word ? (w.kind == Wait::kPhase ? *w.word & 1 : *w.word) : 0;
  o.waited_s = double(clock_ - w.since) * 1e-12;
  me.wait.kind = Wait::kNothing;
  throw host::DeadlineError(o);
}

void Machine::kill(int r) {
  rank(r).dead = true;
  if (config_.log) log_.push_back("rank " + std::to_string(r) + " dies");
  std::erase_if(ready_, [&](uint32_t actor) { return actor_rank(actor) == r; });
  for (auto& lane : lanes_)
    if (lane->rank == r) lane->ready = false;
  for (Wire& wire : wires_)
    if (wire.src == r) {
      wire.ready = false;
      wire.stopped = true;
    }
}

void Machine::abandon(Launch& launch, int r) {
  rank(r).waiting.clear();
  for (auto& lane : lanes_) {
    if (!lane->alive || lane->launch != &launch) continue;
    lane->verdict = Verdict::kAbandoned;
    wake(*lane);
  }
}

void Machine::abandon_all() {
  aborting_ = true;
  ready_.clear();
  for (Wire& wire : wires_) wire.ready = false;
  for (Rank& r : ranks_) r.waiting.clear();
  for (auto& lane : lanes_) {
    lane->ready = false;
    if (!lane->alive) continue;
    lane->verdict = Verdict::kAbandoned;
    set_ready(lane->actor, lane->ready);
  }
}

void Machine::fail(const char* kind, const char* rule, const std::string& what) {
  if (aborting_) return;  // what follows the first failure is its consequence
  failure_ = {kind, rule, what};
  if (config_.log) log_.push_back(std::string("FAILURE ") + kind + ": " + what);
  abandon_all();
}

}  // namespace hep::sim
