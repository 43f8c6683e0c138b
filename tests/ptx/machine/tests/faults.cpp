// What hardware faults at or leaves undefined is a report, with its place.
#include "harness.h"

namespace hep::ptxm::test {
namespace {

void expect_report(const char* kind, const char* words, const std::string& body, Shape shape = {.block = 1}) {
  const Outcome o = run(kernel(body), shape);
  HEP_EXPECT(o.has(kind, words), std::string("expected ") + kind + ": " + words + "\n    " + o.all());
}
void expect_none(const std::string& body, Shape shape = {.block = 1}) {
  const Outcome o = run_seeds(kernel(body), shape, 5);
  HEP_EXPECT(o.reports.empty() && o.last != Progress::kStuck, o.all());
}
const std::string kInit =
    "mov.u32 %r20, sh; mov.u32 %r21, 1; setp.eq.s32 %p9, %r1, 0; @%p9 mbarrier.init.shared::cta.b64 [%r20], %r21; "
    "fence.proxy.async.shared::cta; bar.sync 0; ";
const std::string kLoad = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes ";
const std::string kStore = "cp.async.bulk.global.shared::cta.bulk_group ";
const std::string kFill =
    "mov.u32 %r22, sh; st.shared.v4.u32 [%r22+128], {%r1, %r1, %r1, %r1}; fence.proxy.async.shared::cta; add.s32 %r23, "
    "%r22, 128; ";
std::string wait(const char* parity) {
  return std::string("W") + parity + ": mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p8, [%r20], " + parity +
         "; @!%p8 bra W" + parity + ";\n";
}

HEP_CASE(bounds_and_alignment) {
  expect_none("ld.global.u64 %rd2, [%rd1+496];");
  expect_report("fault", "0 bytes behind the 504 of words", "ld.global.u64 %rd2, [%rd1+504];");
  expect_report("fault", "byte 496 of 504 of words", "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1+496];");
  expect_report("fault", "misaligned", "ld.global.u64 %rd2, [%rd1+4];");
  expect_report("fault", "misaligned", "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1+8];");
  expect_report("fault", "no memory", "st.global.u64 [%rd1+100000000], %rd1;");
  expect_report("fault", "shared memory or null", "mov.b64 %rd2, 0; ld.global.u32 %r3, [%rd2];");
  expect_report("fault", "at shared", "mov.u32 %r3, 2000000; ld.shared.u32 %r4, [%r3];");
  expect_report("fault", "at shared", "mov.u32 %r3, 16; st.shared.u32 [%r3], %r1;");
  expect_report("fault", "at shared", "mov.u32 %r3, dyn; st.shared.u32 [%r3+64], %r1;", {.block = 1, .dynamic = 64});
  expect_none("mov.u32 %r3, dyn; st.shared.u32 [%r3+60], %r1;", {.block = 1, .dynamic = 64});
  expect_report("fault", "parameter byte 8 of 8", "mov.b64 %rd4, k_param_0; ld.param.u64 %rd2, [%rd4+8];");
}
HEP_CASE(uninitialised_shared_memory) {
  expect_report("uninitialised", "byte 0 of a load", "mov.u32 %r3, sh; ld.shared.u32 %r4, [%r3];");
  expect_report("uninitialised", "byte 4 of a load",
                "mov.u32 %r3, sh; st.shared.u32 [%r3], %r1; ld.shared.u64 %rd4, [%r3];");
  expect_none(
      "mov.u32 %r3, sh; st.shared.u32 [%r3], %r1;\n.pragma \"used_bytes_mask 15\";\nld.shared.v2.u32 {%r4, %r5}, "
      "[%r3];");
  expect_report(
      "uninitialised", "a bulk store reads",
      "mov.u32 %r3, sh; " + kStore + "[%rd1], [%r3], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;");
}
HEP_CASE(bulk_copies) {
  expect_none(kFill + kStore + "[%rd1], [%r23], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;");
  expect_report("fault", "no multiple of 16", kFill + kStore + "[%rd1], [%r23], 8;");
  expect_report("fault", "not aligned to 16", kFill + "add.s64 %rd2, %rd1, 8; " + kStore + "[%rd2], [%r23], 16;");
  expect_report("fault", "outside the block's", kFill + "add.s32 %r23, %r22, 1024; " + kStore + "[%rd1], [%r23], 16;");
  expect_report("fault", "a bulk copy of 16 bytes at global 0x",
                kFill + "add.s64 %rd2, %rd1, 496; " + kStore + "[%rd2], [%r23], 16;");
  expect_report("exit", "not committed", kFill + kStore + "[%rd1], [%r23], 16;");
  expect_report("fault", "no mbarrier was initialised", kFill + kLoad + "[%r23], [%rd1], 16, [%r22];");
  expect_none(kInit +
              "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r20], 16; add.s32 %r24, %r20, 64; " +
              kLoad + "[%r24], [%rd1], 16, [%r20]; " + wait("0") + "ld.shared.u32 %r3, [%r24];");
  expect_report("exit", "still uses its shared memory",
                kInit +
                    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r20], 16; add.s32 %r24, %r20, 64; " +
                    kLoad + "[%r24], [%rd1], 16, [%r20];");
  expect_report("exit", "tx-count of 16",
                kInit + "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r20], 16;");
}
HEP_CASE(a_bulk_store_that_nobody_waits_for) {
  bool found = false;
  for (uint64_t seed = 1; seed < 20; ++seed)
    found |= run(kernel(kFill + kStore + "[%rd1], [%r23], 16; cp.async.bulk.commit_group;"), {.block = 1, .seed = seed})
                 .has("exit");
  HEP_EXPECT(found, "no seed found it");
}
HEP_CASE(mbarriers) {
  expect_report("fault", "more arrivals",
                kInit +
                    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r20], 16; "
                    "mbarrier.arrive.release.cta.shared::cta.b64 %rd2, [%r20];");
  expect_report("fault", "overflows",
                kInit + "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r20], 1048576;");
  expect_report("mbarrier", "init of a live", kInit + "mbarrier.init.shared::cta.b64 [%r20], %r21;");
  expect_report("mbarrier", "memory of a live", kInit + "ld.shared.u64 %rd3, [%r20];");
  expect_report("fault", "misaligned", "mov.u32 %r20, sh; mbarrier.init.shared::cta.b64 [%r20+4], 1;");
  expect_report("fault", "arrivals", "mov.u32 %r20, sh; mbarrier.init.shared::cta.b64 [%r20], 0;");
  expect_none(kInit + "mbarrier.arrive.release.cta.shared::cta.b64 %rd2, [%r20]; " + wait("0") +
              "mbarrier.arrive.release.cta.shared::cta.b64 %rd2, [%r20]; " + wait("1"));
}
HEP_CASE(meetings) {
  expect_none("bar.warp.sync 0xffffffff; bar.sync 0;", {.block = 64});
  expect_report("fault", "leaves out", "bar.warp.sync 0x1;", {.block = 32});
  expect_report("convergence", "different warp-wide",
                "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.warp.sync 0xffffffff; bra.uni B;\nA: vote.sync.ballot.b32 "
                "%r3, %p1, 0xffffffff;\nB:",
                {.block = 32});
  expect_report("barrier", "different barriers",
                "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.sync 0; bra.uni B;\nA: bar.sync 0;\nB:", {.block = 32});
  expect_report("barrier", "bar.sync meets bar.red",
                "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 0; bra.uni B;\nA: bar.red.popc.u32 %r3, 0, %p1;\nB:",
                {.block = 64});
}
HEP_CASE(deadlocks_name_who_waits) {
  // Lane 3 takes another barrier; nobody comes to it.
  const Outcome o =
      run(kernel("setp.eq.u32 %p1, %r1, 3; @%p1 bra A; bar.sync 1; bra.uni B;\nA: bar.sync 2;\nB:"), {.block = 64});
  HEP_EXPECT(o.last == Progress::kStuck && o.has("deadlock", "barrier 1, 63 of 64 threads are there"), o.all());
  HEP_EXPECT(o.has("deadlock", "bar.sync at PTX line"), o.all());
}
HEP_CASE(a_thread_that_has_left_counts_as_come) {
  const std::string text = kernel(
      "setp.eq.u32 %p1, %r1, 3; @%p1 exit; bar.warp.sync 0xffffffff; setp.eq.u32 %p2, 0, 0; bar.red.popc.u32 %r3, 0, "
      "%p2;\n"
      "vote.sync.ballot.b32 %r4, %p2, 0xffffffff; setp.eq.u32 %p3, %r1, 0; @%p3 st.global.u32 [%rd1], %r3; @%p3 "
      "st.global.u32 [%rd1+4], %r4;");
  const Outcome o = run_seeds(text, {.block = 64});
  HEP_EXPECT(o.reports.empty() && o.out[0] == (63 | 0xfffffff7ull << 32), o.all());
}
HEP_CASE(the_largest_of_those_that_are_here) {
  // Of lanes 0 to 29: 100 - lane as it is, and lane - 30, which is negative.
  const std::string text = kernel(
      "setp.gt.u32 %p1, %r1, 29; @%p1 exit; sub.s32 %r3, 100, %r1; redux.sync.max.u32 %r4, %r3, 0xffffffff;\n"
      "sub.s32 %r3, %r1, 30; redux.sync.max.s32 %r5, %r3, 0xffffffff; setp.eq.u32 %p3, %r1, 7;\n"
      "@%p3 st.global.u32 [%rd1], %r4; @%p3 st.global.u32 [%rd1+4], %r5;");
  const Outcome o = run_seeds(text, {});
  HEP_EXPECT(o.reports.empty() && o.out[0] == (100 | 0xffffffffull << 32), o.all());
}
HEP_CASE(one_lane_is_elected) {
  const std::string text = kernel(
      "setp.lt.u32 %p1, %r1, 5; @%p1 exit; elect.sync _|%p2, 0xffffffff; selp.b64 %rd2, 1, 0, %p2;\n"
      "mul.wide.u32 %rd3, %r1, 8; add.s64 %rd3, %rd1, %rd3; st.global.u64 [%rd3], %rd2;");
  const Outcome o = run_seeds(text, {});
  uint64_t n = 0;
  for (uint64_t x : o.out) n += x;
  HEP_EXPECT(n == 1 && o.reports.empty(), o.all());
}
HEP_CASE(launches_that_no_device_takes) {
  const auto module = load(kernel(""), "m");
  Machine machine({});
  machine.add_device(DeviceModel::h100());
  Launch l{.kernel = &module->kernels[0], .params = std::vector<uint8_t>(8)};
  const auto refused = [&](const char* words, auto&& change) {
    Launch wrong = l;
    change(wrong);
    HEP_EXPECT(machine.refusal(wrong).find(words) != std::string::npos, words + (": " + machine.refusal(wrong)));
  };
  HEP_EXPECT(machine.refusal(l).empty(), machine.refusal(l));
  refused("empty", [](Launch& x) { x.grid = 0; });
  refused("threads", [](Launch& x) { x.block = 1025; });
  refused("shared memory", [](Launch& x) { x.dynamic_shared = 232448 - 1024 + 1; });
  refused("registers", [](Launch& x) {
    x.block = 1024;
    x.registers = 72;
  });
  refused("parameters", [](Launch& x) { x.params.pop_back(); });
  l.dynamic_shared = 232448 - 1024;
  HEP_EXPECT(machine.refusal(l).empty(), machine.refusal(l));
}
HEP_CASE(a_grid_larger_than_the_device_waits_for_its_own_blocks) {
  // Block 0 waits for the last block, which has no SM before block 0 ends.
  const std::string spin =
      "setp.ne.u32 %p1, %r2, 0; @%p1 bra LAST;\nL: ld.acquire.sys.global.u64 %rd2, [%rd1]; mov.u64 %rd5, %globaltimer; "
      "setp.gt.u64 %p3, %rd5, 1000500000; @%p3 bra OUT; setp.eq.s64 %p2, %rd2, 0; @%p2 bra L; bra.uni OUT;\n"
      "LAST: setp.ne.u32 %p1, %r2, 132; @%p1 bra OTHER; mov.b64 %rd4, 1; st.release.sys.global.u64 [%rd1], %rd4; "
      "bra.uni OUT;\nOTHER: ld.acquire.sys.global.u64 %rd2, [%rd1]; mov.u64 %rd5, %globaltimer; setp.gt.u64 %p3, %rd5, "
      "1000500000; @%p3 bra OUT; setp.eq.s64 %p2, %rd2, 0; @%p2 bra OTHER;\nOUT: setp.gt.u64 %p3, %rd5, 1000500000; "
      "mov.b64 %rd4, 7; setp.eq.u32 %p4, %r2, 0; and.pred %p3, %p3, %p4; @%p3 st.global.u64 [%rd1+8], %rd4;";
  HEP_EXPECT(run(kernel(spin), {.grid = 133, .block = 1, .dynamic = 200000}).out[1] == 7, "a deadline passed");
  HEP_EXPECT(run(kernel(spin), {.grid = 133, .block = 1}).out[1] == 0, "two blocks to an SM: all are resident");
}

}  // namespace
}  // namespace hep::ptxm::test
