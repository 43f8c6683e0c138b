// How a stripe of an expert is cut into chunks. All experts have the same shapes, so that a chunk's number in a channel
// tells which of the channel's experts it is of, and where in that it lies.
#pragma once
#include "arch/concept.h"
#include "roles/rail_params.h"

namespace hep {

// A stripe of an expert, matrix by matrix in units of 16 bytes, in chunks.
class SpareStripe {
 public:
  struct Chunk {
    uint32_t matrix, begin, end;  // units of the matrix
    HEP_DEVICE uint32_t bytes() const { return (end - begin) * uint32_t(sizeof(Vec16)); }
  };

  HEP_DEVICE SpareStripe(const SpareRailParams& params, int local, SpareChannels::Direction direction)
      : p_(params), local_(uint32_t(local)), gradients_(direction == SpareChannels::kGradients) {
    for (uint32_t m = 0; m < p_.node.num_matrices; ++m) chunks_ += chunks_of(m);
  }
  HEP_DEVICE uint32_t chunks() const { return chunks_; }  // 0: smaller experts than ranks
  HEP_DEVICE Chunk chunk(uint32_t c) const {
    uint32_t m = 0;
    for (; c >= chunks_of(m); ++m) c -= chunks_of(m);
    const uint32_t at = begin(m) + c * most(), last = end(m);
    return {m, at, last - at < most() ? last : at + most()};
  }

 private:
  HEP_DEVICE uint32_t units(uint32_t m) const {
    return gradients_ ? p_.node.matrices[m].sum_units() : p_.node.matrices[m].weight_units();
  }
  HEP_DEVICE uint32_t most() const { return p_.channels.chunk_bytes / uint32_t(sizeof(Vec16)); }
  HEP_DEVICE uint32_t cut(uint32_t m, uint32_t stripe) const {
    const uint32_t ranks = uint32_t(p_.world.num_local_ranks), n = units(m), at = (n + ranks - 1) / ranks * stripe;
    return at < n ? at : n;
  }
  HEP_DEVICE uint32_t begin(uint32_t m) const { return cut(m, local_); }
  HEP_DEVICE uint32_t end(uint32_t m) const { return cut(m, local_ + 1); }
  HEP_DEVICE uint32_t chunks_of(uint32_t m) const { return (end(m) - begin(m) + most() - 1) / most(); }

  const SpareRailParams& p_;
  const uint32_t local_;
  const bool gradients_;
  uint32_t chunks_ = 0;
};

}  // namespace hep
