// Whole-tile arithmetic for the plain fiber machine: its lane owns a whole tile and its shared memory is plain
// memory, so a loop the compiler can vectorise may replace vec8s through ld_shared. Same operations on the
// same elements in the same order, hence the same bits (a test compares them with the checked machine).
#pragma once
#include <cstddef>

#include "arch/concept.h"
#include "arch/host/host_arch.h"
#include "common/numeric.h"

namespace hep {
namespace host {

// One row of a sum. The first starts it, the last rounds it (to nearest even) into `out`; between the two, `acc`
// holds it in an order of its own. All rows of a sum have the same n, a multiple of 16 bytes in either type.
void add_row(const TileRow& row, float* acc);
// Elements [begin, begin + n) of a sum of whole rows, formed in registers, into the first n of `out`. Of bf16 alone.
void add_rows(const TileRows& rows, uint32_t begin, uint32_t n, void* out);

}  // namespace host

template <>
struct TileMath<host::PlainFibers> {
  static constexpr bool kOffered = true, kReadsRows = true;
  static void add_row(const TileRow& row, float* acc) { host::add_row(row, acc); }
  static bool adds_rows(DType in, DType out) { return in == DType::kBf16 && out == DType::kBf16; }
  static void add_rows(const TileRows& rows, uint32_t begin, const TileRow& sum) {
    host::add_rows(rows, begin, sum.n, sum.out);
  }
  static void fetch(const unsigned char* at, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
};

}  // namespace hep
