// Whether kernels on several streams of one device run at once. Virtual ranks need that: a rank's kernel waits for what
// another rank's stream holds, and must not stand before it in a hardware queue that the two streams share.
#pragma once
#include <vector>

namespace hep::cuda {

// Kernels on these streams of the current device wait for one another; false: for longer than patience_s. Returns when
// all have ended.
bool run_at_once(const std::vector<void*>& streams, double patience_s);

}  // namespace hep::cuda
