// Happens-before: what orders two accesses, and that each piece is needed. The first word of a pair is the right
// program, the second the same without one piece.
#include "harness.h"

namespace hep::ptxm::test {
namespace {

Outcome judge(const std::string& body, Shape shape) {
  shape.races = true;
  return run_seeds(kernel(body), shape, 12);
}
void right(const char* what, const std::string& body, const Shape& shape) {
  const Outcome o = judge(body, shape);
  HEP_EXPECT(o.reports.empty(), std::string(what) + "\n    " + o.all());
}
void wrong(const char* what, const char* kind, const std::string& body, const Shape& shape) {
  const Outcome o = judge(body, shape);
  HEP_EXPECT(o.has(kind), std::string(what) + ": expected a report of " + kind + "\n    " + o.all());
}

// Thread 0 writes a word and hands over; thread 1 of the same warp, of another warp or block, takes it and reads.
std::string hand_over(const std::string& give, const std::string& take, const char* who) {
  return std::string("mov.u32 %r10, sh; mov.b64 %rd9, 1;\n") + who +
         "@%p1 bra GIVE; @%p2 bra TAKE; bra.uni END;\nGIVE: st.global.u64 [%rd1], %rd9;\n" + give +
         "\nbra.uni END;\nTAKE:\n" + take + "\nld.global.u64 %rd8, [%rd1];\nEND:";
}
const char* const kLanesOfOne = "setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 1;\n";
const char* const kBlocks = "setp.eq.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r2, 1;\n";
std::string release(const char* how) {
  return std::string("st.") + how + ".global.u64 [%rd1+8], %rd9;";
}
std::string acquire(const char* how) {
  return std::string("T: ld.") + how + ".global.u64 %rd7, [%rd1+8]; setp.eq.s64 %p3, %rd7, 0; @%p3 bra T;";
}

HEP_CASE(releases_and_acquires) {
  const Shape blocks{.grid = 2, .block = 1}, lanes{.block = 2};
  right("sys", hand_over(release("release.sys"), acquire("acquire.sys"), kBlocks), blocks);
  right("gpu", hand_over(release("release.gpu"), acquire("acquire.gpu"), kBlocks), blocks);
  right("cta within a block", hand_over(release("release.cta"), acquire("acquire.cta"), kLanesOfOne), lanes);
  wrong("a relaxed store", "race", hand_over(release("relaxed.sys"), acquire("acquire.sys"), kBlocks), blocks);
  wrong("a relaxed load", "race", hand_over(release("release.sys"), acquire("relaxed.sys"), kBlocks), blocks);
  wrong("a release for the block alone", "race", hand_over(release("release.cta"), acquire("acquire.gpu"), kBlocks),
        blocks);
  wrong("an acquire for the block alone", "race", hand_over(release("release.gpu"), acquire("acquire.cta"), kBlocks),
        blocks);
  wrong("a weak store of the flag", "race", hand_over("st.global.u64 [%rd1+8], %rd9;", acquire("acquire.gpu"), kBlocks),
        blocks);
  right("fences", hand_over("membar.gl;" + release("relaxed.gpu"), acquire("relaxed.gpu") + "membar.gl;", kBlocks),
        blocks);
  wrong("no fence behind the load", "race",
        hand_over("membar.gl;" + release("relaxed.gpu"), acquire("relaxed.gpu"), kBlocks), blocks);
  wrong("a fence of the block", "race",
        hand_over("membar.cta;" + release("relaxed.gpu"), acquire("relaxed.gpu") + "membar.gl;", kBlocks), blocks);
}
// The patterns of ISA chapter 8.8: fence and relaxed store release, relaxed load and fence acquire.
HEP_CASE(fences_of_the_system) {
  const Shape blocks{.grid = 2, .block = 1};
  const std::string fence = "fence.acq_rel.sys;\n", store = release("relaxed.sys"), load = acquire("relaxed.sys");
  right("both sides", hand_over(fence + store, load + fence, kBlocks), blocks);
  right("fence and acquire", hand_over(fence + store, acquire("acquire.sys"), kBlocks), blocks);
  right("release and fence", hand_over(release("release.sys"), load + fence, kBlocks), blocks);
  right("one fence for two flags",
        hand_over(fence + "st.relaxed.sys.global.u64 [%rd1+16], %rd9;" + store, load + fence, kBlocks), blocks);
  wrong("no fence before the store", "race", hand_over(store, load + fence, kBlocks), blocks);
  wrong("the fence behind the store", "race", hand_over(store + fence, load + fence, kBlocks), blocks);
  wrong("no fence behind the load", "race", hand_over(fence + store, load, kBlocks), blocks);
  wrong("the fence before the load", "race", hand_over(fence + store, fence + load, kBlocks), blocks);
  wrong("a fence of the block behind the load", "race", hand_over(fence + store, load + "fence.acq_rel.cta;", kBlocks),
        blocks);
  wrong("a load of the block", "race", hand_over(fence + store, acquire("relaxed.cta") + fence, kBlocks), blocks);
}
HEP_CASE(threads_that_knew_the_same) {  // a barrier gives all one clock, which one thread's release must not change
  wrong("a relaxed load behind a barrier", "race",
        "bar.sync 0;\n" + hand_over(release("release.cta"), acquire("relaxed.cta"), kLanesOfOne), {.block = 2});
}
HEP_CASE(devices) {
  const std::string who =
      "ld.global.u64 %rd6, [%rd1+16]; atom.relaxed.sys.global.add.u64 %rd6, [%rd1+24], 1; setp.eq.s64 %p1, %rd6, 0; "
      "setp.eq.s64 %p2, %rd6, 1;\n";
  const Shape two{.block = 1, .kernels = 2, .devices = 2};
  right("sys between devices", hand_over(release("release.sys"), acquire("acquire.sys"), who.c_str()), two);
  wrong("gpu between devices", "race", hand_over(release("release.gpu"), acquire("acquire.sys"), who.c_str()), two);
  wrong("atomics of one device's scope", "scope", "atom.relaxed.gpu.global.add.u64 %rd6, [%rd1+24], 1;", two);
  right("atomics of the system's", "atom.relaxed.sys.global.add.u64 %rd6, [%rd1+24], 1;", two);
  const Shape apart{.block = 1, .kernels = 2, .apart = true};  // virtual ranks on one device that stand for GPUs
  right("sys between ranks", hand_over(release("release.sys"), acquire("acquire.sys"), who.c_str()), apart);
  wrong("gpu between ranks", "race", hand_over(release("release.gpu"), acquire("acquire.sys"), who.c_str()), apart);
}
HEP_CASE(atomics) {
  const Shape blocks{.grid = 2, .block = 1};
  const std::string count = "red.release.gpu.global.add.u64 [%rd1+8], %rd9;";
  right("red.release", hand_over(count, acquire("acquire.gpu"), kBlocks), blocks);
  wrong("red.relaxed", "race",
        hand_over("red.relaxed.gpu.global.add.u64 [%rd1+8], %rd9;", acquire("acquire.gpu"), kBlocks), blocks);
  // A relaxed atomic between goes on with the release that it found.
  right("a chain", hand_over(count + "red.relaxed.gpu.global.add.u64 [%rd1+8], %rd9;", acquire("acquire.gpu"), kBlocks),
        blocks);
}
HEP_CASE(warps_and_blocks) {
  const std::string write =
      "mov.u32 %r10, sh; shl.b32 %r11, %r1, 2; add.s32 %r12, %r10, %r11; st.shared.u32 [%r12], %r1;\n";
  const std::string read = "\nxor.b32 %r13, %r11, 4; add.s32 %r12, %r10, %r13; ld.shared.u32 %r14, [%r12];",
                    far = "\nxor.b32 %r13, %r11, 128; add.s32 %r12, %r10, %r13; ld.shared.u32 %r14, [%r12];";
  right("bar.warp.sync", write + "bar.warp.sync 0xffffffff;" + read, {.block = 32});
  const Outcome o = judge(write + read, {.block = 32});
  HEP_EXPECT(o.has("race"), "lanes of a warp without bar.warp.sync\n    " + o.all());
  wrong("a vote orders no memory", "race",
        write + "setp.eq.u32 %p1, 0, 0; vote.sync.ballot.b32 %r3, %p1, 0xffffffff;" + read, {.block = 32});
  wrong("the largest of all values orders none either", "race",
        write + "redux.sync.max.u32 %r3, %r1, 0xffffffff;" + read, {.block = 32});
  right("bar.sync", write + "bar.sync 0;" + far, {.block = 64});
  wrong("bar.warp.sync of two warps", "race", write + "bar.warp.sync 0xffffffff;" + far, {.block = 64});
  wrong("a write behind a read", "race",
        write + "bar.sync 0;" + far + "add.s32 %r12, %r10, %r11; st.shared.u32 [%r12], %r1;", {.block = 64});
}

const std::string kBar =
    "mov.u32 %r20, sh; add.s32 %r24, %r20, 64; setp.eq.s32 %p9, %r1, 0; @%p9 mbarrier.init.shared::cta.b64 [%r20], 1; ";
const std::string kLoad =
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r24], [%rd1], 16, [%r20];\n";
const std::string kStore =
    "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r24], 16; cp.async.bulk.commit_group;\n";
const std::string kExpect = "@%p9 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r20], 16;\n";
const std::string kWait = "W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p8, [%r20], 0; @!%p8 bra W;\n";
const std::string kFenceShared = "fence.proxy.async.shared::cta;\n", kFenceGlobal = "fence.proxy.async.global;\n";

HEP_CASE(bulk_loads) {
  const std::string read = "ld.shared.u32 %r3, [%r24];";
  const Shape warps{.block = 64};
  right("load, wait, read", kBar + kFenceShared + "bar.sync 0;" + kExpect + "@%p9 " + kLoad + kWait + read, warps);
  wrong("no fence behind the init", "proxy", kBar + "bar.sync 0;" + kExpect + "@%p9 " + kLoad + kWait + read, warps);
  wrong("no wait", "race",
        kBar + kFenceShared + "bar.sync 0; @%p9 st.shared.v4.u32 [%r24], {%r1, %r1, %r1, %r1}; " + kFenceShared +
            "bar.sync 0;" + kExpect + "@%p9 " + kLoad + read + kWait,
        warps);
  const std::string fill = kBar + kFenceShared + "mov.b64 %rd9, 5; @%p9 st.global.u64 [%rd1], %rd9;\n";
  right("a generic write, fenced", fill + kFenceGlobal + "bar.sync 0;" + kExpect + "@%p9 " + kLoad + kWait + read,
        warps);
  wrong("a generic write without a fence", "proxy", fill + "bar.sync 0;" + kExpect + "@%p9 " + kLoad + kWait + read,
        warps);
  wrong("a fence of the other space", "proxy",
        fill + kFenceShared + "bar.sync 0;" + kExpect + "@%p9 " + kLoad + kWait + read, warps);
}
HEP_CASE(bulk_stores) {
  const std::string fill =
      "mov.u32 %r20, sh; add.s32 %r24, %r20, 64; setp.eq.s32 %p9, %r1, 0; @%p9 st.shared.v4.u32 [%r24], {%r1, %r1, "
      "%r1, %r1};\n";
  const std::string again = "@%p9 st.shared.u32 [%r24], %r1;", read = "bar.sync 0; ld.global.u64 %rd3, [%rd1];";
  const Shape warps{.block = 64};
  const std::string store = "@!%p9 bra E; " + kStore;
  right("fill, fence, store, wait, read", fill + kFenceShared + store + "cp.async.bulk.wait_group 0;\nE: " + read,
        warps);
  wrong("no fence", "proxy", fill + store + "cp.async.bulk.wait_group 0;\nE: " + read, warps);
  wrong("a wait for the reads alone", "race",
        fill + kFenceShared + store + "cp.async.bulk.wait_group.read 0;\nE: " + read + "cp.async.bulk.wait_group 0;",
        warps);
  right("the source is free behind .read",
        fill + kFenceShared + store + "cp.async.bulk.wait_group.read 0;\nE: " + again + "cp.async.bulk.wait_group 0;",
        warps);
  wrong("the source is not free before", "race",
        fill + kFenceShared + store + "E: " + again + "cp.async.bulk.wait_group 0;", warps);
  wrong("a group that may be pending", "race",
        fill + kFenceShared + store + "cp.async.bulk.wait_group 1;\nE: " + read + "cp.async.bulk.wait_group 0;", warps);
}

}  // namespace
}  // namespace hep::ptxm::test
