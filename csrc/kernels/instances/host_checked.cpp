// Executors for tests: asynchronous copies as late and as disordered as the contracts allow, protocol rules
// checked at every step, over a rail that delays and reorders, or (mapped) over one whose peers' slots the roles store
// into.
#include "kernels/instances/host_executor.h"
#include "kernels/instances/makers.h"
#include "transport/loopback/loopback_transport.h"
#include "transport/shm/shm_transport.h"

namespace hep {

std::unique_ptr<Executor> make_host_checked(unsigned char* const* rail_segments, uint64_t seed) {
  return std::make_unique<HostExecutor<host::CheckedFibers<1>, LoopbackTransport>>(rail_segments, seed);
}
std::unique_ptr<Executor> make_host_checked_lanes32(unsigned char* const* rail_segments, uint64_t seed) {
  return std::make_unique<HostExecutor<host::CheckedFibers<32>, LoopbackTransport>>(rail_segments, seed);
}
std::unique_ptr<Executor> make_host_checked_lanes4(unsigned char* const* rail_segments, uint64_t seed) {
  return std::make_unique<HostExecutor<host::CheckedFibers<4>, LoopbackTransport>>(rail_segments, seed);
}
std::unique_ptr<Executor> make_host_checked_mapped(unsigned char* const* rail_segments, uint64_t) {
  return std::make_unique<HostExecutor<host::CheckedFibers<4>, ShmTransport>>(rail_segments);
}

}  // namespace hep
