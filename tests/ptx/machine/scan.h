// PTX text to tokens.
#pragma once
#include <string_view>
#include <vector>

#include "program.h"

namespace hep::ptxm {

struct Token {
  std::string_view text;
  u32 line = 0;
};

// Words (identifiers, opcodes with their dots and colons, numbers with their sign, strings) and single punctuation
// marks. Debug sections are left out. Ends with an empty token.
std::vector<Token> scan(std::string_view text);

}  // namespace hep::ptxm
