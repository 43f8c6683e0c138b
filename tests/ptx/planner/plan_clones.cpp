// Runs the planner's kernel on the PTX machine, with happens-before, and plans the same layers with the core.
//     plan_clones KERNELS.ptx LAYERS [COUNTS]
// A line a case: name, layers whose plans differ, clones, warp instructions of a layer at most. Reports of the machine
// go to stderr, and the exit status is 1 where there is one. COUNTS, a file: for each layer a line "name, layer,
// clones, instructions of its longest warp" and a line of each line of PTX that it executed, "kernel, line, warp
// instructions", between tabs.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <vector>

#include "balance/microbatch.h"
#include "kernels/plan_clones.h"
#include "machine.h"

namespace hep {
namespace {

struct Case {
  const char* name;
  int ranks, experts, slots, warps;
  double sigma, together = 0;  // of log-popularity: of each expert, of those of a block
  int blocks = 0;              // of experts that are hot together
};
constexpr Case kCases[] = {
    {"EP64 E256 +1 sigma 0.3", 64, 256, 1, kPlanWarps, 0.3},
    {"EP64 E256 +1 sigma 1.5", 64, 256, 1, kPlanWarps, 1.5},
    {"EP64 E256 +2 sigma 1.0", 64, 256, 2, kPlanWarps, 1.0},
    {"EP64 E256 +1 three warps", 64, 256, 1, 3, 1.0},
    {"EP32 E256 +1 hot together", 32, 256, 1, kPlanWarps, 0.3, 0.6, 32},  // all aims, and the search
    {"EP64 E256 +1 hot together", 64, 256, 1, kPlanWarps, 0.3, 1.0, 64},
    {"EP64 E256 +1 8 groups", 64, 256, 1, kPlanWarps, 0.3, 1.0, 8},
    {"EP8 E64 +2 sigma 1.0", 8, 64, 2, kPlanWarps, 1.0},
};
constexpr int kSearched = 65536;  // experts that a search looks at, as hybrid_ep.balance has it

struct Memory {
  ptxm::Machine& machine;
  int device;

