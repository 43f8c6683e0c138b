// The header of a count vector: what a rank says of its call, so that every rank can check that all mean the same one.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <optional>

#include "common/element.h"
#include "common/macros.h"
#include "layout/counts.h"

namespace hep {

// Kinds share words. The order of the words is the protocol; all ranks run one build.
struct CallHeader {
  // May differ between ranks.
  uint32_t num_tokens = 0;
  uint16_t topk = 1;         // pairs of a token that records have room for; must be the same before rows are placed
  uint16_t excess = 0;       // where the host is notified of counts: choices that cannot be kept, for there is no such
                             // expert, or they are more than topk
  uint32_t budget_word = 0;  // see budget()
  uint32_t want_tokens = 0, want_hidden = 0;  // that the next growth is to make room for
  // Must agree; runtime/headers.cpp names them.
  uint32_t num_experts = 0;
  uint32_t hidden = 0;       // elements of a row
  uint32_t scale_width = 0;  // scales of a row, 0: none
  uint32_t pad_multiple = 1;
  uint32_t chunk_dispatch = 0, chunk_combine = 0;  // tokens of a rail message
  Element dtype = Element::kOther, scale_dtype = Element::kOther;
  bool permute = false, non_blocking = false;  // which verb
  bool routing_map = false;                    // and not topk_idx
  bool weights = false, pad_empty_experts = false;
  uint8_t unused = 0;
  uint32_t unused_words[3] = {};

  // Permuted rows that this rank has room for, below 2^31; none: as many as come.
  std::optional<uint32_t> budget() const {
    return budget_word ? std::optional<uint32_t>(budget_word - 1) : std::nullopt;
  }
  void set_budget(std::optional<uint32_t> rows) { budget_word = rows ? *rows + 1 : 0; }

  using Words = std::array<uint32_t, kCountHeaderWords>;
  Words words() const { return std::bit_cast<Words>(*this); }
  static CallHeader of(const Words& words) { return std::bit_cast<CallHeader>(words); }
};
static_assert(sizeof(CallHeader) == 4 * kCountHeaderWords && std::endian::native == std::endian::little);

inline constexpr int kHeaderNumTokens = offsetof(CallHeader, num_tokens) / 4;
inline constexpr int kHeaderTopk = offsetof(CallHeader, topk) / 4;  // and excess, in the upper half
inline constexpr int kHeaderBudget = offsetof(CallHeader, budget_word) / 4;
inline constexpr unsigned kMostTopk = 0xFFFF;
static_assert(offsetof(CallHeader, excess) == 4 * kHeaderTopk + 2);

// Words that ranks must give alike, one bit a word: topk, and all from num_experts on.
inline constexpr uint32_t kHeaderMustAgree =
    1u << kHeaderTopk | (~0u << offsetof(CallHeader, num_experts) / 4 & ((1u << kCountHeaderWords) - 1));

// What no plan can hold, for the upper half of the topk word.
HEP_HOST_DEVICE unsigned header_excess(unsigned long long choices) {
  return unsigned(choices < kMostTopk ? choices : kMostTopk) << 16;
}

}  // namespace hep
