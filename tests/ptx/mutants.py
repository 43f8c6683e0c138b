"""Mutants of what only a GPU runs: edits of the PTX that nvcc emitted, and calls of the runtime that are left out. Each
runs on the PTX machine in a process of its own, forked so that torch is imported once, and must be noticed: by a wrong
result, by a report of the machine, by an error of CUDA's or by a deadline. The unedited library must pass.

    python tests/ptx/mutants.py [--only NAME] [--everyday] [--table] [--seed N] [--minutes M]

--table prints what docs/ptx_machine.md holds; --everyday runs the few of CI, each in the mode that notices it. Needs
scripts/build_cuda.py --interpreted."""

from __future__ import annotations

import argparse
import functools
import os
import re
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("", "tests/ptx", "tests/python/weights", "tests/python", "tests/gpu"):
    sys.path.insert(0, str(ROOT / folder))

SHARED, GLOBAL = r"fence\.proxy\.async\.shared::cta;", r"fence\.proxy\.async\.global;"
FENCE = r"fence\.acq_rel\.sys;"
NOTHING = "// left out"
STORED_LINE = r"st\.volatile\.global\.v2\.u64 "
FLAG_FIRST = r"st.volatile.global.u64 [\1+8], \3; st.volatile.global.u64 [\1], \2;"
ERRORS = {
    "AssertionError": "wrong results",
    "DeadlineError": "a deadline",
    "CudaError": "an error of the launch",
    "RuntimeError": "an error of the launch",
}
# A run that takes longer never ends: several times what the unedited library takes where the cores are shared.
LIMIT_S = {False: 90.0, True: 240.0}
HANGS, STALE = "does not end", "the PTX has no such place or is none afterwards: the mutant must change, too"


@dataclass(frozen=True)
class Mutant:
    """kernels: in which entry points; pattern, replacement: of one line's text; before: what the next instruction must
    match; drop: a call of the runtime that does nothing; survives: why the machine cannot see it, where it cannot."""

    name: str
    kernels: str
    pattern: str = ""
    replacement: str = NOTHING
    survives: str = ""
    drop: str = ""
    before: str = ""


SPARES = ("push_weights", "await_weights", "collect_gradients")  # the kernels of spare slots


def off(
    kernel: str, what: str, pattern: str, replacement: str = NOTHING, survives: str = "", before: str = ""
) -> Mutant:
    return Mutant(f"{kernel}: {what}", kernel, pattern, replacement, survives, before=before)


def expect(kernel: str, by: int) -> Mutant:
    return off(
        kernel,
        f"expects {by:+d} bytes",
        r"(mbarrier\.arrive\.expect_tx\S+\s+\S+\s+\[\S+\], )(%r\d+);",
        rf"{{ .reg .b32 more; add.s32 more, \2, {by}; \1more; }}",
    )


