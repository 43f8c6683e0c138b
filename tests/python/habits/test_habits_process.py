"""Habits that end in an error which names the remedy, and those that a process is born with: forks, signals, copies,
few descriptors, little shared memory, nonsense in the environment, interpreter flags."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_buffer import CHOICES, IDX, E, H, X, make, round_trip
from small_shm import with_small_shm
from world import ProcessWorld

from hybrid_ep import HybridEPBuffer, functional
from hybrid_ep.errors import BootstrapError, BufferFailedError
from hybrid_ep.runtime.bootstrap import PosixSegments
from hybrid_ep.testing import VirtualWorld

HERE = Path(__file__).parents[1]


# ---- fork
def in_child(work) -> str:
    """What work() says, or raises, in a forked child that then ends as a script does: with its destructors."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as end:
        said = end.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


def drop(buffer) -> str:
    """All that a child may do."""
    buffer.destroy()
    buffer._session.__del__()
    return "dropped"


def forks(ctx) -> list[str]:
    buffer = make(ctx.group(2))
    round_trip(buffer)
    calls = {
        "dispatch": lambda: round_trip(buffer),
        "traffic": buffer.traffic,
        "with": buffer.__enter__,
        "memory_report": buffer.memory_report,
        "drop": lambda: drop(buffer),
    }
    said = [in_child(call) for call in calls.values()]
    held = [line for line in in_child(lambda: Path("/proc/self/maps").read_text()).splitlines() if "hybrid_ep." in line]
    round_trip(buffer)
    buffer.destroy()
    return [*said, held]


def test_habits_fork_after_construction(world):
    for *refused, dropped, held in world.run(forks, ranks=range(2)):
        for text in refused:
            assert text.startswith("BufferFailedError") and "forked" in text and "spawn" in text, text
        assert dropped == "dropped" and held == []


class Rows(torch.utils.data.Dataset):
    def __init__(self, buffer):
        self.buffer = buffer  # as a trainer that is its own dataset has one

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return X[i]


def loads_data(ctx) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # as which a rank of these tests may have no workers
    with make(ctx.group(2)) as buffer:
        for _ in range(2):  # workers come and go, SIGCHLD and all, with the buffer in use
            loader = torch.utils.data.DataLoader(
                Rows(buffer), batch_size=4, num_workers=1, multiprocessing_context="fork"
            )
            for batch in loader:
                round_trip(buffer)
                assert torch.equal(batch, X)
        round_trip(buffer)


def test_habits_data_loader_with_forked_workers(world):
    world.run(loads_data, ranks=range(2))


# ---- exceptions from outside, in the middle of a call
class Stop(BaseException):
    """As SystemExit, which a handler of SIGTERM raises, but harmless to a test that fails."""


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TimeoutError, Stop])
def test_habits_a_signal_handler_that_raises(kind):
    buffer = VirtualWorld(1, 2).buffers(H, 8, 2, timeout_s=60)[0]  # nobody plays rank 1

    def handler(*_):
        raise kind("a worker (pid 7) was killed")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(kind, match="pid 7"):
            round_trip(buffer)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for call in (lambda: round_trip(buffer), buffer.traffic):
        with pytest.raises(BufferFailedError, match=f"{kind.__name__}: a worker .pid 7. was killed.*make a new"):
            call()


def test_habits_an_exception_before_anything_is_sent_leaves_the_buffer_usable():
    buffer = VirtualWorld(1, 1).buffers(H, 8, E, timeout_s=20)[0]

    class Interrupting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_, **__):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        buffer.dispatch_with_permute(hidden=X.as_subclass(Interrupting), topk_idx=IDX, num_of_experts=E)
    round_trip(buffer)


def test_habits_memory_that_runs_out_after_the_ranks_have_met():
    """The others go on with the dispatch; a buffer that called itself usable would be out of step."""
    buffer = VirtualWorld(1, 1).buffers(H, 8, E, timeout_s=20)[0]
    buffer._session.results.empty = lambda *_: (_ for _ in ()).throw(RuntimeError("DefaultCPUAllocator: no memory"))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        round_trip(buffer)
    with pytest.raises(BufferFailedError, match="DefaultCPUAllocator"):
        round_trip(buffer)


# ---- copies
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda b: torch.nn.Module.__setstate__ and copy.deepcopy({"layer": [b]})],
)
def test_habits_a_buffer_has_no_copies(copied):
    buffer = VirtualWorld(1, 1).buffers(H, 8, E, timeout_s=20)[0]
    with pytest.raises(TypeError, match="cannot be copied or pickled.*by reference.*construct a new one"):
        copied(buffer)
    round_trip(buffer)


