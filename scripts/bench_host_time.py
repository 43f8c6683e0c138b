"""The host's own work in a call, in microseconds of the calling thread's CPU: Python, the bindings and the core.

    python scripts/bench_host_time.py [--ranks 8,72] [--experts 4] [--calls 2000] [--out FILE.json] [--profile blocking]

Rank 0 of a group makes real calls on an engine that launches nothing (_core.Engine.unlaunched): it answers at once,
with the counts that come of every rank having this one's routing, so nothing is waited for and nothing is subtracted.
Calls are made as on a GPU: the host looks at no choice of topk_idx. What a driver takes for a launch is not in it.
Of calls with clones, `clones` gives matrices in stacks, `apart` expert by expert.
--out: the samples too, each the mean of 50 calls. --profile: cProfile of one kind of call on the largest group."""

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from hybrid_ep import _core  # noqa: E402  (the checkout first, installed or not)
from hybrid_ep.balance import MicrobatchOptions  # noqa: E402
from hybrid_ep.buffer import HybridEPBuffer  # noqa: E402
from hybrid_ep.clones import ClonedRouting  # noqa: E402
from hybrid_ep.runtime.bootstrap import Rendezvous  # noqa: E402
from hybrid_ep.spares import SpareSlots  # noqa: E402
from hybrid_ep.testing import VirtualGroup  # noqa: E402

HIDDEN, TOKENS, TOPK = 64, 4, 4  # the host's work does not depend on them
EXPERTS_PER_RANK = 4  # unless told otherwise; it counts where their matrices are given one by one
BUDGET = 128  # permuted rows of a call that does not wait
MATRICES = [(16, 16), (16, 8)]  # of an expert, in which clones travel
WARM_UP, SAMPLE = 50, 50  # calls before the first sample, and in each


class Memories:
    """The segments of a group of which one rank is there, and nobody writes: all are one piece of memory."""

    def __init__(self) -> None:
        self._made: dict[int, _core.Segment] = {}

    def create(self, name: str, num_bytes: int) -> _core.Segment:
        return self._made.setdefault(num_bytes, _core.Segment.private(num_bytes))

    attach = create

    def unlink(self, name: str) -> None:
        pass


def unlaunched(rank: int, shape: _core.BufferShape, segments: list[_core.Segment], timeout_s: float, *_: Any) -> Any:
    """In place of _core.Engine, while a buffer is made."""
    return ENGINE.unlaunched(rank, shape, segments, timeout_s)


ENGINE = _core.Engine


def alike(meet: Rendezvous, _: str, value: Any, *__: Any) -> list[Any]:
    """In place of Rendezvous.exchange: whatever a rank is asked while a buffer is made, all would answer as this one
    does, but for who they are."""
    ranks = range(meet.view.size)
    if isinstance(value, dict) and "world_rank" in value:
        return [{**value, "world_rank": rank} for rank in ranks]
    return [value for _ in ranks]


def lone_buffer(rank: int, num_ranks: int, num_local_ranks: int, *sizes: int, **options: Any) -> HybridEPBuffer:
    """The buffer of a rank whose group has nobody else, on an engine that launches nothing. It has grown to what calls
    need that wait for nothing, and cannot grow any more."""
    group = VirtualGroup(rank, num_ranks, "host_time", dist.HashStore(), Memories())
    options |= {"num_of_hybrid_ep_ranks_per_nvlink_domain": num_local_ranks, "executor": "host"}
    with mock.patch.object(Rendezvous, "exchange", alike), mock.patch.object(_core, "Engine", unlaunched):
        buffer = HybridEPBuffer(group, *sizes, **options)
        buffer._session.fit(recv_rows=buffer._session.recv_capacity(buffer._session.shape.max_tokens))
        return buffer


