// An executor that launches nothing, for measuring what the host does around launches: the CPU time of a call is then
// the host's own work. In no table of executors: only who makes an engine with it gets it.
//
// Nothing moves. What an exchange that notifies tells the host is what a kernel would, if all ranks had this rank's
// routing and nothing were dropped: counts of this rank's experts, times the ranks.
#pragma once
#include "kernels/instances/executor.h"

namespace hep {

Executor::Maker make_unlaunched();

}  // namespace hep
