"""The host's own work in a call of one rank of 72, counted and not timed: operations of torch, and calls that Python
makes. A call between the counts and the launch is time in which a GPU waits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from bench_host_time import CALLS, Group

from hybrid_ep import _core

RANKS = 72
# Of a call: operations of torch; Python's and C's functions called in all, and from the last launch before the rows',
# if there is one, until theirs. Calls have a twentieth of room, operations none: raise one for what the host must do.
CEILINGS = {
    "blocking": (1, 104, 36),
    "not_waiting": (4, 97, 25),
    "cached": (0, 108, 94),
    "combine": (1, 81, 73),
    "plan": (6, 62, 0),
    "clones": (6, 270, 0),
    "apart": (6, 383, 0),
}
# With a torch that has no table of C functions for the exchange of tensors.
OLDER_TORCH = {
    "blocking": (8, 212, 69),
    "not_waiting": (9, 189, 39),
    "cached": (3, 110, 96),
    "combine": (1, 81, 73),
    "plan": (6, 62, 0),
    "clones": (6, 270, 0),
    "apart": (6, 383, 0),
}


class Operations(TorchDispatchMode):
    """Counts the operations of torch that run inside it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls of functions while it is entered, anew from the end of every launch of this engine on."""

    def __init__(self, engine) -> None:
        self._engine, self._since, self.count, self.before_rows = engine, 0, 0, 0

    def __getattr__(self, name):
        value = getattr(self._engine, name)
        if name not in ("place", "dispatch", "combine"):
            return value

        def launch(*arguments):
            self.before_rows = self.count - self._since
            result = value(*arguments)
            self._since = self.count
            return result

        return launch

    def _see(self, _frame, event, _function) -> None:
        self.count += event in ("call", "c_call")

    def __enter__(self) -> Calls:
        self.count = self._since = 0
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_) -> None:
        sys.setprofile(None)


def work_of(kind: str, num_ranks: int = RANKS) -> tuple[int, int, int]:
    """As CEILINGS."""
    group = Group(num_ranks, kind)
    for _ in range(3):
        CALLS[kind](group)
    with Operations() as operations:
        CALLS[kind](group)
    calls = group.session.engine = Calls(group.session.engine)
    with calls:
        CALLS[kind](group)
    return operations.count, calls.count, calls.before_rows


def require(kind: str, ceilings: dict) -> None:
    work, most = work_of(kind), ceilings[kind]
    assert all(w <= m for w, m in zip(work, most, strict=True)), f"{kind}: {work} is more than {most}"


@pytest.mark.skipif(not _core.exchanges_tensors(), reason="torch has no __dlpack_c_exchange_api__")
@pytest.mark.parametrize("kind", CEILINGS)
def test_a_call_does_no_more_than_it_must(kind):
    require(kind, CEILINGS)


@pytest.mark.parametrize("kind", OLDER_TORCH)
def test_a_call_does_no_more_than_it_must_with_an_older_torch(kind):
    had = _core.exchanges_tensors()
    _core.exchange_tensors(False)
    try:
        require(kind, OLDER_TORCH)
    finally:
        _core.exchange_tensors(had)


@pytest.mark.parametrize("kind", CEILINGS)
def test_a_rank_of_many_does_what_a_rank_of_few_does(kind):
    assert work_of(kind, 8) == work_of(kind, 72)
