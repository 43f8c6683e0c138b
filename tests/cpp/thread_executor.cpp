// The kernels on OS threads over the shared-memory rail.
#include "thread_executor.h"

#include "kernels/instances/host_executor.h"
#include "transport/shm/shm_transport.h"

namespace hep::test {

std::unique_ptr<Engine> make_engine(const std::string& executor, int rank, const BufferShape& shape,
                                    const std::vector<std::shared_ptr<Segment>>& segments, double timeout_s,
                                    uint64_t seed) {
  auto on_threads = [&]<int kLanes>() {
    const auto make = [](unsigned char* const* rail_segments, uint64_t) -> std::unique_ptr<Executor> {
      return std::make_unique<HostExecutor<host::PlainThreads<kLanes>, ShmTransport>>(rail_segments);
    };
    return std::make_unique<Engine>(rank, shape, segments, timeout_s, make, seed);
  };
  if (executor == "threads") return on_threads.operator()<1>();
  if (executor == "threads_lanes4") return on_threads.operator()<4>();
  return std::make_unique<Engine>(rank, shape, segments, timeout_s, executor, seed);
}

}  // namespace hep::test
