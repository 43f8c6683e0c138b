// What a module declares: variables, functions and where their bodies are.
#pragma once
#include <map>

#include "tokens.h"

namespace hep::ptxm {

struct Body {
  std::string name;
  bool entry = false;
  size_t at = 0;  // the token behind its opening brace
  Kernel kernel;
  std::vector<Function::Argument> args;
};

struct Declared {
  std::shared_ptr<Module> module = std::make_shared<Module>();
  std::shared_ptr<Program> program = std::make_shared<Program>();
  std::vector<std::shared_ptr<void>> storage;  // of variables
  std::map<std::string_view, u64> symbols;     // addresses: of shared memory in the window, of others in the process
  std::vector<Body> bodies;
};

Declared declare_all(Tokens& tokens, std::string name);

}  // namespace hep::ptxm
