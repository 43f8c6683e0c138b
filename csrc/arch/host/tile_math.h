// Whole-tile arithmetic for the plain fiber machine: its lane owns a whole tile and its shared memory is plain
// memory, so a loop the compiler can vectorise may replace octets through ld_shared. Same operations on the
// same elements in the same order, hence the same bits (a test compares them with the checked machine).
#pragma once
#include <cstddef>

#include "arch/concept.h"
#include "arch/host/host_arch.h"
#include "common/numeric.h"

namespace hep {
namespace host {

// acc[i] = (first ? 0 : acc[i] +) scale * row[i]; `first` copies, as the first row of a sum does.
void add_tile(float* acc, const void* row, DType type, size_t n, bool first, bool scaled, float scale);
// out[i] = acc[i] rounded to nearest even.
void round_tile(void* out, const float* acc, DType type, size_t n);

}  // namespace host

template <>
struct TileMath<host::PlainFibers> {
  static constexpr bool kOffered = true;
  static void add(float* acc, const void* row, DType type, size_t n, bool first, bool scaled, float scale) {
    host::add_tile(acc, row, type, n, first, scaled, scale);
  }
  static void round(void* out, const float* acc, DType type, size_t n) { host::round_tile(out, acc, type, n); }
};

}  // namespace hep
