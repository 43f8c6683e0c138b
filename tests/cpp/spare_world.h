// Worlds of threads, an engine each, that push weights of clones to spare slots and add their gradients to the owners'
// sums: on one node and on several, on every executor, with plans of all kinds, layer behind layer over the same slots.
// The bytes must be those of the owners, for as long as a rank uses them, and sums must have the bits of the clones'
// sums in the plan's order: of the nodes behind the owner's, then of its own.
#pragma once
#include "check.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "arch/host/errors.h"
#include "arch/sim/machine.h"
#include "kernels/instances/sim_executor.h"
#include "mutants.h"
#include "runtime/engine.h"
#include "thread_executor.h"
#include "world_case.h"

namespace hep::test {
// One layer's micro-batch: who clones what.
struct Step {
  std::vector<int32_t> slot_expert;  // [R, S]
  std::vector<int64_t> columns;      // [E]
  std::vector<int> num_blocks;       // [R]
  bool collects = true;              // evaluation brings no gradients home
};

struct Case {
  int num_nodes = 1, num_ranks = 1;
  SpareShape shape;
  std::string executor = "host_checked";
  std::vector<Step> steps;
  uint32_t chunk_bytes = 0;
  uint64_t seed = 0;
  double timeout_s = 60;
  int dead = -1;        // a rank that takes no part in the last step
  bool pushes = false;  // but for its push
  bool lingers = true;  // ranks look at their slots again before they go on

  int local() const { return num_ranks / num_nodes; }
  int spare() const { return int(shape.spare_slots); }
  int width() const { return int(shape.num_owners) + spare(); }
  int num_experts() const { return num_ranks * int(shape.num_owners); }
};

inline Case random_case(uint64_t seed, const std::string& executor, int most_ranks, int most_nodes = 1) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.executor = executor;
  if (most_nodes > 1) c.num_nodes = int(random.between(2, uint32_t(most_nodes)));
  c.num_ranks = c.num_nodes * int(random.between(1, uint32_t(std::max(1, most_ranks / c.num_nodes))));
  c.shape.spare_slots = random.between(1, 3);
  c.shape.num_owners = random.between(1, 3);
  c.shape.element_bytes = random.of({2u, 4u});
  c.shape.num_matrices = random.between(1, 3);
  for (uint32_t m = 0; m < c.shape.num_matrices; ++m) c.shape.elements[m] = 8 * random.of({1u, 2u, 5u, 33u, 80u});
  c.chunk_bytes = random.of({0u, 16u, 48u, 256u});
  c.shape.rail_chunk_bytes = random.of({48u, 256u, 4096u});
  c.shape.rail_slots = random.of({1u, 2u, 4u, 16u});
  c.shape.gradients = seed % 7 != 3;
  std::vector<int> slots(size_t(c.num_experts()));
  std::iota(slots.begin(), slots.end(), 0);
  for (uint32_t i = 0, steps = random.between(2, 5); i < steps; ++i) {
    Step step;
    if (random.one_in(3))  // owners move
      for (size_t e = slots.size() - 1; e > 0; --e) std::swap(slots[e], slots[random.below(uint32_t(e) + 1)]);
    for (const int slot : slots) step.columns.push_back(slot + slot / int(c.shape.num_owners) * c.spare());
    const uint32_t empty = random.of({0u, 2u, 5u, 100u}), hot = random.below(uint32_t(slots.size()));
    for (int j = 0; j < c.num_ranks * c.spare(); ++j) {
      const uint32_t expert = random.one_in(2) ? hot : random.below(uint32_t(slots.size()));
      step.slot_expert.push_back(random.below(6) < empty ? -1 : int32_t(expert));
    }
    for (int r = 0; r < c.num_ranks; ++r) step.num_blocks.push_back(int(random.of({1u, 2u, 3u, 4u, 8u, 9u})));
    step.collects = !random.one_in(4);
    c.steps.push_back(std::move(step));
    if (!c.shape.gradients) c.steps.back().collects = false;
  }
  return c;
}

// Numbers that tell where they come from. Gradients are such that the order of additions shows.
inline uint64_t mixed(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  return Random(Random(Random(Random(a).next() + b).next() + c).next() + d).next();
}
inline unsigned char weight_byte(size_t step, int expert, uint32_t matrix, uint64_t byte) {
  return static_cast<unsigned char>(mixed(step, uint64_t(expert), matrix, byte));
}
inline float gradient(size_t step, int slot, uint32_t matrix, uint64_t element) {
  const uint64_t x = mixed(step + 1000, uint64_t(slot), matrix, element);
  return std::ldexp(float(int(x & 0xffffff) - 0x800000), int(x >> 32 & 15) - 23);  // all bits of a float
}

inline void expect(bool ok, const std::string& what) {
  if (!ok) throw check::Failure(what);
}