MUTANTS = (
    *(off(k, "no shared-memory proxy fence", SHARED) for k in ("dispatch", "combine")),
    *(off(k, "no global proxy fence after an acquire", GLOBAL) for k in ("dispatch", "combine")),
    *(off(k, "does not wait for its bulk stores", r"cp\.async\.bulk\.wait_group 0;") for k in ("dispatch", "combine")),
    *(
        off(
            k,
            "waits until its bulk stores are read only",
            r"cp\.async\.bulk\.wait_group 0;",
            "cp.async.bulk.wait_group.read 0;",
        )
        for k in ("dispatch", "combine")
    ),
    *(
        off(k, "fills a stage that a bulk store still reads", r"cp\.async\.bulk\.wait_group\.read \d+;")
        for k in ("dispatch", "combine")
    ),
    *(expect(k, by) for k, by in (("dispatch", 16), ("dispatch", -16), ("combine", 16))),
    off(
        "dispatch",
        "bulk loads of 8 bytes more",
        r"(cp\.async\.bulk\.shared\S+ \[\S+\], \[\S+\], )(%r\d+)(, \[\S+\];)",
        r"{ .reg .b32 more; add.u32 more, \2, 8; \1more\3 }",
    ),
    off(
        "dispatch",
        "bulk stores of 16 bytes more",
        r"(cp\.async\.bulk\.global\S+ \[\S+\], \[\S+\], )(%r\d+);",
        r"{ .reg .b32 more; add.u32 more, \2, 16; \1more; }",
    ),
    off(
        "combine",
        "bulk stores from 8 bytes further",
        r"(cp\.async\.bulk\.global\S+ \[\S+\], )\[(%r\d+)\](, %r\d+;)",
        r"{ .reg .b32 more; add.u32 more, \2, 8; \1[more]\3 }",
    ),
    *(
        off(k, "announces its flags without a fence", FENCE, before=r"(?!fence\.proxy)")
        for k in ("exchange", "dispatch", "combine")
    ),
    *(
        off(k, "no fence behind the flags that it waited for", FENCE, before=r"fence\.proxy")
        for k in ("exchange", "dispatch")
    ),
    off(
        "combine",
        "no fence behind the flags that it waited for",
        FENCE,
        before=r"fence\.proxy",
        survives="guards nothing: partials have flags of their own",
    ),
    *(
        off(k, "announces its flags to its block only", r"st\.relaxed\.sys\.", "st.relaxed.cta.")
        for k in ("exchange", "dispatch", "combine")
    ),
    *(off(k, "fences for its device only", FENCE, "fence.acq_rel.gpu;") for k in ("exchange", "dispatch", "combine")),
    *(
        off(k, "releases its flags to its device only", r"st\.release\.sys\.", "st.release.gpu.")
        for k in ("exchange", "dispatch", "combine")
    ),
    *(
        off(k, "acquires flags from its device only", r"ld\.acquire\.sys\.", "ld.acquire.gpu.")
        for k in ("dispatch", "combine")
    ),
    *(
        off(k, "releases its flags to its block only", r"st\.release\.sys\.", "st.release.cta.")
        for k in ("exchange", "dispatch", "combine")
    ),
    *(
        off(k, "stores its flags without a release", r"st\.release\.sys\.", "st.relaxed.sys.")
        for k in ("exchange", "dispatch", "combine")
    ),
    *(
        off(k, "acquires flags from its block only", r"ld\.acquire\.sys\.", "ld.acquire.cta.")
        for k in ("dispatch", "combine")
    ),
    *(
        off(k, "reads flags without an acquire", r"ld\.acquire\.sys\.", "ld.relaxed.sys.")
        for k in ("exchange", "dispatch", "combine")
    ),
    off("dispatch", "counts landed rows for its device only", r"red\.relaxed\.sys\.", "red.relaxed.gpu."),
    off("dispatch", "blocks meet without order", r"atom\.acq_rel\.(gpu|sys)\.", r"atom.relaxed.\1."),
    *(
        off(
            k,
            "mbarriers expect one arrival more",
            r"(mbarrier\.init\S+ \[\S+\], )(%?\w+);",
            r"{ .reg .b32 more; mov.b32 more, \2; add.u32 more, more, 1; \1more; }",
        )
        for k in ("dispatch", "combine")
    ),
    off("exchange", "warps do not meet", r"bar\.warp\.sync -1;"),
    off("exchange", "the block does not meet", r"bar\.sync 0;"),
    off("dispatch", "bulk stores are not committed", r"cp\.async\.bulk\.commit_group;"),
    *(
        mutant
        for k in ("latency_dispatch", "latency_combine", "latency_dispatch_nodes", "latency_combine_nodes")
        for mutant in (
            off(
                k, "a line's flag before its payload", STORED_LINE + r"\[(%rd\d+)\], {(%rd\d+), (%rd\d+)};", FLAG_FIRST
            ),
            off(k, "lanes do not meet before a line", r"bar\.warp\.sync -1;", before=r"setp\.eq\.s64"),
            off(k, "stores lines to its device only", STORED_LINE, "st.relaxed.gpu.global.v2.u64 "),
            off(k, "stores lines that nobody else may read", STORED_LINE, "st.global.v2.u64 "),
            off(
                k,
                "takes lines of older steps",
                r"setp\.eq\.s64(.*)",
                r"setp.le.u64\1",
                before=r"selp\.u32 %r\d+, 1, 0,",
            ),
        )
    ),
    *(
        mutant
        for k in ("latency_dispatch_nodes", "latency_combine_nodes")
        for mutant in (
            off(
                k,
                "hands rows to the rail before all lanes have stored them",
                r"bar\.warp\.sync -1;",
                before=r"\{ \.reg \.pred p; elect\.sync",
            ),
            off(k, "a row's signal without a release", r"st\.release\.sys\.", "st.relaxed.sys."),
            off(k, "signals to its device only", r"st\.release\.sys\.", "st.release.gpu."),
            off(k, "takes rows of the rail without an acquire", r"ld\.acquire\.sys\.", "ld.relaxed.sys."),
            off(k, "warps that share a row meet without order", r"atom\.acq_rel\.sys\.", "atom.relaxed.sys."),
            off(
                k,
                "a row is handed over by its first warp",
                r"atom\.acq_rel\.sys\.global\.add\.u64 (%rd\d+), \[(%rd\d+)\], (%rd\d+);",
                r"mov.u64 \1, 4294967295;",
            ),
        )
    ),
    off("push_weights", "does not wait for its bulk stores", r"cp\.async\.bulk\.wait_group 0;"),
    off("push_weights", "announces its slots without a fence", FENCE, before=r"(?!fence\.proxy)"),
    off("push_weights", "releases its flags to its block only", r"st\.release\.sys\.", "st.release.cta."),
    *(
        off(k, "reads flags without an acquire", r"ld\.acquire\.sys\.", "ld.relaxed.sys.", survives=why)
        for k, why in zip(SPARES, ("", "torch reads slots", ""), strict=True)
    ),
    *(
        off(k, "waits for no flag", r"ld\.acquire\.sys\.global\.u64 (%rd\d+), \[%rd\d+\];", r"mov.u64 \1, 4294967295;")
        for k in SPARES
    ),
    *(
        mutant
        for k in ("push_nodes", "collect_nodes")
        for mutant in (
            off(k, "reads flags without an acquire", r"ld\.acquire\.sys\.", "ld.relaxed.sys."),
            off(k, "tells its device only", r"st\.release\.sys\.", "st.release.gpu."),
        )
    ),
    off("push_nodes", "does not wait for its bulk stores", r"cp\.async\.bulk\.wait_group 0;"),
    off(
        "collect_nodes",
        "lanes do not meet before one speaks for them",
        r"bar\.warp\.sync -1;",
        before=r"\{ \.reg \.pred p; elect\.sync|@|setp",
    ),
    Mutant("host: memory is not zeroed", "", drop="cudaMemsetAsync"),
    Mutant("host: no uploads", "", drop="cudaMemcpyAsync"),
    Mutant("host: a changed stream does not wait for the last one", "", drop="cudaStreamWaitEvent"),
    Mutant("host: a launch gets 128 bytes of shared memory too few", "", drop="shared memory"),
    Mutant("host: counters of travelling weights are not stored", "", drop="cuStreamWriteValue64"),
)


