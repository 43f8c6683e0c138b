// Running kernels on the host: launch() one rank's grid, launch_world() the grids of several ranks at once.
// Both return when every lane has returned, or throw the first failure after every other lane has ended:
// DeadlineError, ProtocolError, Interrupted, or what the body threw. The next launch works.
#pragma once
#include <functional>
#include <span>
#include <stdexcept>
#include <vector>

#include "arch/host/errors.h"
#include "arch/host/host_arch.h"
#include "arch/host/shared_memory.h"

namespace hep::host {

template <class A>
struct RankProgram {
  LaunchConfig config;
  std::function<void(A&, std::byte* smem)> body;  // called once per lane
};

// The blocks and lanes of a launch, kept per thread so that a launch of a shape seen before allocates
// nothing.
template <class A>
struct GridMemory {
  SharedMemoryPool smem;
  std::vector<typename A::Model::Block> blocks;
  std::vector<typename A::Lane> lanes;
  std::vector<LaneBase*> lane_ptrs;
  std::vector<const RankProgram<A>*> program_of;  // by lane
  bool in_use = false;
};

void check_config(const LaunchConfig& config);  // std::invalid_argument naming field, value and fix

namespace detail {

// Lanes are created block by block and warp by warp, so that lanes that talk are neighbours in the scan.
template <class A>
void lay_out(GridMemory<A>& grid, std::span<const RankProgram<A>> programs, typename A::Model::World& world) {
  size_t num_blocks = 0, num_lanes = 0, smem_bytes = 0;
  for (const RankProgram<A>& p : programs) {
    check_config(p.config);
    const size_t blocks = static_cast<size_t>(p.config.num_blocks);
    num_blocks += blocks;
    num_lanes += blocks * static_cast<size_t>(p.config.num_warps * A::kLanes);
    smem_bytes += blocks * SharedMemoryPool::padded(p.config.smem_bytes);
  }
  std::byte* smem = grid.smem.get(smem_bytes);
  if (grid.blocks.size() < num_blocks) grid.blocks.resize(num_blocks);
  if (grid.lanes.size() < num_lanes) grid.lanes.resize(num_lanes);
  grid.lane_ptrs.clear();
  grid.program_of.clear();
  size_t block_at = 0, lane_at = 0;
  for (const RankProgram<A>& p : programs) {
    for (int b = 0; b < p.config.num_blocks; ++b) {
      auto& block = grid.blocks[block_at++];
      block.reset(b, p.config, smem);
      world.adopt(block);
      smem += SharedMemoryPool::padded(p.config.smem_bytes);
      for (int w = 0; w < p.config.num_warps; ++w) {
        for (int l = 0; l < A::kLanes; ++l) {
          auto& lane = grid.lanes[lane_at++];
          lane.reset(block, w, l);
          grid.lane_ptrs.push_back(&lane);
          grid.program_of.push_back(&p);
        }
      }
    }
  }
}

}  // namespace detail

template <class A>
void launch_world(std::span<const RankProgram<A>> programs) {
  using Model = typename A::Model;
  static thread_local GridMemory<A> grid;
  if (grid.in_use) throw std::logic_error("launch() called from inside a kernel");
  struct Release {
    ~Release() { grid.in_use = false; }
  } release;
  grid.in_use = true;
  GridMemory<A>& my_grid = grid;  // lanes may run on other threads, which have their own `grid`

  const uint64_t seed = programs.empty() ? 0 : programs.front().config.seed;
  typename Model::World world(seed);
  detail::lay_out<A>(my_grid, programs, world);

  LaunchPlan plan;
  plan.lanes = my_grid.lane_ptrs;
  plan.engine = world.engine();
  plan.seeded = Model::kChecked;
  plan.seed = seed;
  for (const RankProgram<A>& p : programs) plan.configs.push_back(&p.config);
  plan.lane_main = [&](LaneBase& base) {
    auto& lane = static_cast<typename A::Lane&>(base);
    A arch(lane);
    Model::template lane_begins<A::kLanes>(lane, world);
    my_grid.program_of[base.index]->body(arch, base.block->smem);
    Model::lane_returns(lane);
  };
  A::Exec::run(plan);
}

template <class A>
void launch(const LaunchConfig& config, const std::function<void(A&, std::byte* smem)>& body) {
  const RankProgram<A> program{config, body};
  launch_world<A>(std::span<const RankProgram<A>>(&program, 1));
}

}  // namespace hep::host