class RankOf {
 public:
  RankOf(const Case& c, Engine& engine, unsigned char* segment, int rank)
      : c_(c),
        engine_(engine),
        layout_(engine.layout()),
        segment_(segment),
        rank_(rank),
        random_(c.seed * 77 + uint64_t(rank)) {}

  void run() {
    for (size_t i = 0; i < c_.steps.size(); ++i) {
      const bool dies = rank_ == c_.dead && i + 1 == c_.steps.size();
      if (dies && !c_.pushes) return;
      push(i);
      if (dies) return;
      compare(i, "at once");
      if (c_.lingers) {
        for (uint32_t turns = random_.below(60); turns; --turns) std::this_thread::yield();
        compare(i, "later");
      }
      if (c_.steps[i].collects) collect(i);
    }
  }

 private:
  std::string at(size_t i) const {
    return "seed " + std::to_string(c_.seed) + ", step " + std::to_string(i) + ", rank " + std::to_string(rank_) + ": ";
  }
  // The expert of each of this rank's owner slots.
  std::vector<int> owned(const Step& step) const {
    std::vector<int> experts(size_t(c_.shape.num_owners));
    for (int e = 0; e < c_.num_experts(); ++e)
      if (const int64_t column = step.columns[size_t(e)]; column / c_.width() == rank_)
        experts[size_t(column % c_.width())] = e;
    return experts;
  }
  SpareCall call(const Step& step, const std::vector<uint64_t>& addresses) {
    SpareCall s;
    slot_expert_ = step.slot_expert, columns_ = step.columns;  // every rank has its own
    s.slot_expert = slot_expert_.data();
    s.columns = columns_.data();
    s.experts = addresses.data();
    s.num_blocks = step.num_blocks[size_t(rank_)];
    s.chunk_bytes = c_.chunk_bytes;
    return s;
  }
  void push(size_t i) {
    const Step& step = c_.steps[i];
    std::vector<std::vector<Vec16>> weights;
    std::vector<uint64_t> addresses;
    for (const int expert : owned(step))
      for (uint32_t m = 0; m < c_.shape.num_matrices; ++m) {
        const uint64_t bytes = c_.shape.elements[m] * c_.shape.element_bytes;
        weights.emplace_back(bytes / 16);
        auto* const data = reinterpret_cast<unsigned char*>(weights.back().data());
        for (uint64_t b = 0; b < bytes; ++b) data[b] = weight_byte(i, expert, m, b);
        addresses.push_back(reinterpret_cast<uint64_t>(data));
      }
    engine_.push_weights(call(step, addresses));
    engine_.await_weights(call(step, addresses));
  }
  void compare(size_t i, const char* when) const {
    const Step& step = c_.steps[i];
    for (int s = 0; s < c_.spare(); ++s) {
      const int expert = step.slot_expert[size_t(rank_ * c_.spare() + s)];
      for (uint32_t m = 0; m < c_.shape.num_matrices && expert >= 0; ++m) {
        const uint64_t bytes = c_.shape.elements[m] * c_.shape.element_bytes;
        const unsigned char* found = segment_ + layout_.spare_weights + c_.shape.weights_at(m) + uint64_t(s) * bytes;
        for (uint64_t b = 0; b < bytes; ++b)
          expect(found[b] == weight_byte(i, expert, m, b),
                 at(i) + "byte " + std::to_string(b) + " of slot " + std::to_string(s) + " differs " + when);
      }
    }
  }
  void collect(size_t i) {
    const Step& step = c_.steps[i];
    for (int s = 0; s < c_.spare(); ++s)
      for (uint32_t m = 0; m < c_.shape.num_matrices; ++m) {
        auto* const to = reinterpret_cast<float*>(segment_ + layout_.spare_gradients + c_.shape.gradients_at(m)) +
                         uint64_t(s) * c_.shape.elements[m];
        for (uint64_t e = 0; e < c_.shape.elements[m]; ++e) to[e] = gradient(i, rank_ * c_.spare() + s, m, e);
      }
    std::vector<std::vector<float>> sums;
    std::vector<uint64_t> addresses;
    const uint64_t shift = random_.below(4);  // a sum may begin at any element
    for (int o = 0; o < int(c_.shape.num_owners); ++o)
      for (uint32_t m = 0; m < c_.shape.num_matrices; ++m) {
        sums.emplace_back(c_.shape.elements[m] + 8, 0.375f);
        const auto base = reinterpret_cast<uint64_t>(sums.back().data());
        addresses.push_back(align_up(base, 16) + 4 * shift);
      }
    engine_.collect_gradients(call(step, addresses));
    // Written again at once, as a next layer's backward does: nobody may read it any more.
    std::memset(segment_ + layout_.spare_gradients, 0x7f, layout_.gradient_bytes);
    const std::vector<int> experts = owned(step);
    for (size_t k = 0; k < addresses.size(); ++k) {
      const uint32_t m = uint32_t(k % c_.shape.num_matrices);
      const auto* found = reinterpret_cast<const float*>(addresses[k]);
      for (uint64_t e = 0; e < c_.shape.elements[m]; ++e) {
        float wanted = 0.375f;
        for (int behind = 1; behind <= c_.num_nodes; ++behind)
          add_clones(wanted, i, experts[k / c_.shape.num_matrices], (rank_ / c_.local() + behind) % c_.num_nodes, m, e);
        expect(std::bit_cast<uint32_t>(found[e]) == std::bit_cast<uint32_t>(wanted),
               at(i) + "element " + std::to_string(e) + " of the sum of matrix " + std::to_string(m) + " differs");
      }
      for (const float* p = sums[k].data(); p != sums[k].data() + sums[k].size(); ++p)
        expect((p >= found && p < found + c_.shape.elements[m]) || *p == 0.375f, at(i) + "beside a sum");
    }
  }

