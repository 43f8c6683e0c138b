// What all constructions of a plan begin with, in shared memory, and the keys that order ranks and experts.
#pragma once
#include "layout/clone_shape.h"
#include "roles/warp_fold.h"

namespace hep {

// A load beside its rank, tokens beside their expert: the larger key is the larger load, or of equal ones the lower
// number.
struct CloneKeys {
  static constexpr int kRankBits = 12, kExpertBits = 22;
  static constexpr int64_t kRankMask = (1 << kRankBits) - 1, kExpertMask = (1 << kExpertBits) - 1;

  HEP_DEVICE static int64_t fullest(int64_t load, int rank) { return load << kRankBits | (kRankMask - rank); }
  HEP_DEVICE static int fullest_rank(int64_t key) { return int(kRankMask - (key & kRankMask)); }
  HEP_DEVICE static int64_t emptiest(int64_t load, int rank) { return load << kRankBits | rank; }  // the smaller one
  HEP_DEVICE static int emptiest_rank(int64_t key) { return int(key & kRankMask); }
  HEP_DEVICE static int64_t load(int64_t key) { return key >> kRankBits; }
  HEP_DEVICE static int64_t hottest(int64_t tokens, int expert) {
    return tokens << kExpertBits | (kExpertMask - expert);
  }
  HEP_DEVICE static int hottest_expert(int64_t key) { return int(kExpertMask - (key & kExpertMask)); }
  HEP_DEVICE static int64_t tokens(int64_t key) { return key >> kExpertBits; }
};

// What a plan is to reach: cost of the fullest rank without one, up to which nothing is done, the target, and that at
// epsilon 0.
struct CloneTargets {
  int64_t before = 0, least = 0, target = 0, exact = 0;
};

// What came of a construction: cost of the fullest rank, number of clones.
struct alignas(16) CloneOutcome {
  int64_t max_cost = 0, copies = 0;
};

// The tables of a block that plans. total, owner, by_owner and first are its caller's to fill.
template <Lanes A>
struct CloneTables {
  A& a;
  const CloneShape& shape;
  const CloneLayout& layout;
  std::byte* const base;

  template <class T>
  HEP_DEVICE T* at(uint32_t byte) const {
    return reinterpret_cast<T*>(base + byte);
  }
  HEP_DEVICE int64_t* total() const { return at<int64_t>(layout.total_at); }
  HEP_DEVICE int64_t* load() const { return at<int64_t>(layout.load_at); }
  HEP_DEVICE int64_t* hot() const { return at<int64_t>(layout.hot_at); }
  HEP_DEVICE int32_t* owner() const { return at<int32_t>(layout.owner_at); }
  HEP_DEVICE int32_t* by_owner() const { return at<int32_t>(layout.by_owner_at); }
  HEP_DEVICE int32_t* first() const { return at<int32_t>(layout.first_at); }

  // What an expert with that many tokens costs its rank, in tokens.
  HEP_DEVICE int64_t cost(int64_t tokens) const {
    return tokens <= 0 ? 0 : shape.instance_cost + whole_tiles(tokens + shape.tile - 1);
  }
  // Rounded down to tiles. A division of 64 bits is a call on a GPU.
  HEP_DEVICE int64_t whole_tiles(int64_t tokens) const {
    return shape.tile == 1 ? tokens : tokens / shape.tile * shape.tile;
  }
  // Whole tiles of tokens that still fit below the aim on a rank of that cost with a free slot.
  HEP_DEVICE int64_t room(int64_t load, int64_t aim) const {
    const int64_t slack = aim - load - shape.instance_cost,
                  least = shape.min_chunk > shape.tile ? shape.min_chunk : shape.tile;
    return slack < least ? 0 : whole_tiles(slack);
  }
  // By all lanes of the block, which meet: cost and largest expert of every rank, -1 where it has none.
  HEP_DEVICE void weigh() const {
    a.block_sync();
    for (int r = a.warp_idx() * A::kLanes + a.lane(); r < shape.num_ranks; r += a.num_warps() * A::kLanes) {
      int64_t sum = 0, most = -1;
      for (int i = a.ld_shared(first() + r), end = a.ld_shared(first() + r + 1); i < end; ++i) {
        const int expert = a.ld_shared(by_owner() + i);
        const int64_t tokens = a.ld_shared(total() + expert), key = CloneKeys::hottest(tokens, expert);
        sum += cost(tokens);
        most = key > most ? key : most;
      }
      a.st_shared(load() + r, sum);
      a.st_shared(hot() + r, most);
    }
    a.block_sync();
  }
  // Behind weigh(). The fullest domain sets the pace: its mean, with the fixed cost of the clones that level it.
  HEP_DEVICE CloneTargets targets() const {
    constexpr int64_t kMillion = 1'000'000;
    CloneTargets found;
    const int domain = shape.domain();
    int64_t most = 0;
    for (int begin = 0; begin < shape.num_ranks; begin += domain) {
      int64_t sum = 0;
      for (int r = begin; r < begin + domain; ++r) {
        const int64_t cost = a.ld_shared(load() + r);
        sum += cost;
        found.before = cost > found.before ? cost : found.before;
      }
      most = sum > most ? sum : most;
    }
    const int64_t mean = (most + domain - 1) / domain;
    found.exact = (most + shape.instance_cost * (domain - 1) + domain - 1) / domain;
    found.target = found.exact + found.exact * shape.epsilon_ppm / kMillion;
    found.least = mean + mean * shape.skip_below_ppm / kMillion;
    return found;
  }
};

}  // namespace hep
