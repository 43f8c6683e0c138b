// The kernels of one executor behind a plain interface: where a concrete Arch meets a concrete Transport.
#pragma once
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "roles/balance_params.h"
#include "roles/latency_params.h"
#include "roles/rail_params.h"

namespace hep {

struct LaunchSettings {
  World world;
  int num_blocks = 1;
  double timeout_s = 100;
  uint64_t seed = 0;
  std::function<bool()> interrupted;  // true = stop (Ctrl-C)
};

// What a rank's launches have in common for the life of its buffer.
struct RankTables {
  std::vector<RailPeer> peers;                                    // other nodes, ascending
  std::vector<uint64_t*> peer_ready, peer_done, peer_node_flags;  // [L]
  std::vector<unsigned char*> recv, arena, peer_counts;           // [L]
};
// The same where kernels can read them.
struct TableView {
  const RailPeer* peers;
  uint64_t *const *peer_ready, *const *peer_done, *const *peer_node_flags;
  unsigned char *const *recv, *const *arena, *const *peer_counts;
};

// Every virtual function is inline: the CUDA library, loaded at run time, has a vtable of its own. Whoever changes the
// table counts it here, so that a library of another build is refused.
inline constexpr uint64_t kExecutorVersion = 14;

// All that parameters point at lies in the kernels' memory.
class Executor {
 public:
  virtual ~Executor() = default;
  // Once, before the first launch; the tables outlive the executor.
  virtual TableView adopt(const RankTables& t, const LaunchSettings&) {
    return {t.peers.data(), t.peer_ready.data(), t.peer_done.data(),  t.peer_node_flags.data(),
            t.recv.data(),  t.arena.data(),      t.peer_counts.data()};
  }
  virtual void exchange(const ExchangeParams& p, const LaunchSettings& s) = 0;
  virtual void dispatch(DispatchParams& p, const LaunchSettings& s) = 0;
  virtual void combine(CombineParams& p, const LaunchSettings& s) = 0;
  virtual void latency_dispatch(LatencyDispatchParams&, const LaunchSettings&) { no_latency_path(); }
  virtual void latency_combine(LatencyCombineParams&, const LaunchSettings&) { no_latency_path(); }

  virtual void balance(const BalanceParams&, const LaunchSettings&) { no_balance(); }

  virtual void push_weights(const SpareParams&, const LaunchSettings&) { no_spares(); }
  virtual void await_weights(const SpareParams&, const LaunchSettings&) { no_spares(); }
  virtual void collect_gradients(const SpareParams&, const LaunchSettings&) { no_spares(); }
  virtual void push_nodes(const SpareRailParams&, const LaunchSettings&) { no_spares(); }
  virtual void collect_nodes(const SpareRailParams&, const LaunchSettings&) { no_spares(); }

  // What this machine can launch, asked before anything of an operation is launched: a refusal leaves the ranks in step
  // and the buffer usable. All blocks of a launch are resident together, since they wait for one another.
  virtual int most_blocks() const { return std::numeric_limits<int>::max(); }
  // std::invalid_argument when a block has too little shared memory for them.
  virtual void require_shared_memory(const ExchangeParams&) const {}
  virtual void require_shared_memory(const DispatchParams&) const {}
  virtual void require_shared_memory(const CombineParams&) const {}
  virtual void require_shared_memory(const LatencyDispatchParams&, int /*num_blocks*/) const {}
  virtual void require_shared_memory(const BalanceParams&) const {}
  virtual void require_shared_memory(const SpareParams&) const {}
  virtual void require_shared_memory(const SpareRailParams&) const {}

  // Memory of the machine that the kernels run on. Segments and the caller's tensors lie there, and so does what
  // kernels keep between launches (allocate: zeroed). write and read are ordered with the launches.
  virtual bool shares_memory() const { return true; }  // the host may touch it
  virtual std::shared_ptr<void> allocate(uint64_t bytes) {
    const std::shared_ptr<unsigned char[]> block(new unsigned char[bytes]());
    return {block, block.get()};
  }
  // Memory that the kernels write and this process reads while they run; starts as zeros.
  virtual std::shared_ptr<void> allocate_notification(uint64_t bytes) { return allocate(bytes); }
  // Whether its sums can add and round several rows in place of a partial (SumFrom::kEveryPair).
  virtual bool adds_parts() const { return false; }
  virtual void write(void* to, const void* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
  virtual void read(void* to, const void* from, uint64_t bytes) { std::memcpy(to, from, bytes); }
  virtual void drain() noexcept {}                     // waits for all launches so far
  virtual void set_stream(void*) {}                    // where the next launches go, in order with those before
  uint64_t num_launches() const { return launches_; }  // of kernels, since it was made
  // Of an asynchronous launch whose wait expired; then nothing more is launched.
  virtual std::optional<TimeoutReport> timeout_report() { return std::nullopt; }
  virtual void check() {}  // throws when a launch ended otherwise than it should
  // Ends the launches in progress, and those to come take no part in anything: the buffer is lost.
  virtual void abort() noexcept {}

  using Maker = std::function<std::unique_ptr<Executor>(unsigned char* const* rail_segments, uint64_t seed)>;
  // rail_segments[node]: this rank's rail peers' segments as mapped here; outlives the executor.
  static std::unique_ptr<Executor> make(const std::string& name, unsigned char* const* rail_segments, uint64_t seed);
  static std::vector<std::string> names();
  static void add(const std::string& name, Maker maker);  // one that was loaded at run time

 protected:
  [[noreturn]] static void no_latency_path() {
    throw std::invalid_argument("latency_tokens: this executor has no latency path; give 0");
  }
  [[noreturn]] static void no_spares() {
    throw std::invalid_argument("spares: this executor has no kernels for spare slots; use another");
  }
  [[noreturn]] static void no_balance() { throw std::invalid_argument("clones: this executor plans none"); }
  uint64_t launches_ = 0;
};

}  // namespace hep
