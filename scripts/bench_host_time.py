"""The host's own work in a call, in microseconds of CPU: what Python, the bindings and the core do around the launches.

    python scripts/bench_host_time.py [--ranks 8,72] [--calls 400] [--profile blocking]

Rank 0 of a group makes real calls; the other ranks are memory whose flags stand as if those had gone ahead and whose
count vectors say that they have no tokens. Nothing is waited for, and what a call spends in launches (a host executor's
launch is its kernel) is subtracted. Calls are made as on a GPU: the host looks at no choice of topk_idx.
--profile: cProfile of one kind of call on the largest group, to find the largest parts."""

import argparse
import contextlib
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from lone_rank import ahead, others_count, others_land  # noqa: E402

from hybrid_ep import _core  # noqa: E402  (the checkout first, installed or not)
from hybrid_ep.buffer import HybridEPBuffer  # noqa: E402
from hybrid_ep.runtime.bootstrap import Rendezvous  # noqa: E402
from hybrid_ep.testing import VirtualGroup  # noqa: E402

HIDDEN, TOKENS, TOPK, EXPERTS_PER_RANK = 64, 4, 4, 4


class Memories:
    """The segments of a group, of which one rank is there: whoever is attached to is made."""

    def __init__(self) -> None:
        self.own: _core.Segment | None = None
        self._made: list[_core.Segment] = []

    def create(self, name: str, num_bytes: int) -> _core.Segment:
        self.own = self.attach(name, num_bytes)
        return self.own

    def attach(self, name: str, num_bytes: int) -> _core.Segment:
        self._made.append(_core.Segment.private(num_bytes))
        return self._made[-1]

    def unlink(self, name: str) -> None:
        pass


class Group:
    """A buffer of rank 0 for calls of one kind, which the others make too."""

    rows: torch.Tensor | None = None
    handle: tuple | None = None

    def __init__(self, num_ranks: int, kind: str) -> None:
        memories = Memories()
        group = VirtualGroup(0, num_ranks, "host_time", dist.HashStore(), memories)
        # Whatever a rank is asked while the buffer is made, all of them would answer alike.
        with mock.patch.object(Rendezvous, "exchange", lambda meet, _, value, *__: [value] * meet.view.size):
            self.buffer = HybridEPBuffer(
                group,
                HIDDEN,
                TOKENS,
                EXPERTS_PER_RANK,
                executor="host",
                timeout_s=20,
                num_of_hybrid_ep_ranks_per_nvlink_domain=num_ranks,
            )
        self.session = self.buffer._session
        num_experts = num_ranks * EXPERTS_PER_RANK
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS_PER_RANK
        self.weights = torch.ones(TOKENS, TOPK)
        self.common = dict(hidden=self.x, topk_idx=self.idx, topk_weights=self.weights, num_of_experts=num_experts)
        ahead(self.session.shape, memories.own)
        others_land(self.session.shape, memories.own, 2 * HIDDEN, topk=TOPK)
        with contextlib.suppress(ValueError):  # the others' headers are empty
            CALLS["not_waiting" if kind == "not_waiting" else "blocking"](self)
        others_count(self.session.shape, memories.own)
        self.session.runs_beside = True
        if kind in ("cached", "combine"):
            self.rows, *_, self.handle = self.blocking()
            others_land(self.session.shape, memories.own, 2 * HIDDEN, topk=TOPK, weights=False)

    def blocking(self) -> tuple:
        return self.buffer.dispatch_with_permute(**self.common)

    def not_waiting(self) -> tuple:
        return self.buffer.dispatch_with_permute(**self.common, non_blocking=True, num_permuted_tokens=TOKENS * TOPK)

    def cached(self) -> tuple:
        return self.buffer.dispatch_with_permute(hidden=self.x, handle=self.handle)

    def combine(self) -> tuple:
        return self.buffer.combine_with_unpermute(hidden=self.rows, handle=self.handle)

    def host_us(self, call: Callable[[], tuple]) -> float:
        """Microseconds of a call without its launches."""
        engine, launched = self.session.engine, self.session.engine.launch_ns
        began = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - began - (engine.launch_ns - launched)) / 1e3


CALLS = {"blocking": Group.blocking, "not_waiting": Group.not_waiting, "cached": Group.cached, "combine": Group.combine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,72", help="group sizes, with commas between")
    parser.add_argument("--calls", type=int, default=400, help="of each kind")
    parser.add_argument("--profile", choices=CALLS, help="where the time of this kind of call goes")
    o = parser.parse_args()
    sizes = [int(size) for size in o.ranks.split(",")]
    if o.profile:
        group, profile = Group(sizes[-1], o.profile), cProfile.Profile()
        profile.enable()
        for _ in range(o.calls):
            CALLS[o.profile](group)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    print(f"{'ranks':>5}  {'call':<12}{'median us':>10}{'least us':>10}")
    for size in sizes:
        for name, call in CALLS.items():
            group = Group(size, name)
            for _ in range(20):
                call(group)
            spent = [group.host_us(lambda call=call, group=group: call(group)) for _ in range(o.calls)]
            print(f"{size:>5}  {name:<12}{statistics.median(spent):>10.1f}{min(spent):>10.1f}")


if __name__ == "__main__":
    main()
