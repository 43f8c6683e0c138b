// What a timed world leaves behind: spans for a trace, and makespans of kernels.
#pragma once
#include <cstdint>
#include <vector>

#include "arch/sim/costs.h"

namespace hep::sim {

struct Span {
  const char* name;  // what: bulk_g2s, bulk_s2g, put, signal, kernel
  const char* role;
  int32_t rank, block;
  const char* link;  // tma_read, tma_write, hbm, nvlink_egress, ..., kernel
  Ps start, end;
  uint64_t bytes;
};

struct KernelTime {
  const char* kernel;
  int32_t rank, launch;  // launch: how many of this rank came before
  Ps start, end;
};

struct Timeline {
  bool keep_spans = false;
  std::vector<Span> spans;
  std::vector<KernelTime> kernels;
};

}  // namespace hep::sim
