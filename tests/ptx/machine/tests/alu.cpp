// Arithmetic, conversion, moves, control flow: values.
#include "harness.h"

namespace hep::ptxm::test {
namespace {

// Every thread stores its %rd2 at words[thread].
std::string store_rd2(const std::string& body) {
  return kernel(body +
                "\nmul.wide.u32 %rd3, %r1, 8;\nadd.s64 %rd3, %rd1, %rd3;\ncvta.to.global.u64 %rd3, "
                "%rd3;\nst.global.u64 [%rd3], %rd2;");
}
void expect_lane3(const char* what, const std::string& body, uint64_t value) {
  const Outcome o = run(store_rd2(body));
  HEP_EXPECT(o.reports.empty() && o.out[3] == value, std::string(what) + ": " + std::to_string(value) + " expected, " +
                                                         std::to_string(o.out[3]) + "\n    " + o.all());
}

HEP_CASE(arithmetic) {
  expect_lane3("add", "add.s32 %r3, %r1, 4; cvt.u64.u32 %rd2, %r3;", 7);
  expect_lane3("sub wraps", "sub.s32 %r3, %r1, 4; cvt.u64.u32 %rd2, %r3;", 0xffffffff);
  expect_lane3("sign", "sub.s32 %r3, %r1, 4; cvt.s64.s32 %rd2, %r3;", ~0ull);
  expect_lane3("mul.hi", "mov.b32 %r3, 0x80000000; mul.hi.u32 %r4, %r3, 6; cvt.u64.u32 %rd2, %r4;", 3);
  expect_lane3("div by zero", "mov.u32 %r3, 0; div.u32 %r4, %r1, %r3; cvt.u64.u32 %rd2, %r4;", 0xffffffff);
  expect_lane3("signed div", "mov.u32 %r3, -7; div.s32 %r4, %r3, 2; cvt.s64.s32 %rd2, %r4;", uint64_t(-3));
  expect_lane3("mad", "mad.lo.s32 %r3, %r1, 10, 5; cvt.u64.u32 %rd2, %r3;", 35);
  expect_lane3("shl beyond", "shl.b32 %r3, %r1, 32; cvt.u64.u32 %rd2, %r3;", 0);
  expect_lane3("shr.s32", "mov.u32 %r3, -8; shr.s32 %r4, %r3, 40; cvt.s64.s32 %rd2, %r4;", ~0ull);
  expect_lane3("bfi", "mov.b64 %rd4, 5; mov.b64 %rd5, 0xff00; bfi.b64 %rd2, %rd4, %rd5, 4, 8;", 0xf050);
  expect_lane3("bfe", "mov.b32 %r4, 0x12345678; bfe.u32 %r5, %r4, 8, 12; cvt.u64.u32 %rd2, %r5;", 0x456);
  expect_lane3(
      "prmt",
      "mov.b32 %r3, 0x33221100; mov.b32 %r4, 0x77665544; prmt.b32 %r5, %r3, %r4, 0x5410U; cvt.u64.u32 %rd2, %r5;",
      0x55441100);
  expect_lane3("pack", "mov.b16 %rs1, 0x1234; mov.b16 %rs2, 0xabcd; mov.b32 %r3, {%rs1, %rs2}; cvt.u64.u32 %rd2, %r3;",
               0xabcd1234);
  expect_lane3("unpack", "mov.b64 %rd4, 0x1122334455667788; mov.b64 {_, %r3}, %rd4; cvt.u64.u32 %rd2, %r3;",
               0x11223344);
  expect_lane3("narrow cvt", "mov.b32 %r3, 0x1ff; cvt.u32.u8 %r4, %r3; cvt.u64.u32 %rd2, %r4;", 0xff);
  expect_lane3("float", "mov.f32 %f1, 0f3FC00000; add.rn.f32 %f2, %f1, %f1; mov.b32 %r3, %f2; cvt.u64.u32 %rd2, %r3;",
               0x40400000);
  const auto round = [](const char* what, const char* type, const char* upper, const char* lower, uint64_t value) {
    expect_lane3(what,
                 std::string("mov.f32 %f1, 0f") + upper + "; mov.f32 %f2, 0f" + lower + "; cvt.rn." + type +
                     "x2.f32 %r3, %f1, %f2; cvt.u64.u32 %rd2, %r3;",
                 value);
  };
  round("bf16: ties to even", "bf16", "3F808000", "3F818000", 0x3f803f82);
  round("bf16: nearest, -0", "bf16", "3F808001", "80000000", 0x3f818000);
  round("bf16: NaN, overflow", "bf16", "FFC12345", "7F7FFFFF", 0x7fff7f80);
  round("f16: ties to even, subnormal", "f16", "3F801000", "33800000", 0x3c000001);
  round("f16: NaN, overflow", "f16", "FFC12345", "477FF000", 0x7fff7c00);
  expect_lane3("f16 widened", "mov.b16 %rs1, 0x0001; cvt.f32.f16 %f1, %rs1; mov.b32 %r3, %f1; cvt.u64.u32 %rd2, %r3;",
               0x33800000);
  expect_lane3("setp.num", "mov.f32 %f1, 0fFFC12345; setp.num.f32 %p1, %f1, %f1; selp.b64 %rd2, 9, 1, %p1;", 1);
  expect_lane3("min.s64", "mov.b64 %rd4, -5; mov.b64 %rd5, 4; min.s64 %rd2, %rd4, %rd5;", uint64_t(-5));
  expect_lane3("selp", "setp.eq.s32 %p1, %r1, 3; selp.b64 %rd2, 9, 1, %p1;", 9);
  expect_lane3("predicates",
               "setp.gt.u32 %p1, %r1, 2; setp.lt.u32 %p2, %r1, 4; and.pred %p3, %p1, %p2; not.pred %p4, %p3; selp.b64 "
               "%rd2, 1, 2, %p4;",
               2);
}

HEP_CASE(a_guard_leaves_lanes_as_they_were) {
  const Outcome o =
      run(store_rd2("mov.b64 %rd2, 1; setp.eq.s32 %p1, %r1, 3; @%p1 mov.b64 %rd2, 2; @!%p1 add.s64 %rd2, %rd2, 4;"));
  HEP_EXPECT(o.out[2] == 5 && o.out[3] == 2, o.all());
}
HEP_CASE(loops_of_lanes_diverge_and_meet) {
  const Outcome o = run_seeds(
      store_rd2("mov.b64 %rd2, 0; mov.u32 %r3, 0;\nL1: setp.ge.u32 %p1, %r3, %r1; @%p1 bra L2; add.s64 %rd2, %rd2, 3; "
                "add.s32 %r3, %r3, 1; bra.uni L1;\nL2: bar.warp.sync 0xffffffff;"),
      {});
  for (size_t k = 0; k < 32; ++k) HEP_EXPECT(o.out[k] == 3 * k, o.all());
  HEP_EXPECT(o.reports.empty(), o.all());
}
HEP_CASE(a_register_lives_through_a_loop) {
  expect_lane3("loop",
               "mov.b64 %rd2, 0; mov.b64 %rd4, 5; mov.u32 %r3, 0;\nL: add.s64 %rd2, %rd2, %rd4; cvt.u64.u32 %rd5, %r3; "
               "add.s64 %rd6, %rd5, 100; add.s64 %rd2, %rd2, %rd6; sub.s64 %rd2, %rd2, %rd6; add.s32 %r3, %r3, 1; "
               "setp.lt.u32 %p1, %r3, 4; @%p1 bra L;",
               20);
}
HEP_CASE(registers_of_a_scope_shadow) {
  const Outcome o =
      run(store_rd2("mov.b64 %rd2, 7; { .reg .b64 %rd2; mov.b64 %rd2, 8; } { .reg .pred p; setp.eq.u32 p, 0, 0; @p "
                    "add.s64 %rd2, %rd2, 1; }"));
  HEP_EXPECT(o.out[3] == 8, o.all());
}
HEP_CASE(functions_take_arguments) {
  const std::string f =
      ".func add(.param .b64 add_0, .param .align 8 .b8 add_1[16]);\n"
      ".func add(.param .b64 add_0, .param .align 8 .b8 add_1[16]) { .reg .b64 %rd<9>; .reg .b32 %r<9>;\n"
      "ld.param.u64 %rd1, [add_0]; ld.param.u32 %rd2, [add_1+4]; ld.param.u64 %rd3, [add_1+8]; add.s64 %rd4, %rd2, "
      "%rd3; st.global.u64 [%rd1], %rd4; ret; }\n";
  const Outcome o = run(kernel("{ .param .b64 param0; st.param.b64 [param0+0], %rd1; .param .align 8 .b8 param1[16]; "
                               "st.param.b32 [param1+4], 40; "
                               "mov.b64 %rd2, 2; st.param.b64 [param1+8], %rd2; call.uni add, (param0, param1); }",
                               f),
                        {.block = 1});
  HEP_EXPECT(o.out[0] == 42, o.all());
}
HEP_CASE(unknown_instructions_are_named) {
  try {
    load(kernel("shfl.sync.idx.b32 %r3, %r1, 0, 31, 0xffffffff;"), "m");
    HEP_EXPECT(false, "no error");
  } catch (const LoadError& e) {
    HEP_EXPECT(std::string(e.what()).find("unknown instruction shfl.sync.idx.b32") != std::string::npos, e.what());
    HEP_EXPECT(std::string(e.what()).find("PTX line 16") != std::string::npos, e.what());
  }
}

}  // namespace
}  // namespace hep::ptxm::test
