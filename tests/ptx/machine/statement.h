// One statement of PTX with its operands resolved: registers by number, symbols by value.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "machine.h"
#include "program.h"

namespace hep::ptxm {

struct Operand {
  enum Type : u8 { kRegister, kNumber, kSpecial, kAddress, kVector, kSink, kName };
  Type type = kName;
  u32 reg = 0;
  u8 bytes = 0;        // of the register, kPredicate for a predicate; 0 for what has none
  u64 value = 0;       // a number, a symbol's address or offset
  s64 offset = 0;      // of an address
  bool param = false;  // of an address: an argument in a lane's frame, at `value`
  std::string_view text;
  std::vector<Operand> parts;  // of a vector; of an address the base alone; of a pair d|p both
};

struct Statement {
  std::string_view opcode;
  std::vector<std::string_view> words;  // the opcode's, by '.'
  std::vector<Operand> operands;
  u32 line = 0;
  u16 used_bytes = 0xffff;
  bool has(std::string_view word) const;
};

[[noreturn]] void fail_at(u32 line, const std::string& what);

// Bytes of u32, b64, f32, ...; kPredicate for pred; 0: no such type.
u8 type_bytes(std::string_view type);

// A function while it is decoded. Operands of instructions are register numbers until registers are given rows.
struct Draft {
  std::vector<Ins> code;      // targets count from the function's beginning
  std::vector<u8> registers;  // bytes of each
  std::vector<u64>* constants = nullptr;
  std::map<std::pair<u64, u8>, u32>* constant_places = nullptr;
  u32 constant(u64 value, u8 bytes);  // its row
  u32 fresh(u8 bytes) {
    registers.push_back(bytes);
    return u32(registers.size() - 1);
  }
};

// Appends the instruction of a statement; throws LoadError for one that the machine does not know. Branches and calls
// are the parser's.
void decode(const Statement& s, Ins ins, Draft& draft);

// Gives every register of a function a row of its warp's file, from `first` on: registers that are never needed at the
// same time share one. Returns the bytes.
u32 allocate_rows(Draft& draft, u32 first);

}  // namespace hep::ptxm
