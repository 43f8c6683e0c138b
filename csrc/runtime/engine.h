// The engine of one rank: its registered buffer, its peers' mappings, the counters that tie operations
// together, and the launches. Not thread-safe; a second concurrent call is refused.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/instances/executor.h"
#include "layout/buffer.h"
#include "layout/headers.h"
#include "layout/plan_memory.h"
#include "runtime/arena.h"
#include "runtime/plan.h"
#include "runtime/segment.h"

namespace hep {

struct RoutingInput {
  const int64_t* topk_idx = nullptr;           // [T, topk], -1 = dropped
  const unsigned char* routing_map = nullptr;  // [T, E]
  const float* weights = nullptr;              // shaped like the routing, may be null
  uint32_t num_tokens = 0, topk = 0;
};

// What the exchange kernel is to place; see Engine::place.
struct PlaceCall {
  CallHeader header;                // num_tokens is the routing's
  unsigned char* memory = nullptr;  // plan_memory(...).total bytes, 128-byte aligned, alive as long as the plan
  int num_blocks = 1;               // of the exchange kernel, at most kMostExchangeBlocks; rows do not depend on it
};

// A placed routing between its counts, which the host has, and its plan, which needs memory of their size.
struct Placement {
  PlacedCounts counts;
  PlacedPlan rows;
  PlanMemory learned;  // as if it began at 0

  // memory: learned.total bytes as for PlaceCall::memory. Only where counts.placed.
  std::shared_ptr<Plan> plan(unsigned char* memory);
};

// Clones of a micro-batch; see Engine::balance. In the kernels' memory: E logical experts, R ranks of S spare slots and
// E / R owners each, T tokens.
struct BalanceCall {
  const int64_t* columns = nullptr;  // [E] of each expert's owner in a map over physical slots
  uint32_t owners_digest = 0;        // equal for equal columns
  int64_t* out_idx = nullptr;        // [T, topk], for topk_idx
  unsigned char* out_map = nullptr;  // [T, E + R * S], for routing_map
  int64_t* out_columns = nullptr;    // [T, E] likewise, may be null
  int32_t* slot_expert = nullptr;    // [R, S]
  int64_t *slot_tokens = nullptr, *take = nullptr, *first = nullptr;  // [R, S] each
  int64_t* numbers = nullptr;                                         // [4]
  int64_t* counts = nullptr;                                          // [R, E]
  bool replayed = false;  // the plan is there: this rank's routing goes by it, and no other rank takes part
  int num_blocks = 1;
};

// Weights of clones, or their gradients; see Engine::push_weights. In the kernels' memory, of R ranks with S spare
// slots and M matrices an expert.
struct SpareCall {
  const int32_t* slot_expert = nullptr;  // [R, S] of the plan, -1: empty
  const int64_t* columns = nullptr;      // [E] of each expert's owner in a map over physical slots
  // [owners, M] addresses, of this rank's experts: weights, at multiples of 16, or fp32 sums, at multiples of 4.
  const uint64_t* experts = nullptr;
  int num_blocks = 1;        // at least two where the shape has rails: the first third serves the node
  uint32_t chunk_bytes = 0;  // that a warp copies at a time, a multiple of 16; 0: what the machine has stages for
};

// What a rank waited in for another: for its counts, or until its memory might be touched.
enum class WaitedIn : uint32_t { kExchange, kDispatch, kCombine };
inline constexpr uint32_t kNumWaitedIn = 3;

struct DispatchCall {
  const unsigned char *x = nullptr, *scales = nullptr;
  const float* weights = nullptr;  // [T, weight_stride] in plan order
  unsigned char *out_x = nullptr, *out_scales = nullptr;
  float* out_weights = nullptr;
  uint32_t row_bytes = 0, scale_bytes = 0;
  uint64_t out_rows = 0;
  bool permute = false;
  // With permute, where out_x and out_scales lie in the arena. kEveryPair stores a token's row for each of its pairs,
  // kFirstPair once a rank, and that rank reads and stores it for the others. Without a choice: on a host, where the
  // memory of another rank is as near as one's own, the first; on a GPU, whose blocks that feed links are few and bound
  // by their stores, the second.
  std::optional<LandIn> land_in;
  int num_blocks = 1;         // that feed links
  int local_blocks = 0;       // of the same grid, for local work; 0: those that feed links do it
  uint32_t chunk_tokens = 0;  // of a rail message, the same on all ranks; 0: what the ring slots hold, the most
};

struct CombineCall {
  const unsigned char* x = nullptr;
  const float* weights = nullptr;
  unsigned char* out_x = nullptr;
  float* out_weights = nullptr;
  DType dtype = DType::kBf16;
  uint32_t hidden = 0;
  bool permuted = false, multiply = false, fp32_partials = false;
  // Where x lies in the arena and what is summed of it needs no scale and no wider type, peers read it there. Without a
  // choice kEveryPair where the machine adds parts, else kSinglePair; kPartials: in no case. Not of outputs in receive
  // order, which have no pairs: kReceiveRow, or kPartials.
  std::optional<SumFrom> sum_from;
  int num_blocks = 1;         // that feed links
  int local_blocks = 0;       // as in DispatchCall
  uint32_t chunk_tokens = 0;  // as in DispatchCall
};

// Makes a rank's executor from its rail peers' segments (by node) and a seed of its own.
using ExecutorMaker = Executor::Maker;

class Engine {
 public:
  using Segments = std::vector<std::shared_ptr<Segment>>;
  // executor: a name from Executor::names(), or a maker for one that is not in the table. arenas: of the ranks of the
  // node, where the shape's arena lies apart.
  Engine(int rank, const BufferShape& shape, Segments segments, double timeout_s, const std::string& executor,
         uint64_t seed, Segments arenas = {});
  Engine(int rank, const BufferShape& shape, Segments segments, double timeout_s, const ExecutorMaker& executor,
         uint64_t seed, Segments arenas = {});
  ~Engine();

