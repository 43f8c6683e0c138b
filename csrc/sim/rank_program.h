// What a simulated rank does: exchanges, dispatches and combines on the engine that users run, with every result
// compared with the oracle, bit for bit.
#pragma once
#include <memory>
#include <vector>

#include "kernels/instances/sim_executor.h"
#include "runtime/engine.h"
#include "sim/caller_routing.h"
#include "sim/clone_program.h"
#include "sim/oracle.h"

namespace hep::sim {

// Address space for rows that a timed world never touches.
class PhantomMemory {
 public:
  explicit PhantomMemory(uint64_t bytes);
  ~PhantomMemory();
  PhantomMemory(const PhantomMemory&) = delete;
  unsigned char* take(uint64_t bytes);
  const unsigned char* begin() const { return base_; }
  const unsigned char* end() const { return base_ + bytes_; }

 private:
  unsigned char* base_;
  uint64_t bytes_, used_ = 0;
};

// What kernels write of a plan, 128-byte aligned. Uninitialised, or full of ones where somebody looks at results.
class PlanBlock {
 public:
  PlanBlock() = default;
  PlanBlock(uint64_t bytes, bool poison);
  unsigned char* data() const { return reinterpret_cast<unsigned char*>(align_up(uint64_t(memory_.get()), 128)); }

 private:
  std::unique_ptr<unsigned char[]> memory_;
};

// What tokens choose, and what must come of it; by plan.
struct WorldRouting {
  std::vector<RoutingDecision> logical;   // over experts
  std::vector<CloneOracle> clones;        // where there are spare slots
  std::vector<RoutingDecision> physical;  // over the slots of ranks: the same where there are none to spare
  std::vector<Oracle> oracles;            // not of timed worlds, which compare nothing
};

class RankProgram {
 public:
  RankProgram(const WorldSpec& spec, const WorldRouting& routing, Engine& engine, SimExecutor& executor, int rank,
              bool timed);
  void run();

  static constexpr uint64_t kArenaSlack = 256;  // bytes that aligning a result may take

 private:
  void exchange(uint32_t plan);
  CallerRouting routing_of(uint32_t plan);
  void push(uint32_t plan, uint32_t round);
  void collect(uint32_t plan, uint32_t round);
  PlaceCall place_call(uint32_t plan) const;
  bool by_lines(uint32_t plan, uint32_t round, uint32_t operation) const;
  void route_by_lines(uint32_t plan, const DispatchCall& c);
  void dispatch(uint32_t plan, uint32_t round);
  uint64_t rows_of(uint32_t plan) const;
  void say_phantom(const PhantomMemory* phantom);
  void combine(uint32_t plan, uint32_t round);
  template <class Call>
  void set_launch(Call& c, uint64_t salt) const;
  void check_dispatch(const Oracle& o, uint64_t salt, const unsigned char* x, const unsigned char* scales,
                      const float* weights, uint64_t rows) const;
  void check_combine(const Oracle& o, uint64_t salt, const unsigned char* x, const float* weights,
                     uint32_t stride) const;
  void fill_inputs(const Oracle& o, uint64_t salt, unsigned char* x, float* weights, uint64_t rows) const;
  float expected_weight(const Oracle& o, Token t, int expert, uint64_t salt) const;
  template <class... Parts>
  void expect(bool ok, Parts&&... parts) const {
    at_.expect(ok, parts...);
  }

  const WorldSpec& s_;
  const std::vector<RoutingDecision>& decisions_;  // physical
  const std::vector<RoutingDecision>& logical_;
  const std::vector<Oracle>& oracles_;
  Engine& engine_;
  SimExecutor& executor_;
  const int rank_;
  const bool timed_;
  const World shape_;
  const DType dtype_;
  const uint32_t row_bytes_;
  ProgramPoint at_;
  CloneProgram clones_;
  struct Placed {
    PlanBlock memory, learned;
    std::shared_ptr<Plan> plan;
  };
  std::vector<Placed> plans_;
};

}  // namespace hep::sim
