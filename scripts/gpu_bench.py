"""Times dispatch and combine of virtual ranks on one GPU, through the public API, and writes raw JSON.

    python scripts/gpu_bench.py [--executor cuda|host] [--quick] [--wide] [--out FILE]

Cases: one active rank of 8 (the others have no tokens; bytes delivered per second and SM, over SM counts and dtypes),
8 active ranks; the first also with blocks of its own for local work (column `own`; of all ranks there is no room); one
rank of 72 whose peers are memory (scripts/lone_rank.py), since more ranks than a device has hardware queues (32)
cannot wait for each other on it; `seed`, 8 active ranks of hidden 8192 with two experts each, and `seed_one`, one
active rank of the same 8, over SMs; with --wide one active rank of 32.
All calls use a cached handle. A time is that of rank 0 between two events around the call on its stream, median of the
repetitions. Launches are made while an event holds all ranks' streams back, so that the host has no part in the time;
`late` counts calls (of all ranks) whose launch came after that event. `host_us` is the host's time in the call, of as
many threads at once as there are ranks (scripts/gpu_bench_stages.py has one rank's), of a rank among memory that of the
compiled core alone. Delivered bytes are the payload and scale bytes of the rows that rank 0's tokens
became, each destination rank counted once. On one device every virtual link is HBM: the numbers say what an SM can
move, nothing about NVLink."""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Before torch starts CUDA: ranks wait for each other, so that streams which share a hardware queue may hang, and so may
# the loading of a kernel.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from lone_rank import LoneRank  # noqa: E402

from hybrid_ep import _core  # noqa: E402  (the checkout first, installed or not)
from hybrid_ep.runtime import devices  # noqa: E402  (the checkout first, installed or not)
from hybrid_ep.runtime.tensors import pad_rows, row_bytes  # noqa: E402
from hybrid_ep.testing import VirtualWorld  # noqa: E402

SECONDS_PER_TRY = 20.0


@dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int
    active: int  # ranks 0..active-1 have tokens
    tokens: int
    hidden: int
    num_experts: int
    topk: int
    dtype: str  # "bf16" or "fp8" (bytes with a float32 scale for every 128)
    num_sms: int
    permute_sms: int | None = None  # of the active rank, for local work
    lone: bool = False  # the other ranks are memory


def cases(quick: bool, wide: bool) -> list[Case]:
    tokens, hidden = (64, 512) if quick else (4096, 7168)
    found = [
        Case("one_of_8", 8, 1, tokens, hidden, 256, 8, dtype, sms)
        for dtype in ("bf16", "fp8")
        for sms in ((2,) if quick else (4, 8, 16))
    ]
    found += [replace(case, permute_sms=4 if quick else 64) for case in found if case.dtype == "bf16"]
    found.append(Case("8_of_8", 8, 8, tokens, hidden, 256, 8, "bf16", 2 if quick else 16))
    found += [
        Case("one_of_72", 72, 1, tokens, hidden, 288, 8, "fp8", sms, lone=True)
        for sms in ((2,) if quick else (4, 8, 16))
    ]
    if wide:  # 31 blocks beside the active rank's: one SM each
        found += [Case("one_of_32", 32, 1, 1024, hidden, 256, 8, dtype, 8) for dtype in ("bf16", "fp8")]
    if not quick:
        found += [Case("seed", 8, 8, tokens, 8192, 16, 8, "bf16", sms) for sms in (1, 2, 4, 8, 16)]
        found += [Case("seed_one", 8, 1, tokens, 8192, 16, 8, "bf16", sms) for sms in (1, 2, 4, 8, 16, 24, 32)]
    return found


class Clock:
    """Microseconds between start() and stop() on the current stream, read after the run; wall time without a GPU."""

    def __init__(self, on_gpu: bool):
        self.on_gpu, self.pairs, self.host = on_gpu, [], []

    def start(self):
        if self.on_gpu:
            self.pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self.pairs[-1][0].record()
        self.began = time.perf_counter()

    def stop(self):
        self.host.append(1e6 * (time.perf_counter() - self.began))
        if self.on_gpu:
            self.pairs[-1][1].record()

    def times(self) -> list[float]:
        return [1e3 * a.elapsed_time(b) for a, b in self.pairs] if self.on_gpu else list(self.host)


