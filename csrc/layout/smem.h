// How a block's shared memory is cut into stage FIFOs. Run-time sizes: the same kernel serves any hidden.
#pragma once
#include <cstdint>

#include "common/world.h"

namespace hep {

// A FIFO of stages: [data stage 0..S) then [StageHead 0..S) then barriers full[S], empty[S].
struct FifoLayout {
  uint32_t num_stages = 0, stage_bytes = 0;
  uint64_t data_at = 0, heads_at = 0, full_at = 0, empty_at = 0, end = 0;

  static FifoLayout make(uint64_t start, uint32_t num_stages, uint64_t stage_bytes, uint64_t head_bytes,
                         uint64_t barrier_bytes) {
    FifoLayout f;
    f.num_stages = num_stages;
    f.stage_bytes = uint32_t(align_up(stage_bytes, 128));
    f.data_at = align_up(start, 128);
    f.heads_at = f.data_at + uint64_t(num_stages) * f.stage_bytes;
    f.full_at = align_up(f.heads_at + num_stages * head_bytes, 128);
    f.empty_at = align_up(f.full_at + num_stages * barrier_bytes, 64);
    f.end = align_up(f.empty_at + num_stages * barrier_bytes, 128);
    return f;
  }
};

inline constexpr uint32_t kMaxTileBytes = 16 * 1024;  // payload bytes of one stage; longer rows take several

inline constexpr uint32_t kSumTileElems = 4096;  // elements of a row that a stage of a summing role holds

// Stages of one FIFO at most: enough that rows of 7 KiB (fp8) fill a block's memory, as rows of 14 KiB (bf16) do, and
// few enough that a launch of small rows is not all setting up of barriers. A FIFO beside others holds fewer.
inline constexpr uint32_t kMostStages = 32, kMostSideStages = 8;

// Stages that fit a budget, within [least, most].
HEP_HOST_DEVICE constexpr uint32_t stages_that_fit(uint64_t budget, uint64_t stage_bytes, uint32_t least,
                                                   uint32_t most) {
  uint64_t n = budget / stage_bytes;
  return uint32_t(n < least ? least : n > most ? most : n);
}

}  // namespace hep
