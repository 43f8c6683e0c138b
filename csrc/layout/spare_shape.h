// Registered memory of a rank's spare slots: weights of the clones that it holds, and their gradients in fp32. Every
// matrix of an expert has a stack, [slots][elements], as a grouped GEMM reads it.
#pragma once
#include <cstdint>

#include "common/world.h"

namespace hep {

struct SpareShape {
  static constexpr uint32_t kMostMatrices = 16;  // of an expert
  static constexpr uint64_t kLine = 128;         // where stacks begin
  static constexpr uint32_t kMostPieces = 4;     // that an expert goes to its relays in (roles/spare_copies.h)

  uint32_t spare_slots = 0;            // of a rank; 0: none
  uint32_t num_owners = 1;             // experts that live on a rank
  uint32_t element_bytes = 2;          // of a weight
  uint32_t num_matrices = 0;           // of an expert
  uint64_t elements[kMostMatrices]{};  // of each, a multiple of 16 / element_bytes and of 4
  // Of what goes along a rail at once, a multiple of 16; 0: clones stay on their owners' nodes.
  uint32_t rail_chunk_bytes = 32 * 1024;
  uint32_t rail_slots =
      0;  // such chunks of an owner and a node that are on their way, a power of two; 0: by the channels
  bool gradients = true;  // false: weights alone, nothing is collected

  uint64_t weight_stack(uint32_t matrix) const { return elements[matrix] * element_bytes * spare_slots; }
  uint64_t gradient_stack(uint32_t matrix) const { return gradients ? elements[matrix] * 4 * spare_slots : 0; }
  // Where the stack of a matrix begins in the region; of matrix num_matrices: the region's bytes.
  uint64_t weights_at(uint32_t matrix) const { return at(matrix, &SpareShape::weight_stack); }
  uint64_t gradients_at(uint32_t matrix) const { return at(matrix, &SpareShape::gradient_stack); }

 private:
  uint64_t at(uint32_t matrix, uint64_t (SpareShape::*stack)(uint32_t) const) const {
    uint64_t bytes = 0;
    for (uint32_t m = 0; m < matrix; ++m) bytes += align_up((this->*stack)(m), kLine);
    return bytes;
  }
};

}  // namespace hep