  const BufferLayout& layout() const { return layout_; }
  const CloneShape& clones() const { return shape_.clones; }
  bool on_host() const { return executor_->shares_memory(); }  // where the caller's tensors must lie
  TrafficCounters traffic() const;
  void reset_traffic();  // and waited_ns()
  // Nanoseconds that operations of each kind waited for each rank of the group: [kNumWaitedIn][R].
  std::vector<uint64_t> waited_ns() const;
  // layout().arena_bytes of registered memory for the caller's tensors. Dispatched rows land in those without a copy.
  Arena& arena() const { return *arena_; }
  // CUDA: where the next operations are launched.
  void set_stream(void* stream) { executor_->set_stream(stream); }
  // Before the first operation, by every rank: as if `base` exchanges, operations and chunks had gone before. For
  // tests of what long-lived counters do.
  void start_counters_at(uint64_t base);
  // std::invalid_argument unless a launch may have so many blocks; `name` is the argument's. Operations ask for
  // themselves before they launch anything; a caller asks before the exchange that others would follow by a dispatch.
  void require_blocks(const char* name, int64_t blocks) const;
  // Unless pushes of so many blocks have shared memory enough here, and clones on other nodes what they need of a GPU.
  void require_spares(int num_blocks) const;
  int most_blocks() const { return executor_->most_blocks(); }  // of a launch
  // For tests, between operations: 0xFF into every byte of this rank's rings and receive rows.
  void poison();
  void set_interrupt_check(std::function<bool()> check) { settings_.interrupted = std::move(check); }

  // Where things lie in the memory of a plan; worst_case: with room for whatever its dispatch learns.
  PlanMemory plan_memory(uint32_t num_tokens, uint32_t topk, bool worst_case) const;
  // Collective. Exchange and placement in one launch that the host does not wait for; `in` must satisfy the limits of
  // the buffer. What the host would have refused comes as a deadline of the site headers_differ, or as overflow.
  std::shared_ptr<Plan> place(const RoutingInput& in, const PlaceCall& call);
  // The same for a host that waits for the counts, and for nothing else that is on the stream.
  // Rows are placed when the ranks' calls fit together and this buffer; else the headers say on every rank what does
  // not, and the buffer is as usable as before.
  std::shared_ptr<Placement> place_and_count(const RoutingInput& in, const PlaceCall& call);
  // Collective, where the shape has clones, unless replayed. Plans clones for the tokens that all ranks route to
  // logical experts, and writes this rank's routing over physical slots, which place() takes, in one launch that the
  // host does not wait for. Ranks whose owners differ end with a deadline.
  void balance(const RoutingInput& in, const BalanceCall& call);
  // Collective, where the shape has spares; all ranks in the same order, a wait for every push. Weights go to the slots
  // that the plan names; slots of this rank may be written as soon as it has launched the push. Then a wait for the
  // weights in them. Gradients, which lie in this rank's registered memory, are summed in the order of the plan, where
  // some of them lie, and the sums added to their owners'; behind it they may be written again.
  void push_weights(const SpareCall& call);
  void await_weights(const SpareCall& call);  // experts are not looked at
  void collect_gradients(const SpareCall& call);
  const SpareShape& spares() const { return shape_.spares; }
  // The registered slots, weights or gradients; they outlive the engine where the caller keeps them.
  std::shared_ptr<unsigned char> spare_memory(bool gradients) const;
  uint64_t spare_bytes(bool gradients) const;
  uint64_t num_launches() const { return executor_->num_launches(); }
  // Collective. Fills the plan's metadata when it is fresh.
  void dispatch(Plan& plan, const DispatchCall& call);
  void combine(Plan& plan, const CombineCall& call);

