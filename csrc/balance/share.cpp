// The sharing role on one lane: how one source's tokens spread over the clones.
#include "roles/share_clones.h"

#include "balance/microbatch.h"

namespace hep::balance {

void share_of_source(const MicrobatchShape& shape, const int64_t* counts, const int32_t* owner,
                     const int32_t* slot_expert, const int64_t* slot_tokens, int source, int64_t* take,
                     int64_t* first) {
  const int E = shape.num_experts;
  std::vector<int32_t> words(CloneLinks::bytes(shape) / sizeof(int32_t));
  OneLane lane;
  const auto count = [=](int from, int expert) { return counts[int64_t(from) * E + expert]; };
  const CloneLinks links = CloneLinks::at(reinterpret_cast<std::byte*>(words.data()), shape);
  ShareClonesRole role(lane, shape, owner, links, count, slot_expert, slot_tokens);
  role.run(source, {take, first});
}

}  // namespace hep::balance
