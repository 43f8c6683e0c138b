"""The core touches no byte outside the tensors it is given: each ends where a page that nobody may touch begins, so
that reading or writing one byte more ends the process. In a process of its own; planted, the fault is seen."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boundary import TENSORS, all_verbs, changed, tensors_of, views, watched_run, with_tensors

from hybrid_ep.runtime import plan_maps

PAGE = mmap.PAGESIZE


class Guarded:
    """Memory of num_bytes that ends at a forbidden page."""

    def __init__(self, num_bytes: int) -> None:
        pages = -(-num_bytes // PAGE)
        self._map = mmap.mmap(-1, (pages + 1) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(start + pages * PAGE), PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.address = start + pages * PAGE - num_bytes


class AtTheEdge:
    """Calls with every tensor moved to guarded memory and, once the call is over, back. cut: (verb, argument) to which
    16 bytes fewer are given than is said, the planted fault."""

    def __init__(self, cut: tuple[str, str] | None = None) -> None:
        self._cut, self._kept = cut, []
        self.plans: dict[int, Guarded] = {}  # by where Python has a plan's memory

    def __call__(self, verb, call, arguments):
        moved, owners = {}, []
        for name, v in views(arguments).items():
            if not v.num_bytes:
                continue
            missing = 16 if (verb, name) == self._cut else 0
            there = Guarded(v.num_bytes - missing)
            ctypes.memmove(there.address, v.address, v.num_bytes - missing)
            moved[name] = changed(v, address=there.address, tensor=there)
            owners.append((v, there, v.num_bytes - missing))
            self._kept.append(there)  # a plan's memory is read by later calls
            if name == "memory":
                self.plans[v.address] = there
        self.owners = owners
        return arguments | moved

    def after(self):
        for v, there, num_bytes in self.owners:
            ctypes.memmove(v.address, there.address, num_bytes)


def main(nodes: int, locals_: int, place: bool, cut: tuple[str, str] | None) -> None:
    plans, view = {}, plan_maps.view

    def view_of_plans(name, x):
        v = view(name, x)
        there = plans.get(v.address) if name == "memory" else None
        return v if there is None else changed(v, address=there.address, tensor=there)

    plan_maps.view = view_of_plans

    def of_rank(buffer, mine):
        edge = AtTheEdge(cut)
        edge.plans = plans

        class Engine:
            """Moves tensors there before a call of the real engine, and results back behind it."""

            def __init__(self, real):
                self.real = real

            def __getattr__(self, name):
                real = getattr(self.real, name)
                if name not in TENSORS:
                    return real

                def at_the_edge(*plan_and_request):
                    *plan, request = plan_and_request
                    result = real(*plan, with_tensors(request, edge(name, real, tensors_of(name, request))))
                    edge.after()
                    return result

                return at_the_edge

        session, opened = buffer._session, buffer._session._open
        session.engine = Engine(session.engine)

        def reopen(wanted):
            opened(wanted)
            session.engine = Engine(session.engine)

        session._open = reopen
        return all_verbs(buffer, mine, place)

    got = watched_run(nodes, locals_, lambda *a: a[2], of_rank)
    plan_maps.view = view  # what lies at those addresses from now on is something else
    want = watched_run(nodes, locals_, lambda *a: a[2], lambda b, mine: all_verbs(b, mine, place))
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parent,
    )


def test_no_byte_outside_a_tensor_is_touched():
    result = run(2, 2)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("argument", ["x", "out_x"])
def test_a_byte_outside_would_be_seen(argument):
    assert run(1, 1, "dispatch", argument).returncode == -signal.SIGSEGV


if __name__ == "__main__":
    for by_kernel in (False, True):
        main(*map(int, sys.argv[1:3]), place=by_kernel, cut=tuple(sys.argv[3:5]) or None)
