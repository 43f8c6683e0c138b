// Litmus tests of docs/memory_model.md, between two devices: the program that keeps the contract gives its value under
// every seed and is reported for nothing; each that lacks a piece is reported, though its values are right here.
#include "harness.h"

namespace hep::ptxm::test {
namespace {

constexpr uint32_t kSeeds = 16;
constexpr uint64_t kValue = 7;
// 16 bytes of data, a flag, a credit, what the reader saw, who came first.
const std::string kBegin =
    "add.s64 %rd10, %rd1, 64; add.s64 %rd11, %rd1, 72; add.s64 %rd12, %rd1, 128; mov.b64 %rd9, 1; mov.b64 %rd8, 7; "
    "mov.u32 %r20, sh; add.s32 %r24, %r20, 64; mov.u32 %r7, 7; mov.u32 %r8, 0;\n"
    "atom.relaxed.sys.global.add.u64 %rd6, [%rd1+480], 1; setp.eq.s64 %p1, %rd6, 0;\n";

// Two threads, each a launch on a device of its own: whichever comes first writes, the other reads.
std::string pair(const std::string& writer, const std::string& reader) {
  return kBegin + "@!%p1 bra READER;\n" + writer + "\nbra.uni END;\nREADER:\n" + reader + "\nEND:";
}
std::string until(const char* load, const char* flag, const std::string& label) {
  return label + ": ld." + load + ".global.u64 %rd7, [" + flag + "]; setp.eq.s64 %p3, %rd7, 0; @%p3 bra " + label +
         ";\n";
}

Outcome run_all(const std::string& body, uint64_t seen_at, uint64_t wanted, const std::string& what, uint32_t parties) {
  Outcome all;
  Shape shape{.block = 1, .races = true, .kernels = parties, .devices = parties};
  for (shape.seed = 1; shape.seed <= kSeeds; ++shape.seed) {
    Outcome o = run(kernel(body), shape);
    if (wanted)
      HEP_EXPECT(o.out[seen_at] == wanted, what + ", seed " + std::to_string(shape.seed) + "\n    " + o.all());
    o.reports.insert(o.reports.end(), all.reports.begin(), all.reports.end());
    all = std::move(o);
  }
  return all;
}
void keeps(const std::string& what, const std::string& body, uint32_t parties = 2) {
  const Outcome o = run_all(body, 16, kValue, what, parties);
  HEP_EXPECT(o.reports.empty(), what + "\n    " + o.all());
}
void breaks(const std::string& what, const char* kind, const std::string& body, uint32_t parties = 2) {
  const Outcome o = run_all(body, 16, 0, what, parties);
  HEP_EXPECT(o.has(kind), what + ": expected a report of " + kind + "\n    " + o.all());
}

const std::string kWrite = "st.global.u64 [%rd1], %rd8;\n",
                  kRead = "ld.global.u64 %rd5, [%rd1]; st.global.u64 [%rd12], %rd5;\n";
const std::string kRelease = "st.release.sys.global.u64 [%rd10], %rd9;\n";
const std::string kRelaxed = "st.relaxed.sys.global.u64 [%rd10], %rd9;\n";
const std::string kFence = "fence.acq_rel.sys;\n", kProxyGlobal = "fence.proxy.async.global;\n";
const std::string kProxyShared = "fence.proxy.async.shared::cta;\n";
const std::string kAcquire = until("acquire.sys", "%rd10", "FLAG");

// Of the thread's own shared memory: sixteen bytes that begin with the value.
const std::string kFill = "st.shared.v4.u32 [%r24], {%r7, %r8, %r8, %r8};\n";
const std::string kStore =
    "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r24], 16; cp.async.bulk.commit_group;\n";
const std::string kStored = "cp.async.bulk.wait_group 0;\n", kStoreRead = "cp.async.bulk.wait_group.read 0;\n";
const std::string kInit = "mbarrier.init.shared::cta.b64 [%r20], 1;\n" + kProxyShared;
std::string load(const std::string& parity) {
  return "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd2, [%r20], 16;\n"
         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r24], [%rd1], 16, [%r20];\n"
         "W" +
         parity + ": mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p8, [%r20], " + parity + "; @!%p8 bra W" +
         parity + ";\n";
}
const std::string kSee = "ld.shared.u64 %rd5, [%r24]; st.global.u64 [%rd12], %rd5;\n";

HEP_CASE(litmus_1_message_passing) {
  keeps("release, acquire", pair(kWrite + kRelease, kAcquire + kRead));
  keeps("fences around relaxed flags",
        pair(kWrite + kFence + kRelaxed, until("relaxed.sys", "%rd10", "F") + kFence + kRead));
  breaks("a relaxed store in place of the release", "race", pair(kWrite + kRelaxed, kAcquire + kRead));
  breaks("the flag before the data", "race", pair(kRelease + kWrite, kAcquire + kRead));
  breaks("a release of the device's scope", "race",
         pair(kWrite + "st.release.gpu.global.u64 [%rd10], %rd9;", kAcquire + kRead));
  breaks("a relaxed load in place of the acquire", "race",
         pair(kWrite + kRelease, until("relaxed.sys", "%rd10", "F") + kRead));
  breaks("the data before the acquire", "race",
         pair(kWrite + kRelease, "ld.global.u64 %rd5, [%rd1];" + kAcquire + "st.global.u64 [%rd12], %rd5;"));
}
HEP_CASE(litmus_2_bulk_stores_and_a_flag) {
  const std::string fill = kFill + kProxyShared + kStore;
  keeps("wait, release", pair(fill + kStored + kRelease, kAcquire + kRead));
  breaks("no wait before the release", "race", pair(fill + kRelease + kStored, kAcquire + kRead));
  breaks("a wait for the reads alone", "race", pair(fill + kStoreRead + kRelease + kStored, kAcquire + kRead));
  breaks("a relaxed flag behind the wait", "race", pair(fill + kStored + kRelaxed, kAcquire + kRead));
}
HEP_CASE(litmus_3_and_4_bulk_loads_behind_a_flag) {
  const std::string bulk = kFill + kProxyShared + kStore + kStored + kRelease;
  keeps("bulk stores, fence, bulk load", pair(bulk, kInit + kAcquire + kProxyGlobal + load("0") + kSee));
  // The wait for a bulk store is followed by a fence between the proxies, which is on the path and so enough by PTX's
  // text. The contract wants the reader's all the same, and needs it for what was stored generically.
  keeps("bulk stores, no fence of the reader's", pair(bulk, kInit + kAcquire + load("0") + kSee));
  keeps("generic stores, fence, bulk load",
        pair(kWrite + kRelease, kInit + kAcquire + kProxyGlobal + load("0") + kSee));
  breaks("generic stores, no fence", "proxy", pair(kWrite + kRelease, kInit + kAcquire + load("0") + kSee));
  breaks("a fence before the acquire", "proxy",
         pair(kWrite + kRelease, kInit + kProxyGlobal + kAcquire + load("0") + kSee));
}
// Two blocks store; the second to come releases for both (add_acq_rel_rank, then the flag).
HEP_CASE(litmus_5_the_last_of_a_chain_releases_for_all) {
  const auto program = [](const char* add, const std::string& flag) {
    return kBegin.substr(0, kBegin.find("atom.")) +
           "setp.eq.u32 %p2, %r2, 2; @%p2 bra READER; shl.b32 %r9, %r2, 3; cvt.u64.u32 %rd13, %r9; "
           "add.s64 %rd14, %rd1, %rd13; st.global.u64 [%rd14], %rd8;\n" +
           std::string("atom.") + add +
           ".global.add.u64 %rd7, [%rd1+88], 1; setp.eq.s64 %p3, %rd7, 0; @%p3 bra END;\n" + flag +
           "bra.uni END;\nREADER:\n" + kAcquire +
           "ld.global.u64 %rd5, [%rd1]; ld.global.u64 %rd4, [%rd1+8]; add.s64 %rd5, %rd5, %rd4; "
           "st.global.u64 [%rd12], %rd5;\nEND:";
  };
  const auto judge = [](const std::string& body) {
    Outcome all;
    Shape shape{.grid = 3, .block = 1, .races = true};
    for (shape.seed = 1; shape.seed <= kSeeds; ++shape.seed) {
      Outcome o = run(kernel(body), shape);
      HEP_EXPECT(o.out[16] == 2 * kValue, o.all());
      o.reports.insert(o.reports.end(), all.reports.begin(), all.reports.end());
      all = std::move(o);
    }
    return all;
  };
  HEP_EXPECT(judge(program("acq_rel.gpu", kRelease)).reports.empty(), judge(program("acq_rel.gpu", kRelease)).all());
  HEP_EXPECT(judge(program("relaxed.gpu", kRelease)).has("race"), "a relaxed count between the blocks");
  HEP_EXPECT(judge(program("release.gpu", kRelease)).has("race"), "the last does not acquire");
  HEP_EXPECT(judge(program("acquire.gpu", kRelease)).has("race"), "the first does not release");
  HEP_EXPECT(judge(program("acq_rel.gpu", kRelaxed)).has("race"), "the last sets the flag without a release");
}
// A stage is read and refilled: warp 1 reads, publishes and arrives; warp 0 waits and loads into it again.
HEP_CASE(litmus_6_and_7_a_stage_is_refilled) {
  const auto program = [](const std::string& publish, const std::string& wait) {
    return "mov.u32 %r20, sh; add.s32 %r24, %r20, 64; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r1, 32; mov.u32 %r7, "
           "7; "
           "mov.u32 %r8, 0; add.s64 %rd12, %rd1, 128;\n"
           "@%p1 mbarrier.init.shared::cta.b64 [%r20], 1; @%p1 mbarrier.init.shared::cta.b64 [%r20+8], 1;\n"
           "@%p1 st.shared.v4.u32 [%r24], {%r7, %r8, %r8, %r8};\n" +
           kProxyShared + "bar.sync 0;\n" + "@%p2 bra CONSUMER; @!%p1 bra END;\n" + wait + load("0") +
           "bra.uni END;\nCONSUMER:\n" + "ld.shared.u64 %rd5, [%r24]; st.global.u64 [%rd12], %rd5;\n" + publish +
           "mbarrier.arrive.release.cta.shared::cta.b64 %rd2, [%r20+8];\nEND:";
  };
  const std::string wait = "E: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p9, [%r20+8], 0; @!%p9 bra E;\n";
  const auto judge = [](const std::string& body) {
    return run_seeds(kernel(body), {.block = 64, .races = true}, kSeeds);
  };
  HEP_EXPECT(judge(program(kProxyShared, wait)).reports.empty(), judge(program(kProxyShared, wait)).all());
  HEP_EXPECT(judge(program(kProxyShared, "")).has("race"), "a refill that waits for nobody");
  // Generic reads before an async write: the contract's fence (publish_shared) is the reader's, and this machine, which
  // orders proxies for what was written, does not ask for it.
  HEP_EXPECT(judge(program("", wait)).reports.empty(), judge(program("", wait)).all());
}
HEP_CASE(litmus_8_a_credit_comes_back) {
  const std::string first = kWrite + kRelease, credit = "st.release.sys.global.u64 [%rd11], %rd9;\n";
  const std::string again = "st.global.u64 [%rd1], %rd9;\n", taken = until("acquire.sys", "%rd11", "CREDIT");
  keeps("a refill behind the credit", pair(first + taken + again, kAcquire + kRead + credit));
  breaks("a refill without it", "race", pair(first + again, kAcquire + kRead + credit));
  breaks("a credit before the data was read", "race", pair(first + taken + again, kAcquire + credit + kRead));
  breaks("a relaxed credit", "race",
         pair(first + taken + again, kAcquire + kRead + "st.relaxed.sys.global.u64 [%rd11], %rd9;"));
}
// A put over a NIC, which is a third party here: it waits for the doorbell, reads the send slot, writes the peer's slot
// and sets the signal, as the verb promises (9), or as two calls that nothing orders (9f). What a NIC does between
// those steps, and what PCIe lets pass, only a NIC can show.
std::string trio(const std::string& writer, const std::string& nic, const std::string& reader) {
  return kBegin + "add.s64 %rd13, %rd1, 192; add.s64 %rd14, %rd1, 80; setp.eq.s64 %p2, %rd6, 1;\n" +
         "@!%p1 bra ELSE;\n" + writer + "\nbra.uni END;\nELSE: @!%p2 bra READER;\n" + nic +
         "\nbra.uni END;\nREADER:\n" + reader + "\nEND:";
}
HEP_CASE(litmus_9_a_put_and_its_signal) {
  const std::string ring = kFence + kRelaxed, bulk = kFill + kProxyShared + kStore;
  const std::string take = until("acquire.sys", "%rd10", "BELL") + "ld.global.u64 %rd5, [%rd1];\n";
  const std::string put = take + "st.global.u64 [%rd13], %rd5;\n";
  const std::string signal = "st.release.sys.global.u64 [%rd14], %rd9;\n";
  const std::string apart = "st.relaxed.sys.global.u64 [%rd14], %rd9;\n";
  const std::string told = until("acquire.sys", "%rd14", "SIGNAL");
  std::string from_slot = load("0");
  from_slot.replace(from_slot.find("[%rd1]"), 6, "[%rd13]");
  const std::string stage = kInit + told + kProxyGlobal + from_slot + kSee;
  const std::string plain = told + "ld.global.u64 %rd5, [%rd13]; st.global.u64 [%rd12], %rd5;\n";
  keeps("9: bulk stores, wait, fence, doorbell", trio(bulk + kStored + ring, put + signal, stage), 3);
  breaks("9: no wait before the doorbell", "race", trio(bulk + ring + kStored, put + signal, stage), 3);
  breaks("9: no fence between the reader's proxies", "proxy",
         trio(bulk + kStored + ring, put + signal, kInit + told + from_slot + kSee), 3);
  keeps("9a: generic stores, generic loads", trio(kWrite + ring, put + signal, plain), 3);
  breaks("9a: a relaxed load of the signal", "race",
         trio(kWrite + ring, put + signal,
              until("relaxed.sys", "%rd14", "S") + "ld.global.u64 %rd5, [%rd13]; st.global.u64 [%rd12], %rd5;\n"),
         3);
  breaks("9b: no fence of the sender's", "race", trio(bulk + kStored + kRelaxed, put + signal, stage), 3);
  breaks("9f: a signal that is no part of the put", "race", trio(bulk + kStored + ring, put + apart, stage), 3);
  // 9d: the stage is read, the credit comes back, the send slot is filled again.
  const std::string credit = "st.release.sys.global.u64 [%rd11], %rd9;\n", again = "st.global.u64 [%rd1], %rd9;\n";
  const std::string taken = until("acquire.sys", "%rd11", "CREDIT");
  keeps("9d: a refill behind the credit", trio(kWrite + ring + taken + again, put + signal, stage + credit), 3);
  breaks("9d: a refill without it", "race", trio(kWrite + ring + again, put + signal, stage + credit), 3);
}
// A writer that stops before its release: the reader's wait ends at its deadline, here a number of polls, and says so.
HEP_CASE(litmus_10_a_wait_for_a_rank_that_stopped) {
  const std::string bounded =
      "mov.u32 %r9, 0;\nPOLL: ld.acquire.sys.global.u64 %rd7, [%rd10]; setp.ne.s64 %p3, %rd7, 0; @%p3 bra END; "
      "add.u32 %r9, %r9, 1; setp.lt.u32 %p8, %r9, 200; @%p8 bra POLL; st.global.u64 [%rd12], %rd8;\n";
  keeps("the reader gives up and reads nothing", pair(kWrite, bounded));
  breaks("a reader that gives up and reads all the same", "race",
         pair(kWrite, bounded + "ld.global.u64 %rd5, [%rd1]; st.global.u64 [%rd12], %rd5;\n"));
}
// What only a machine with store buffers would show, and why ours needs none: PTX lets both threads of store buffering
// miss the other's flag. No data is involved, so that nothing is a race; whoever acts on not having seen a flag would
// be wrong, and would not be noticed here.
HEP_CASE(litmus_of_strong_accesses_alone_is_not_judged) {
  const std::string mine = "st.relaxed.sys.global.u64 [%rd10], %rd9; ld.relaxed.sys.global.u64 %rd5, [%rd11];",
                    other = "st.relaxed.sys.global.u64 [%rd11], %rd9; ld.relaxed.sys.global.u64 %rd4, [%rd10];";
  Shape shape{.block = 1, .races = true, .kernels = 2, .devices = 2};
  for (shape.seed = 1; shape.seed <= kSeeds; ++shape.seed) {
    const Outcome o =
        run(kernel(pair(mine + "st.global.u64 [%rd12], %rd5;", other + "st.global.u64 [%rd12+8], %rd4;")), shape);
    HEP_EXPECT(o.reports.empty() && o.out[16] + o.out[17] > 0, o.all());
  }
}

}  // namespace
}  // namespace hep::ptxm::test
