// Engines for test worlds: on every executor of the build, and on one that only tests have, where every lane is
// an OS thread, so that ThreadSanitizer sees each ordering the roles rely on.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "runtime/engine.h"

namespace hep::test {

// executor: one of Executor::names(), "threads" or "threads_lanes4".
std::unique_ptr<Engine> make_engine(const std::string& executor, int rank, const BufferShape& shape,
                                    const std::vector<std::shared_ptr<Segment>>& segments, double timeout_s,
                                    uint64_t seed);

}  // namespace hep::test