  // Of an expert and a node.
  void add_clones(float& sum, size_t i, int expert, int node, uint32_t m, uint64_t e) const {
    const size_t slots = size_t(c_.local() * c_.spare()), first = size_t(node) * slots;
    float clones = 0;
    bool any = false;
    for (size_t j = first; j < first + slots; ++j) {
      if (c_.steps[i].slot_expert[j] != expert) continue;
      clones = any ? clones + gradient(i, int(j), m, e) : gradient(i, int(j), m, e);
      any = true;
    }
    if (any) sum += clones;
  }

  const Case& c_;
  Engine& engine_;
  const BufferLayout& layout_;
  unsigned char* const segment_;
  const int rank_;
  Random random_;
  std::vector<int32_t> slot_expert_;
  std::vector<int64_t> columns_;
};

inline BufferShape shape_of(const Case& c) {
  BufferShape shape;
  shape.num_nodes = uint32_t(c.num_nodes);
  shape.num_local_ranks = uint32_t(c.local());
  shape.num_experts = uint32_t(c.num_experts());
  shape.spares = c.shape;
  return shape;
}

// All ranks in one thread, in an order by the seed; empty: nothing failed.
inline std::string simulate(const Case& c) {
  const BufferShape shape = shape_of(c);
  const BufferLayout layout(shape);
  sim::MachineConfig config;
  config.num_nodes = c.num_nodes;
  config.num_local_ranks = c.local();
  config.seed = c.seed;
  std::vector<std::shared_ptr<Segment>> segments;
  sim::Machine machine(config);
  for (int r = 0; r < c.num_ranks; ++r) {
    segments.push_back(Segment::private_memory(layout.total));
    machine.add_segment(r, segments.back()->data(), layout);
  }
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < c.num_ranks; ++r) {
    const auto maker = [&](unsigned char* const*, uint64_t) {
      return std::make_unique<SimExecutor>(machine, r, uint64_t(1) << 16);
    };
    engines.push_back(std::make_unique<Engine>(r, shape, segments, 100.0, maker, c.seed));
    if (c.seed % 2) engines.back()->start_counters_at(uint64_t(1) << 40);
  }
  std::string failed;
  machine.run([&](int rank) {
    try {
      RankOf(c, *engines[size_t(rank)], segments[size_t(rank)]->data(), rank).run();
    } catch (const std::exception& e) {
      if (failed.empty()) failed = e.what();
    }
  });
  return failed.empty() && !machine.failure().kind.empty() ? machine.failure().what : failed;
}

// The first rank's failure that is not another's; empty: none.
inline std::string run(const Case& c) {
  if (c.executor == "sim") return simulate(c);
  const BufferShape shape = shape_of(c);
  std::vector<std::shared_ptr<Segment>> segments;
  for (int r = 0; r < c.num_ranks; ++r) segments.push_back(Segment::private_memory(BufferLayout(shape).total));
  std::vector<std::unique_ptr<Engine>> engines;
  std::atomic<bool> stop = false;
  for (int r = 0; r < c.num_ranks; ++r) {
    engines.push_back(make_engine(c.executor, r, shape, segments, c.timeout_s, c.seed));
    engines.back()->set_interrupt_check([&stop] { return stop.load(); });
  }
  std::string first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int r = 0; r < c.num_ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        RankOf(c, *engines[size_t(r)], segments[size_t(r)]->data(), r).run();
      } catch (const host::Interrupted&) {
      } catch (const std::exception& e) {
        std::lock_guard lock(mutex);
        if (first.empty()) first = e.what();
        stop = true;
      }
    });
  for (std::thread& thread : threads) thread.join();
  return first;
}

inline void random_worlds(const std::string& executor, uint64_t worlds, int most_ranks = 6, int most_nodes = 1) {
  for (uint64_t seed = 1; seed <= worlds; ++seed) {
    const std::string failed = run(random_case(seed, executor, most_ranks, most_nodes));
    if (!failed.empty()) throw check::Failure(executor + ", seed " + std::to_string(seed) + ": " + failed);
  }
}

}  // namespace hep::test
