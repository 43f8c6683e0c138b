// The order in which workers go through rows that lie source by source.
#pragma once
#include <cstdint>

#include "common/macros.h"

namespace hep {

// As many pieces as there are sources, of each the first row, then of each the second: rows for all sources, or from
// all of them, are in work at any time, where one source after the other would keep one rank's port busy and the others
// idle. Pieces are equally long, whatever each source has, so that it needs no counts, and no worker is without work
// where one source has all rows.
struct SideBySide {
  uint32_t rows, pieces, each;

  HEP_HOST_DEVICE static SideBySide of(uint32_t rows, uint32_t pieces) {
    return {rows, pieces, (rows + pieces - 1) / pieces};
  }
  // Positions; less than `pieces` of them have no row.
  HEP_HOST_DEVICE uint32_t count() const { return pieces * each; }
  // Of the i-th; `rows` or more where it has none.
  HEP_HOST_DEVICE uint32_t row(uint32_t i) const { return i % pieces * each + i / pieces; }
};

}  // namespace hep
