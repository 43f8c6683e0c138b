// A place in a sequence of tokens.
#pragma once
#include <algorithm>
#include <charconv>
#include <string>

#include "scan.h"
#include "statement.h"

namespace hep::ptxm {

class Tokens {
 public:
  explicit Tokens(std::string_view text) : tokens_(scan(text)) {}

  size_t place() const { return at_; }
  void go_to(size_t place) { at_ = place; }
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool is(std::string_view t) const { return peek().text == t; }
  std::string_view take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_].text; }
  bool accept(std::string_view t) { return is(t) && (take(), true); }
  void expect(std::string_view t) {
    if (!accept(t)) fail("expected '" + std::string(t) + "', found '" + std::string(peek().text) + "'");
  }
  [[noreturn]] void fail(const std::string& what) const { fail_at(peek().line, what); }
  u64 number(std::string_view t) const {
    if (t.back() == 'U') t.remove_suffix(1);
    if (t.substr(0, 2) == "0f" || t.substr(0, 2) == "0d") return parse<u64>(t.substr(2), 16);
    if (t[0] == '-') return u64(-s64(parse<u64>(t.substr(1), 10)));
    if (t.substr(0, 2) == "0x") return parse<u64>(t.substr(2), 16);
    return parse<u64>(t, 10);
  }
  template <class T>
  T parse(std::string_view t, int base) const {
    T v = 0;
    const auto [end, error] = std::from_chars(t.data(), t.data() + t.size(), v, base);
    if (error != std::errc() || end != t.data() + t.size()) fail("'" + std::string(t) + "' is no number");
    return v;
  }
  u32 take_u32() { return u32(number(take())); }

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
};

}  // namespace hep::ptxm
