#include "scan.h"

#include <cctype>

namespace hep::ptxm {
namespace {

bool in_word(char c) {
  return std::isalnum(u8(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  std::vector<Token> run() {
    while (skip_blank()) {
      const std::string_view word = next();
      if (word == ".section")
        skip_section();
      else
        tokens_.push_back({word, line_});
    }
    tokens_.push_back({{}, line_});
    return std::move(tokens_);
  }

 private:
  char at(size_t k) const { return k < text_.size() ? text_[k] : '\0'; }

  bool skip_blank() {
    for (; at_ < text_.size(); ++at_) {
      if (at(at_) == '/' && at(at_ + 1) == '/') {
        at_ = text_.find('\n', at_);
        if (at_ == text_.npos) return false;
      } else if (at(at_) == '/' && at(at_ + 1) == '*') {
        const size_t end = std::min(text_.find("*/", at_ + 2), text_.size() - 2);
        for (; at_ < end + 1; ++at_) line_ += at(at_) == '\n';
        continue;
      } else if (!std::isspace(u8(at(at_)))) {
        return true;
      }
      line_ += at(at_) == '\n';
    }
    return false;
  }

  std::string_view next() {
    const size_t begin = at_;
    if (at(at_) == '"') {
      at_ = text_.find('"', at_ + 1);
      at_ = at_ == text_.npos ? text_.size() : at_ + 1;
    } else if (in_word(at(at_)) || (at(at_) == '-' && std::isdigit(u8(at(at_ + 1))))) {
      ++at_;
      while (in_word(at(at_)) || (at(at_) == ':' && at(at_ + 1) == ':') || (at(at_) == ':' && at(at_ - 1) == ':'))
        ++at_;
    } else {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

  void skip_section() {  // .section NAME { ... }
    while (at_ < text_.size() && at(at_) != '}') line_ += at(at_++) == '\n';
    ++at_;
  }

  std::string_view text_;
  size_t at_ = 0;
  u32 line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> scan(std::string_view text) {
  return Scanner(text).run();
}

}  // namespace hep::ptxm
