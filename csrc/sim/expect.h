// What a rank of a simulated world says when something is not as it must be.
#pragma once
#include <sstream>

#include "arch/sim/failure.h"

namespace hep::sim {

// Where a rank's program is.
struct ProgramPoint {
  int rank = 0;
  const char* what = "";
  uint64_t operation = 0;

  template <class... Parts>
  void expect(bool ok, Parts&&... parts) const {
    if (ok) return;
    std::ostringstream os;
    os << "rank " << rank << ", " << what << " (operation " << operation << "): ";
    (os << ... << parts);
    throw WrongResult(os.str());
  }
};

}  // namespace hep::sim