  template <class T>
  T* map(std::vector<T>& of, const char* name) {
    of.resize(of.size() + !of.size());
    machine.map({of.data(), of.size() * sizeof(T), name, ptxm::Space::kDevice, device});
    return of.data();
  }
};

std::vector<int64_t> random_counts(const Case& c, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::vector<double> share;
  std::vector<int64_t> counts;
  double of_block = 0, sum = 0;
  for (int e = 0; e < c.experts; ++e) {
    if (c.blocks && e % (c.experts / c.blocks) == 0) of_block = c.together * normal(random);
    share.push_back(std::exp(c.sigma * normal(random) + of_block));
    sum += share.back();
  }
  for (int r = 0; r < c.ranks; ++r)
    for (double x : share) counts.push_back(int64_t(32768 * x / sum) + int64_t(random() % 16));
  return counts;
}

struct Counted {
  uint64_t longest_warp = 0;
  std::vector<ptxm::LineCount> lines;
};

// Warp instructions; -1 where the machine reported something.
int64_t run(const Case& c, const ptxm::Module& module, const balance::MicrobatchShape& s,
            const std::vector<int64_t>& counts, std::vector<int32_t>& owner, std::vector<int32_t>& slot_expert,
            std::vector<int64_t>& slot_tokens, std::vector<int64_t> (&share)[2], uint64_t seed, Counted* counted) {
  ptxm::Options options;
  options.seed = seed;
  options.races = true;
  if (counted) options.split_percent = 0;  // lanes parted at random would each count
  ptxm::Machine machine(options);
  Memory memory{machine, machine.add_device(ptxm::DeviceModel::h100())};
  ClonePlanParams p;
  p.shape = s;
  p.tables = CloneLayout::make(s, c.warps, 32);
  const CountsLayout layout{uint32_t(c.ranks), 1, uint32_t(c.experts)};
  std::vector<Vec16> vectors(size_t(c.ranks) * layout.vector_bytes() / sizeof(Vec16));
  p.counts = {layout, reinterpret_cast<unsigned char*>(memory.map(vectors, "counts"))};
  for (int r = 0; r < c.ranks; ++r)
    for (int e = 0; e < c.experts; ++e) {
      const auto n = uint32_t(counts[size_t(r * c.experts + e)]);
      std::memcpy(const_cast<unsigned char*>(p.counts.base) + uint64_t(r) * layout.vector_bytes() +
                      4 * (layout.experts_at() + uint32_t(e)),
                  &n, sizeof n);
    }
  std::vector<int32_t> by_owner, first;
  for (int e = 0; e < c.experts; ++e) by_owner.push_back(e);  // owners are contiguous
  for (int r = 0; r <= c.ranks; ++r) first.push_back(r * (c.experts / c.ranks));
  std::vector<CloneFlow> log(p.tables.flow_bytes / sizeof(CloneFlow));
  std::vector<ClonePlan> plan(1);
  p.owners = {memory.map(owner, "owner"), memory.map(by_owner, "by_owner"), memory.map(first, "first")};
  p.log = memory.map(log, "log");
  p.slot_expert = memory.map(slot_expert, "slot_expert");
  p.slot_tokens = memory.map(slot_tokens, "slot_tokens");
  p.plan = memory.map(plan, "plan");
  p.rank = c.ranks / 2;
  p.share = {memory.map(share[0], "take"), memory.map(share[1], "first")};
  ptxm::Launch launch;
  const std::string warps = "ILi" + std::to_string(c.warps) + "E";
  for (const ptxm::Kernel& k : module.kernels)
    if (k.name.find(warps) != std::string::npos) launch.kernel = &k;
  launch.device = memory.device;
  launch.block = uint32_t(c.warps * 32);
  launch.dynamic_shared = p.tables.bytes;
  launch.params.resize(launch.kernel->param_bytes);
  std::memcpy(launch.params.data(), &p, sizeof p);
  machine.start(launch);
  while (machine.run(1000) == ptxm::Progress::kSome) {
  }
  if (counted) *counted = {machine.longest_warp(), machine.line_counts()};
  for (const ptxm::Report& r : machine.reports()) std::fprintf(stderr, "%s: %s\n", c.name, r.text().c_str());
  return machine.reports().empty() ? int64_t(machine.warp_instructions()) : -1;
}

int check(const char* path, int layers, const char* counts_path) {
  std::ofstream counts_file;
  if (counts_path) counts_file.open(counts_path);
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  const auto module = ptxm::load(text.str(), "plan_clones");
  for (const Case& c : kCases) {
    balance::MicrobatchShape s;
    s.num_ranks = c.ranks;
    s.num_experts = c.experts;
    s.spare_slots = c.slots;
    s.search_nodes = kSearched / c.experts;
    balance::MicrobatchPlanner planner(s);
    std::mt19937_64 random(7);
    int differ = 0, clones = 0;
    int64_t most = 0;
    for (int layer = 0; layer < layers; ++layer) {
      const std::vector<int64_t> counts = random_counts(c, random);
      std::vector<int32_t> owner, expert(size_t(c.ranks * c.slots), -7), core_expert(expert.size());
      std::vector<int64_t> tokens(expert.size(), -7), core_tokens(expert.size()), share[2] = {tokens, tokens},
                                                                                  core_share[2] = {tokens, tokens};
      for (int e = 0; e < c.experts; ++e) owner.push_back(e / (c.experts / c.ranks));
      Counted counted;
      const int64_t instructions =
          run(c, *module, s, counts, owner, expert, tokens, share, uint64_t(layer), counts_path ? &counted : nullptr);
      if (instructions < 0) return 1;
      most = std::max(most, instructions);
      const int copies = planner.plan(counts.data(), owner.data(), core_expert.data(), core_tokens.data()).num_copies;
      clones += copies;
      counts_file << c.name << '\t' << layer << '\t' << copies << '\t' << counted.longest_warp << '\n';
      for (const ptxm::LineCount& l : counted.lines)
        counts_file << l.kernel << '\t' << l.line << '\t' << l.warp_instructions << '\n';
      balance::share_of_source(s, counts.data(), owner.data(), core_expert.data(), core_tokens.data(), c.ranks / 2,
                               core_share[0].data(), core_share[1].data());
      differ +=
          expert != core_expert || tokens != core_tokens || share[0] != core_share[0] || share[1] != core_share[1];
    }
    std::printf("%s: %d of %d differ, %d clones, %lld warp instructions\n", c.name, differ, layers, clones,
                static_cast<long long>(most));
  }
  return !counts_path || counts_file.flush() ? 0 : 1;
}

}  // namespace
}  // namespace hep

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return std::fprintf(stderr, "usage: %s KERNELS.ptx LAYERS [COUNTS]\n", argv[0]), 2;
  try {
    return hep::check(argv[1], std::atoi(argv[2]), argc == 4 ? argv[3] : nullptr);
  } catch (const std::exception& e) {
    return std::fprintf(stderr, "%s\n", e.what()), 1;
  }
}