class Gate:
    """An event that holds the ranks' streams back while the host launches. One rank shuts it before the ranks meet, and
    each passes it afterwards. Nothing on its own stream waits for a rank, so it opens."""

    def __init__(self, num_ranks: int, on_gpu: bool):
        self.cycles = 1_000_000 * max(4, num_ranks)  # half a millisecond a rank
        self.stream = torch.cuda.Stream() if on_gpu else None
        self.event = None

    def shut(self) -> None:
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(self.cycles)
                self.event = self.stream.record_event()

    def join(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def is_open(self) -> bool:
        return self.event is not None and self.event.query()


def inputs(case: Case, rank: int, device) -> dict:
    g = torch.Generator().manual_seed(7 * rank + 1)
    tokens = case.tokens if rank < case.active else 0
    idx = torch.rand(tokens, case.num_experts, generator=g).argsort(1)[:, : case.topk].contiguous()
    payload = torch.randn(tokens, case.hidden, generator=g)
    scale = None
    if case.dtype == "fp8":
        payload, scale = payload.to(torch.float8_e4m3fn), torch.rand(tokens, case.hidden // 128, generator=g).to(device)
    else:
        payload = payload.bfloat16()
    return {
        "hidden": payload.to(device),
        "scaling_factor": scale,
        "topk_idx": idx.to(device),
        "topk_weights": torch.rand(tokens, case.topk, generator=g).to(device),
    }


def timed_verbs(verbs: dict, traffic, reset, meet, gate: Gate, shuts: bool, repeats: int) -> dict:
    """{verb: its times, and the rows that one call moved}. meet(): a barrier of all ranks; shuts: whether this one has
    the gate."""
    on_gpu, result = gate.stream is not None, {}
    reset()
    for name, verb in verbs.items():
        clock, late = Clock(on_gpu), 0
        for i in range(repeats + 3):
            if shuts:
                gate.shut()
            meet()
            gate.join()
            if i >= 3:
                clock.start()
            verb()
            if i >= 3:
                clock.stop()
                late += gate.is_open()
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            meet()  # nobody is behind when the gate shuts again
        sent = traffic()
        reset()
        result[name] = {
            "times_us": clock.times(),
            "host_us": statistics.median(clock.host),
            "late": late,
            "rows": (sent["node_rows"] + sent["self_rows"]) // (repeats + 3),
        }
    return result


def rank_program(case: Case, rank: int, buffer, meet: threading.Barrier, gate: Gate, repeats: int) -> dict:
    """One rank of a case: a routed dispatch, then repetitions of a cached dispatch and of a combine."""
    on_gpu = gate.stream is not None
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    # A rank without tokens still receives: it takes one SM, the active rank those of the case.
    sms, local = (case.num_sms, case.permute_sms) if rank < case.active else (1, None)
    buffer.update_template_config(
        num_of_blocks_dispatch_api=sms,
        num_of_blocks_combine_api=sms,
        num_of_blocks_permute=local,
        num_of_blocks_unpermute=local,
    )
    mine = inputs(case, rank, device)
    rows, _, _, _, handle = buffer.dispatch_with_permute(num_of_experts=case.num_experts, **mine)
    again = {
        "hidden": mine["hidden"],
        "scaling_factor": mine["scaling_factor"],
        "handle": handle,
        "num_permuted_tokens": rows.shape[0],
    }
    back = torch.randn(rows.shape[0], case.hidden, device=device).bfloat16()
    verbs = {
        "dispatch": lambda: buffer.dispatch_with_permute(**again),
        "combine": lambda: buffer.combine_with_unpermute(hidden=back, handle=handle),
    }
    return timed_verbs(
        verbs, buffer.traffic, buffer.reset_traffic, lambda: meet.wait(SECONDS_PER_TRY), gate, rank == 0, repeats
    )


def run_lone(case: Case, executor: str, repeats: int) -> list[dict]:
    """The one rank of a case whose peers are memory."""
    mine = inputs(case, 0, devices.current() if devices.is_cuda(executor) else torch.device("cpu"))
    scales = mine["scaling_factor"]
    scales = None if scales is None else pad_rows(scales)  # as the buffer pads them
    rank = LoneRank(
        1,
        case.num_ranks,
        case.num_experts,
        case.tokens,
        case.topk,
        hidden=case.hidden,
        scale_bytes=0 if scales is None else row_bytes(scales),
        executor=executor,
    )
    plan = rank.route(mine["topk_idx"], mine["topk_weights"])
    rows, *_ = rank.dispatch(plan, mine["hidden"], scales, case.num_sms)
    back = torch.randn(rows.shape[0], case.hidden, device=rank.device).bfloat16()
    verbs = {
        "dispatch": lambda: rank.dispatch(plan, mine["hidden"], scales, case.num_sms),
        "combine": lambda: rank.combine(plan, back, case.num_sms),
    }
    return [
        timed_verbs(
            verbs,
            rank.engine.traffic,
            rank.engine.reset_traffic,
            lambda: None,
            Gate(1, devices.is_cuda(executor)),
            True,
            repeats,
        )
    ]


def run_world(case: Case, executor: str, repeats: int) -> list[dict]:
    """All ranks of a case, each a thread, on a GPU with a stream."""
    world = VirtualWorld(1, case.num_ranks)
    buffers = world.buffers(
        case.hidden,
        max(case.tokens, 1),
        case.num_experts // case.num_ranks,
        executor=executor,
        timeout_s=SECONDS_PER_TRY,
    )
    meet = threading.Barrier(case.num_ranks)
    gate = Gate(case.num_ranks, devices.is_cuda(executor))

    def body(rank, _):
        return rank_program(case, rank, buffers[rank], meet, gate, repeats)

    try:
        return world.run(body)
    finally:
        for buffer in buffers:
            buffer.destroy()


def run_case(case: Case, executor: str, repeats: int) -> dict:
    results = (run_lone if case.lone else run_world)(case, executor, repeats)
    row = asdict(case)
    token_bytes = {
        "dispatch": case.hidden * (2 if case.dtype == "bf16" else 1)
        + (0 if case.dtype == "bf16" else case.hidden // 128 * 4),
        "combine": case.hidden * 2,
    }
    for verb, facts in results[0].items():
        microseconds = statistics.median(facts["times_us"])
        delivered = facts["rows"] * token_bytes[verb]
        row[verb] = {
            **facts,
            "median_us": microseconds,
            "delivered_bytes": delivered,
            "late": sum(result[verb]["late"] for result in results),
            "gb_per_s": delivered / microseconds / 1e3,
            "gb_per_s_per_sm": delivered / microseconds / 1e3 / case.num_sms,
        }
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", default="cuda", help="cuda, or host to try the script itself")
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--wide", action="store_true", help="also 32 virtual ranks")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="raw JSON")
    args = parser.parse_args()
    rows = []
    print(
        f"{'case':<10} {'dtype':<5} {'SMs':>4} {'own':>4} {'dispatch us':>12} {'GB/s/SM':>8} {'host us':>8} "
        f"{'combine us':>11} {'GB/s/SM':>8} {'host us':>8}"
    )
    for case in cases(args.quick, args.wide):
        title = f"{case.name:<10} {case.dtype:<5} {case.num_sms:>4} {case.permute_sms or '-':>4}"
        try:
            row = run_case(case, args.executor, args.repeats)
        except Exception as error:  # a case that fails is a result; the others still count
            row = {**asdict(case), "error": f"{type(error).__name__}: {error}"}
            print(f"{title} {row['error'][:100]}", flush=True)
        else:
            d, c = row["dispatch"], row["combine"]
            late = d["late"] + c["late"]
            print(
                f"{title} {d['median_us']:>12.1f} "
                f"{d['gb_per_s_per_sm']:>8.1f} {d['host_us']:>8.1f} {c['median_us']:>11.1f} "
                f"{c['gb_per_s_per_sm']:>8.1f} {c['host_us']:>8.1f}{f'  {late} late' if late else ''}",
                flush=True,
            )
        rows.append(row)
        if args.out:  # now: who is cut off leaves what there is
            device = torch.cuda.get_device_name() if devices.is_cuda(args.executor) else "host"
            args.out.write_text(
                json.dumps(
                    {"device": device, "torch": torch.__version__, "rows": rows, "executors": _core.executors()},
                    indent=1,
                )
                + "\n"
            )
    sys.exit(1 if any("error" in row for row in rows) else 0)


if __name__ == "__main__":
    main()