class Unpushed:
    """An engine without launches of spare slots, which the one that launches nothing does not have. The bindings' and
    the core's part of these is not counted."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def push_weights(self, *_: Any) -> None:
        pass

    await_weights = collect_gradients = push_weights


def lone_slots(rank: int, num_ranks: int, num_owners: int) -> SpareSlots:
    """Spare slots of such a rank, one of each."""
    group = VirtualGroup(rank, num_ranks, "host_time_slots", dist.HashStore(), Memories())
    with mock.patch.object(Rendezvous, "exchange", alike), mock.patch.object(_core, "Engine", unlaunched):
        slots = SpareSlots(
            group,
            spare_slots=1,
            num_owners=num_owners,
            shapes=MATRICES,
            dtype=torch.bfloat16,
            num_of_hybrid_ep_ranks_per_nvlink_domain=num_ranks,
            executor="host",
        )
    session = slots._session
    session.engine, session.runs_beside = Unpushed(session.engine), True
    return slots


class Group:
    """A buffer of rank 0 for calls of one kind, which the others make too."""

    rows: torch.Tensor | None = None
    handle: tuple | None = None

    def __init__(self, num_ranks: int, kind: str, experts: int = EXPERTS_PER_RANK) -> None:
        clones = {"clones": MicrobatchOptions(spare_slots=1)} if kind in ("plan", "clones", "apart") else {}
        slots = experts + bool(clones)
        self.buffer = lone_buffer(0, num_ranks, num_ranks, HIDDEN, TOKENS, slots, arena_mib=1, **clones)
        self.session = self.buffer._session
        self.session.runs_beside = True
        num_experts = num_ranks * experts
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
        # A pair for every rank in turn, the first for this one.
        self.idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) * experts % num_experts
        self.weights = torch.ones(TOKENS, TOPK)
        self.common = dict(hidden=self.x, topk_idx=self.idx, topk_weights=self.weights, num_of_experts=num_experts)
        if kind in ("clones", "apart"):
            self.slots = lone_slots(0, num_ranks, experts)
            self.experts = [torch.zeros(experts, *m, dtype=torch.bfloat16) for m in MATRICES]
            self.sums = [torch.zeros(experts, *m, dtype=torch.float32) for m in MATRICES]
        if kind == "apart":  # expert by expert
            self.experts, self.sums = (list(zip(*stacks, strict=True)) for stacks in (self.experts, self.sums))
        if kind in ("cached", "combine"):
            self.rows, *_, self.handle = self.blocking()

    def blocking(self) -> tuple:
        return self.buffer.dispatch_with_permute(**self.common)

    def not_waiting(self) -> tuple:
        return self.buffer.dispatch_with_permute(**self.common, non_blocking=True, num_permuted_tokens=BUDGET)

    def cached(self) -> tuple:
        return self.buffer.dispatch_with_permute(hidden=self.x, handle=self.handle)

    def combine(self) -> tuple:
        return self.buffer.combine_with_unpermute(hidden=self.rows, handle=self.handle)

    def plan(self) -> ClonedRouting:
        return self.buffer.plan_clones(topk_idx=self.idx)

    def clones(self) -> None:
        """What exact balancing asks of the library for a layer, forward and backward, beside dispatch and combine."""
        plan = self.plan().plan
        for _ in range(2):  # the backward sends for the weights again, unless the slots hold them still
            self.slots.push(plan, self.experts)
            self.slots.wait()
        self.slots.start_collect(plan, self.sums)
        self.slots.wait_collect()


CALLS = {
    "blocking": Group.blocking,
    "not_waiting": Group.not_waiting,
    "cached": Group.cached,
    "combine": Group.combine,
    "plan": Group.plan,
    "clones": Group.clones,
    "apart": Group.clones,
}


def samples_us(num_ranks: int, kind: str, num_calls: int, experts: int) -> list[float]:
    """CPU time of the thread in a call: means of SAMPLE calls, for the clock itself takes a good part of one."""
    group, call, samples = Group(num_ranks, kind, experts), CALLS[kind], []
    for _ in range(WARM_UP):
        call(group)
    for _ in range(max(1, num_calls // SAMPLE)):
        began = time.thread_time_ns()
        for _ in range(SAMPLE):
            call(group)
        samples.append((time.thread_time_ns() - began) / SAMPLE / 1e3)
    return samples


def about() -> dict[str, Any]:
    """Where and of what the figures are."""

    def said(*command: str) -> str:
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout.strip()

    cpu = next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), "unknown")
    return {
        "commit": said("git", "rev-parse", "HEAD"),
        "changed": bool(said("git", "status", "--porcelain", "--untracked-files=no")),
        "cpu": cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "calls_in_a_sample": SAMPLE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,72", help="group sizes, with commas between")
    parser.add_argument("--experts", type=int, default=EXPERTS_PER_RANK, help="of a rank")
    parser.add_argument("--calls", type=int, default=2000, help="of each kind")
    parser.add_argument("--out", type=Path, help="write the samples here, as JSON")
    parser.add_argument("--profile", choices=CALLS, help="where the time of this kind of call goes")
    o = parser.parse_args()
    sizes = [int(size) for size in o.ranks.split(",")]
    if o.profile:
        group, profile = Group(sizes[-1], o.profile, o.experts), cProfile.Profile()
        profile.enable()
        for _ in range(o.calls):
            CALLS[o.profile](group)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    rows = []
    print(f"# thread CPU time of a call\n{'ranks':>5}  {'call':<12}{'median us':>10}{'least us':>10}")
    for size in sizes:
        for kind in CALLS:
            samples = samples_us(size, kind, o.calls, o.experts)
            row = {"ranks": size, "call": kind, "median_us": statistics.median(samples), "least_us": min(samples)}
            print(f"{size:>5}  {kind:<12}{row['median_us']:>10.1f}{row['least_us']:>10.1f}")
            rows.append({**row, "samples_us": [round(x, 2) for x in samples]})
    if o.out:
        o.out.write_text(
            json.dumps(
                {"schema": "hybrid_ep.host_time/1", **about(), "experts_per_rank": o.experts, "rows": rows}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