def test_habits_copies_of_a_handle():
    """A deep copy works as the original does, so that state that is copied with activations may hold one."""
    buffer = VirtualWorld(1, 1).buffers(H, 8, E, timeout_s=20)[0]
    rows, *_, handle = functional.dispatch_with_permute(buffer, X, topk_idx=IDX, num_of_experts=E)
    for again in (copy.copy(handle), copy.deepcopy({"handle": handle})["handle"]):
        assert torch.equal(buffer.combine_with_unpermute(hidden=rows, handle=again)[0][:, 0], CHOICES)
    with pytest.raises(TypeError, match="handle cannot be pickled.*topk_idx or routing_map"):
        pickle.dumps(handle)


# ---- groups
def odd_groups(ctx) -> None:
    """On all six: a group that begins at rank 1 and has a gap, and one that overlaps it; calls interleaved."""
    groups = [dist.new_group([1, 2, 4, 5]), dist.new_group([0, 1, 3, 4])]
    buffers = [
        make(g, num_of_hybrid_ep_ranks_per_nvlink_domain=3)
        for g in groups  # of the six: two of each node
        if g is not dist.GroupMember.NON_GROUP_MEMBER
    ]
    for _ in range(2):
        for buffer in buffers:
            round_trip(buffer)
    for buffer in buffers:
        buffer.destroy()
    ctx.kept["odd"] = groups


def test_habits_groups_with_gaps_that_overlap(world):
    world.run(odd_groups)


def group_ends_first(ctx) -> list:
    """The buffer outlives its group: calls go on, and grow for as long as there is a store."""
    buffer = make(dist.group.WORLD)
    round_trip(buffer)
    dist.destroy_process_group()
    round_trip(buffer)
    round_trip(buffer, 64)  # must grow
    ctx.kept["buffer"] = buffer
    return []


def grow(ctx) -> None:
    round_trip(ctx.kept["buffer"], 640)


def drop_kept(ctx) -> None:
    ctx.kept.pop("buffer").destroy()


def test_habits_a_group_that_is_destroyed_before_its_buffer():
    with ProcessWorld(2) as world:
        world.run(group_ends_first)
        del world._store  # the process that hosts it ends
        for error in world.run(grow, return_errors=True):
            assert error["type"] == "BootstrapError" and "lost the store" in error["message"], error
            assert "must live as long" in error["message"]
        world.run(drop_kept)


# ---- little of something
def many_at_once(ctx) -> int:
    """32 buffers alive with 64 descriptors in all."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        buffers = [make(ctx.group(2)) for _ in range(32)]
        for buffer in buffers:
            round_trip(buffer)
            buffer.destroy()
        return len(os.listdir("/proc/self/fd"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_habits_64_descriptors(world):
    assert all(n < 64 for n in world.run(many_at_once, ranks=range(2)))


def test_habits_a_full_dev_shm():
    """Every rank is told, nothing stays, and what fits is made."""

    def work():
        world = VirtualWorld(1, 2)
        for group in world.groups:
            group.segments = PosixSegments
        errors = world.run(lambda rank, group: HybridEPBuffer(group, 4096, 4096, 2, timeout_s=30), return_errors=True)
        left = os.listdir("/dev/shm")
        world.run(lambda rank, group: round_trip(make(group)))
        return errors, left

    errors, left = with_small_shm(8, work)
    assert {type(e) for e in errors} <= {MemoryError, BootstrapError} and left == []
    assert all("does not fit into /dev/shm" in str(e) and "capacity_factor" in str(e) for e in errors), errors


def test_habits_more_memory_than_any_machine_has():
    """The argument that made it so large is named, and what fits is made."""
    world = VirtualWorld(1, 2)
    most = (1 << 31) - 1
    with pytest.raises(MemoryError, match=rf"is more memory than this machine gives.* latency_tokens={most} or"):
        world.buffers(1 << 16, 8, 2, timeout_s=30, latency_tokens=most)
    world.run(lambda rank, group: round_trip(make(group)))


# ---- what a process is born with
PROGRAM = HERE / "habit_program.py"


def program(*flags: str, **variables: str) -> str:
    """What it prints; nothing on stderr, in the middle or when the interpreter ends."""
    done = subprocess.run(
        [sys.executable, *flags, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0 and not done.stderr, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def test_habits_a_process_is_born_with():
    """No assertions and no docstrings, Python's development mode, warnings as errors, memory that malloc spoils."""
    from habit_program import digest

    said = program(
        "-OO",
        "-X",
        "dev",
        "-X",
        "utf8=0",
        "-W",
        "error::UserWarning",
        MALLOC_PERTURB_="165",
        MALLOC_CHECK_="3",
        TMPDIR="/nonexistent",
        LC_ALL="C",
        PYTHONHASHSEED="1",
        OMP_NUM_THREADS="3",
    )
    assert said.split() == [digest(), "atexit", "last"]
