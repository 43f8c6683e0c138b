// How a launch parts its tokens: every one is in one block's share, and with few tokens every block has some.
#include <algorithm>

#include "arch/host/host_arch.h"
#include "check.h"
#include "kernels/exchange.h"

HEP_TEST_MAIN

namespace hep::test {
namespace {

struct Block {
  int index;
  int block_idx() const { return index; }
};

ExchangeParams planned(uint32_t tokens, int blocks, uint64_t budget) {
  ExchangeParams p{};
  p.world = {.num_nodes = 1, .num_local_ranks = 8, .rank = 0};
  p.layout = {.num_ranks = 8, .num_nodes = 1, .num_experts = 64};
  p.num_tokens = tokens;
  p.topk = 8;
  p.place.pad_multiple = 1;
  plan_exchange<host::CheckedFibers<32>>(p, budget, blocks);
  return p;
}

TEST(every_token_is_in_one_share_and_few_tokens_are_in_many) {
  for (const uint64_t budget : {uint64_t(200) << 10, uint64_t(4) << 10})
    for (int blocks = 1; blocks <= 32; ++blocks)
      for (uint32_t tokens = 0; tokens <= 1100; ++tokens) {
        const ExchangeParams p = planned(tokens, blocks, budget);
        uint32_t next = 0, most = 0, busy = 0;
        for (int b = 0; b < blocks; ++b) {
          const Block block{b};
          const TokenShare share = TokenShare::of(block, p);
          if (share.count == 0) continue;
          CHECK(share.begin == next);
          next += share.count;
          most = std::max(most, share.count);
          ++busy;
        }
        CHECK(next == tokens);
        const uint32_t fair = uint32_t(div_up(tokens, uint64_t(blocks)));
        // A walker takes whole runs: a block has less than a token a walker more than its fair share.
        CHECK(most < fair + std::max(1u, p.walkers));
        if (fair <= 16 && p.walkers == std::max(1u, fair))
          CHECK(most == fair && busy == div_up(tokens, std::max(1u, fair)));
      }
  CHECK(planned(128, 32, uint64_t(200) << 10).walkers == 4);
  CHECK(planned(16, 32, uint64_t(200) << 10).walkers == 1);
  CHECK(planned(4096, 32, uint64_t(200) << 10).walkers == 16);
}

}  // namespace
}  // namespace hep::test
