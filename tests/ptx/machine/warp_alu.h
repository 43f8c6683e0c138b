// Operations on registers alone, executed for a whole warp at once.
#pragma once
#include <string_view>

#include "program.h"

namespace hep::ptxm {

// `operands`: bytes of each operand, the result first; 'p' is a predicate. "444" is add.s32.
struct AluOp {
  Handler run = nullptr;
  const char* operands = "";
};

// Null run: no such operation.
AluOp find_alu(std::string_view opcode);

// cvt between integers; the registers may be wider than the types.
struct IntType {
  u8 bytes;
  bool sign;
};
Handler find_convert(IntType to, u8 to_register, IntType from, u8 from_register);

Flow pack(Context&, const Ins&, u32 mask);    // o[0] = {o[1], ...}, count parts of reg_bytes, into bytes
Flow unpack(Context&, const Ins&, u32 mask);  // {o[1], ...} = o[0]
Flow convert_any(Context&, const Ins&, u32 mask);

}  // namespace hep::ptxm
