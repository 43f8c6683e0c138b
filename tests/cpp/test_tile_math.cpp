// Sums of whole rows in one go (TileMath of the plain machine) against one element at a time: any bits of bf16, parts
// of two rows and more anywhere among rows alone, tails that no vector fills, strips that begin anywhere.
#include "check.h"

#include "arch/host/tile_math.h"
#include "world_case.h"

HEP_TEST_MAIN

namespace hep {
namespace {

uint16_t any_bits(test::Random& random) {
  // Zeros, the smallest subnormal, 1, the largest, infinities, quiet and signalling NaNs, in either sign.
  constexpr uint16_t kSpecial[] = {0x0000, 0x0001, 0x3f80, 0x7f7f, 0x7f80, 0x7fc0, 0x7f81, 0x7fff};
  if (random.one_in(8)) return uint16_t(kSpecial[random.between(0, 7)] | (random.one_in(2) ? 0x8000 : 0));
  if (random.one_in(2)) return uint16_t(random.between(0, 0xffff));
  return uint16_t(0x3c00 + random.between(0, 0x7ff));  // near one another: ties of the rounding
}

uint16_t rounded(float sum) {
  return from_float<Bf16>(sum).bits;
}

uint16_t by_element(const TileRows& rows, uint32_t element) {
  float sum = 0, part = 0;
  bool first = true, first_of_part = true;
  for (uint32_t i = 0; i < rows.n; ++i) {
    float x = to_float(reinterpret_cast<const Bf16*>(rows.at[i])[element]);
    if (rows.place[i] != TileRows::kAlone) {
      part = first_of_part ? x : part + x;
      first_of_part = rows.place[i] == TileRows::kEndsPart;
      if (!first_of_part) continue;
      x = to_float(Bf16{rounded(part)});
    }
    sum = first ? x : sum + x;
    first = false;
  }
  return rounded(sum);
}

TEST(whole_sums_have_the_bits_of_a_sum_by_element) {
  constexpr uint16_t kGuard = 0x5a5a;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    test::Random random(seed);
    const uint32_t n = random.between(1, 16) * 8, begin = random.between(0, 5) * 8;
    std::vector<std::vector<uint16_t>> memory(random.between(1, TileRows::kMost));
    TileRows rows;
    const bool parts = random.one_in(2);
    uint32_t left = 0;  // rows that the part still has
    for (auto& row : memory) {
      for (uint32_t i = 0; i < begin + n; ++i) row.push_back(any_bits(random));
      const uint32_t after = uint32_t(memory.size()) - rows.n;
      if (parts && left == 0 && after >= 2 && random.one_in(2)) left = random.between(2, after);
      rows.place[rows.n] = left == 0 ? TileRows::kAlone : --left ? TileRows::kInPart : TileRows::kEndsPart;
      rows.at[rows.n++] = reinterpret_cast<const unsigned char*>(row.data());
    }
    std::vector<uint16_t> out(n + 8, kGuard);
    TileMath<host::PlainFibers>::add_rows(rows, begin,
                                          {nullptr, out.data(), DType::kBf16, DType::kBf16, n, true, true, false, 1.f});
    for (uint32_t i = 0; i < n; ++i) CHECK_EQ(out[i], by_element(rows, begin + i));
    for (uint32_t i = n; i < n + 8; ++i) CHECK_EQ(out[i], kGuard);
  }
}

TEST(only_sums_of_bf16_in_bf16_are_formed_in_one_go) {
  for (const DType in : {DType::kBf16, DType::kFp16, DType::kFp32})
    for (const DType out : {DType::kBf16, DType::kFp16, DType::kFp32})
      CHECK_EQ(TileMath<host::PlainFibers>::adds_rows(in, out), in == DType::kBf16 && out == DType::kBf16);
}

}  // namespace
}  // namespace hep