# Every day: what is noticed by values in an instant, and the two sides of the flags' order.
EVERYDAY = {
    "combine: waits until its bulk stores are read only": False,
    "combine: bulk stores from 8 bytes further": False,
    "exchange: announces its flags without a fence": True,
    "exchange: no fence behind the flags that it waited for": True,
    "dispatch: no global proxy fence after an acquire": True,
    "latency_dispatch: lanes do not meet before a line": False,
    "latency_combine: a line's flag before its payload": False,
}


def edited(text: str, mutant: Mutant) -> tuple[str, int]:
    """The text with the pattern replaced in the mutant's kernels, and how often."""
    out, count, inside, lines = [], 0, False, text.split("\n")

    def next_instruction(i: int) -> str:
        return next((s for s in map(str.strip, lines[i + 1 :]) if s and not s.startswith(("//", ".", "$"))), "")

    for i, line in enumerate(lines):
        if ".entry" in line:
            inside = bool(re.search(rf"\d{mutant.kernels}_entry", line))
        if inside and mutant.pattern and re.match(mutant.before, next_instruction(i) if mutant.before else ""):
            line, n = re.subn(mutant.pattern, mutant.replacement, line)
            count += n
        out.append(line)
    return "\n".join(out), count


def run(mutant: Mutant | None, seed: int, races: bool, few: bool) -> str:
    """How it was noticed, "" if it was not. In a process of its own, which is killed when its time is over."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            said = _body(mutant, seed, races, few, write)
        except BaseException as error:  # what noticed it
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
        _end(write, said)
    os.close(write)
    with os.fdopen(read) as pipe:
        in_time = select.select([pipe], [], [], LIMIT_S[races])[0]
        if not in_time:
            os.kill(child, signal.SIGKILL)
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if not in_time:
        return f"{HANGS} within {LIMIT_S[races]:.0f} s"
    if "invalid device function" in said:
        return STALE
    return said or (f"the process ended by signal {os.WTERMSIG(status)}" if status else "")


def _end(write: int, said: str) -> None:
    os.write(write, said[:2000].encode())
    os._exit(0)


def _watch(library, write: int) -> None:
    """Ends the process at the first report: what comes after it takes long and says no more."""
    while not (reports := library.reports()):
        time.sleep(0.2)
    _end(write, "; ".join(reports[:3]))


def _body(mutant, seed, races, few, write):
    import torch_cuda
    from ptx_machine import Choices

    library = torch_cuda.install(Choices(seed=seed, races=races, apart=True))
    if mutant and mutant.pattern:
        count = 0
        for i, text in enumerate(library.texts()):
            text, n = edited(text, mutant)
            count += n
            if n:
                library.edit(i, text)
        if not count:
            return STALE
    if mutant and mutant.drop:
        library.drop(mutant.drop)
    threading.Thread(target=_watch, args=(library, write), daemon=True).start()
    with library.modes():
        _work(40 if races else 10, few)
    return "; ".join(library.reports()[:3])


def _work(timeout_s: float, few: bool):
    """A domain of two ranks by either path, two nodes of two, and blocks with more rows than stages, with others for
    local work: every kernel of the library. few: not the last."""
    from examples import Example, check, expected
    from gpu_world import GpuWorld, call_on_two_streams
    from test_by_lines import check_by_lines

    two = {"num_sms_dispatch_api": 2, "num_sms_combine_api": 2}
    one = {"num_sms_dispatch_api": 1, "num_sms_combine_api": 1, "num_blocks_permute": 2, "num_blocks_unpermute": 2}
    worlds = (
        ("cuda", Example(1, 2, 2, (9, 5), 2, 64, scale_columns=1, pad_multiple=4, seed=3), two),
        ("cuda_loopback", Example(2, 2, 2, (7, 0, 11, 5), 2, 64, pad_multiple=4, seed=6), two),
        ("cuda", Example(1, 2, 2, (44, 40), 2, 1024, scale_columns=1, seed=5), one),
    )
    for executor, ex, blocks in worlds[:2] if few else worlds:
        world = GpuWorld(
            ex.num_nodes, ex.num_local_ranks, ex.num_local_experts, executor, skew=0, timeout_s=timeout_s, **blocks
        )
        want = expected(ex)
        world.world.poison(world.raw)
        world.run(lambda rank, buffer, ex=ex, want=want: check(buffer, rank, ex, want))
        world.close()
    check_by_lines(Example(1, 2, 2, (9, 5), 2, 256, pad_multiple=4, budget=64, seed=3), timeout_s)
    for executor in ("cuda", "cuda_loopback"):
        check_by_lines(Example(2, 2, 2, (9, 0, 2, 5), 2, 512, pad_multiple=4, budget=96, seed=21), timeout_s, executor)
    if not few:
        call_on_two_streams(timeout_s)
        _push(timeout_s)
        _travel(timeout_s)


def _push(timeout_s: float) -> None:
    """Three ranks, on one node and on three, push weights and bring gradients home, layer after layer with no wait of
    the host."""
    import torch
    from test_weight_pushes import Layers, idle, on_gpu

    meet = threading.Barrier(3)

    def work(rank, slots, spare, per_node):
        layers = Layers(slots, rank, 3, spare, 2, per_node=per_node)
        if spare == 1 and per_node == 3:  # one slot, filled by two owners in turn, whom nothing else orders
            for owner, plan, there, owners in zip((1, 2), layers.plans, layers.on_device, layers.owners, strict=True):
                plan.fill_(-1)[0, 0] = owners.experts_of(owner)[0]
                there.copy_(plan)
        for _ in range(2):
            idle()
            meet.wait(timeout_s)
            layers.launch()
        idle()
        layers.check(2)

    for spare, nodes, blocks in ((1, 1, 2), (2, 1, 2), (1, 3, 1)):
        run = functools.partial(work, spare=spare, per_node=3 // nodes)
        on_gpu(3, spare, 2, run, torch.float32, num_nodes=nodes, num_blocks=blocks, timeout_s=timeout_s)


def _travel(timeout_s: float) -> None:
    """Two ranks pull each other's weights. tests/gpu/test_travelling_weights.py leaves waits out."""
    import torch
    from test_travelling_weights import SHAPES, check_layer, on_gpu, own_weights, store_of

    from hybrid_ep.weights import WeightLayout, WeightPrefetcher

    layout = WeightLayout(5, 2, 3, SHAPES, torch.float32, 3)

    def work(rank, group):
        prefetcher = WeightPrefetcher(store_of(group, layout, timeout_s))
        for version in range(2):
            prefetcher.publish(own_weights(layout, rank, version, "cuda"))
            for layer in (0, 1, 2, 0):
                check_layer(prefetcher, layer, version)
                prefetcher.release(layer, training=False)
        prefetcher.close()

    on_gpu(2, work)


