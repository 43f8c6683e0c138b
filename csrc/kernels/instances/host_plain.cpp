// The executor that users run without a GPU: fibers, plain copies, shared-memory rail.
#include "kernels/instances/host_executor.h"
#include "kernels/instances/makers.h"
#include "transport/shm/shm_transport.h"

namespace hep {

std::unique_ptr<Executor> make_host_plain(unsigned char* const* rail_segments, uint64_t) {
  return std::make_unique<HostExecutor<host::PlainFibers, ShmTransport>>(rail_segments);
}

}  // namespace hep
