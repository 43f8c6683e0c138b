// The sharing role on one lane: how one source's tokens spread over the clones.
#include "roles/share_clones.h"

#include "balance/microbatch.h"

namespace hep::balance {

namespace {

struct Matrix {
  const int64_t* counts;  // [R, E]
  int num_experts;
  int64_t operator()(int source, int expert) const { return counts[int64_t(source) * num_experts + expert]; }
  int64_t sum(int begin, int end, int expert) const {
    int64_t all = 0;
    for (int source = begin; source < end; ++source) all += (*this)(source, expert);
    return all;
  }
};

}  // namespace

void share_of_source(const MicrobatchShape& shape, const int64_t* counts, const int32_t* owner,
                     const int32_t* slot_expert, const int64_t* slot_tokens, int source, int64_t* take,
                     int64_t* first) {
  std::vector<int32_t> words(CloneLinks::bytes(shape) / sizeof(int32_t));
  OneLane lane;
  const CloneLinks links = CloneLinks::at(reinterpret_cast<std::byte*>(words.data()), shape);
  ShareClonesRole role(lane, shape, owner, links, Matrix{counts, shape.num_experts}, slot_expert, slot_tokens);
  role.run(source, {take, first});
}

}  // namespace hep::balance