def how(said: str) -> str:
    """The kind of evidence, for the table."""
    if said.startswith((HANGS, "the process")):
        return said.partition(" within")[0]
    kind = re.match(r"(?:\[)?([A-Za-z_]+)", said)
    return ERRORS.get(kind[1], kind[1]) if kind else said


def chosen(args) -> list[tuple[Mutant, tuple[bool, ...]]]:
    """Mutants, and the modes (happens-before or not) to try them in, one after the other."""
    if args.everyday:
        by_name = {m.name: m for m in MUTANTS}
        return [(by_name[name], (races,)) for name, races in EVERYDAY.items()]
    return [(m, (False, True)) for m in MUTANTS if args.only in m.name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    parser.add_argument("--everyday", action="store_true", help="the few of CI")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant later")
    parser.add_argument("--table", action="store_true", help="print the table of docs/ptx_machine.md")
    args = parser.parse_args()
    import gpu_world  # noqa: F401  all imports before the forks
    import torch  # noqa: F401

    import hybrid_ep  # noqa: F401

    begun = time.monotonic()
    bad, rows, not_run = [], [], 0
    for races in (False, True):
        started = time.monotonic()
        if said := run(None, args.seed, races, args.everyday):
            bad.append(f"the unedited library{' (races)' if races else ''}: {said}")
        print(
            f"the unedited library{' (races)' if races else ''}: {said or 'passes'} "
            f"[{time.monotonic() - started:.1f} s]",
            flush=True,
        )
    for mutant, modes in chosen(args):
        if time.monotonic() - begun > 60 * args.minutes:
            not_run += 1
            continue
        started, said, races = time.monotonic(), "", False
        for races in modes:
            if said := run(mutant, args.seed, races, args.everyday):
                break
        rows.append(
            f"| {mutant.name} | {('order' if races else 'values') if said else 'not seen'} | "
            f"{how(said) if said else mutant.survives} |"
        )
        print(f"{mutant.name}: {said[:150] or 'SURVIVES'} [{time.monotonic() - started:.1f} s]", flush=True)
        if said == STALE:
            bad.append(f"{mutant.name}: {said}")
        elif bool(said) == bool(mutant.survives):
            bad.append(f"{mutant.name}: {'is caught after all' if said else 'survives'}")
    if args.table:
        print("\n".join(["| mutant | seen by | as |", "|---|---|---|", *rows]))
    print("\n".join(bad))
    print(f"mutants: {len(rows)} run, {not_run} not, {len(bad)} complaints")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