  // The latency path (docs/latency.md), where the shape has latency_tokens: one launch each, no size for the host. All
  // ranks take the same path in an operation. Plans are those of the other path, and either path takes them, but for a
  // plan's first dispatch: one that place() made has its first there. num_blocks of a call is all it has. What does not
  // fit together between ranks comes as a deadline.
  //
  // Routes, places and dispatches; where kernels run beside the host, the plan's sizes are limits. Of the calls
  // num_blocks is the dispatch's, of which not more than kMostExchangeBlocks count tokens; weights are the routing's
  // where with_weights, and the dispatch's `weights` is not looked at.
  std::shared_ptr<Plan> latency_dispatch(const RoutingInput& in, const PlaceCall& place, const DispatchCall& call,
                                         bool with_weights);
  void latency_dispatch(Plan& plan, const DispatchCall& call);  // complete
  void latency_combine(Plan& plan, const CombineCall& call);

 private:
  class Call;  // marks the engine busy, and failed when an exception leaves a kernel
  unsigned char* own() const { return segments_[world_.rank]->data(); }
  uint64_t* flag(int rank, uint64_t offset) const {
    return reinterpret_cast<uint64_t*>(segments_[rank]->data() + offset);
  }
  PlacedPlan describe_place(ExchangeParams& p, const RoutingInput& in, const PlaceCall& c, bool count) const;
  PlacedPlan launch_place(Call& call, const RoutingInput& in, const PlaceCall& c, bool count);
  void await_notification();
  PlacedCounts read_notification() const;
  void make_tables();
  void make_clone_state();
  void make_spare_state();
  SpareParams spare_params(const SpareCall& call) const;
  SpareRailParams spare_rail_params(const SpareCall& call) const;
  ExchangeParams exchange_params(ExchangeParams p, const CallHeader& header) const;
  template <class Params>
  void bind(Params& p, uint32_t chunk, uint32_t blocks, uint32_t rail_call, WaitedIn waited) const;
  uint64_t* waited_in(WaitedIn kind) const { return waited_ + uint64_t(kind) * uint64_t(world_.num_ranks()); }
  void describe_sum(SumParams& p, const CombineCall& c, const Plan& plan) const;
  unsigned char* arena_of(int local_rank) const;
  std::optional<uint64_t> in_arena(const unsigned char* x, uint64_t bytes) const;
  bool land(DispatchParams& p, const DispatchCall& c, const Plan& plan) const;
  Reading reading(const CombineParams& p, const CombineCall& c, const Plan& plan) const;
  void require_row(uint64_t row_bytes, uint64_t rows, const char* what) const;
  void require_split(int link, int local) const;
  void require_world(const Plan& plan) const;
  static void require_sizes(uint64_t row_bytes, uint64_t scale_bytes);
  uint32_t chunk_of(uint32_t asked) const;
  void require_latency(uint32_t tokens) const;
  LatencyLink latency_link() const;
  PlacedCounts latency_counts(const PlacedPlan& placed) const;
  LatencyDispatchParams latency_params(const DispatchCall& c, const PlanView& plan, uint32_t topk,
                                       const float* weights) const;
  void launch_latency(Call& call, LatencyDispatchParams& p, int num_blocks);

  World world_;
  BufferShape shape_;
  BufferLayout layout_;
  Segments segments_, arenas_;
  std::shared_ptr<Arena> arena_;
  LaunchSettings settings_;
  std::vector<unsigned char*> rail_segments_;
  RankTables tables_;
  std::unique_ptr<Executor> executor_;
  std::shared_ptr<void> notification_;  // from this rank's kernels to this process
  uint64_t notification_ticket_ = 0;    // of the last exchange that notifies
  std::shared_ptr<void> state_;         // of the kernels, in their memory
  TrafficCounters* traffic_;            // all of these in state_
  uint64_t* waited_;                    // [kNumWaitedIn][R]
  RankProgress* progress_;
  uint64_t* exit_counter_;
  unsigned char* latency_counts_;       // count vectors that the latency path has received, two parities
  uint64_t* latency_stored_;            // see LatencyRailLink
  uint64_t* misfits_;                   // of an exchange's blocks
  uint32_t* block_counts_;              // likewise
  std::shared_ptr<void> clone_state_;   // of the kernel that plans clones, in its memory: counts of blocks, a log
  std::shared_ptr<void> spare_state_;   // of the kernels of spare slots, likewise: progress, counters
  uint64_t* channel_chunks_ = nullptr;  // in it, see SpareRailParams
  ChunksTaken taken_;
  uint64_t *rail_sent_, *rail_received_;  // chunks over the life of the buffer, [N]
  uint64_t* consumed_;                    // [N][rail_slots]
  uint64_t* landed_before_;               // see LandedRows
  TableView view_;                        // of tables_
  std::atomic<bool> busy_{false};
  std::string failure_;
};

}  // namespace hep
