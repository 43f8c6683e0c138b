"""Habits that end in an error which names the remedy, and those that a process is born with: forks, signals, copies,
few descriptors, little shared memory, nonsense in the environment, interpreter flags."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from world import ProcessWorld, error_of

from hybrid_ep import HybridEPBuffer, devices, env, functional
from hybrid_ep.bootstrap import PosixSegments
from hybrid_ep.errors import BootstrapError, BufferFailedError
from hybrid_ep.testing import VirtualWorld

HERE = Path(__file__).parent
H, E = 64, 4
X, IDX = torch.ones(4, H), torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0]])
CHOICES = torch.tensor([2.0, 2.0, 1.0, 2.0])


def round_trip(buffer, num_tokens: int = 4) -> None:
    """What every test below ends with: the buffer does what it should."""
    idx = IDX.repeat(num_tokens // 4, 1)
    rows, *_, handle = buffer.dispatch_with_permute(hidden=X.repeat(num_tokens // 4, 1), topk_idx=idx, num_of_experts=E)
    out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
    assert torch.equal(out[:, 0], CHOICES.repeat(num_tokens // 4))


def make(group, **options) -> HybridEPBuffer:
    return HybridEPBuffer(group, H, 8, E // group.size(), timeout_s=50, **options)


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
    buffer.__del__()
    return "dropped"


def forks(ctx) -> list[str]:
    buffer = make(ctx.group(2))
    round_trip(buffer)
    calls = {"dispatch": lambda: round_trip(buffer), "traffic": buffer.traffic, "with": buffer.__enter__,
             "memory_report": buffer.memory_report, "drop": lambda: drop(buffer)}
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
            loader = torch.utils.data.DataLoader(Rows(buffer), batch_size=4, num_workers=1,
                                                 multiprocessing_context="fork")
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
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps,
                                    lambda b: torch.nn.Module.__setstate__ and copy.deepcopy({"layer": [b]})])
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
    buffers = [make(g, num_of_hybrid_ep_ranks_per_nvlink_domain=3) for g in groups  # of the six: two of each node
               if g is not dist.GroupMember.NON_GROUP_MEMBER]
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


def with_small_shm(mebibytes: int, work):
    """work() in a thread of its own with a private /dev/shm of that size; skips where one may not be mounted."""
    answer: list = []

    def body() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000):  # CLONE_NEWNS: of this thread, and of those it starts
            answer.append(pytest.skip.Exception(f"no mount namespace here: {os.strerror(ctypes.get_errno())}"))
            return
        for command in (["mount", "--make-rprivate", "/"],
                        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", "/dev/shm"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                answer.append(pytest.skip.Exception(f"{' '.join(command)}: {done.stderr.strip()}"))
                return
        try:
            answer.append(work())
        except BaseException as error:
            answer.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return answer[0]


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


# ---- the environment
NONSENSE = {
    "HYBRID_EP_RANKS_PER_NODE": ["0", "-1", "two", "1e3", "99999999999999999999"],
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": ["0", "NaN"],
    "HYBRID_EP_TIMEOUT_S": ["0", "-1", "nan", "inf", "1e300", "soon"],
    "HYBRID_EP_EXECUTOR": ["abacus", "host,cuda"],
    "HYBRID_EP_NUM_BLOCKS": ["0", "100000", "4.5"],
    "HYBRID_EP_TUNING": ["/nonexistent/tuning.json", "/dev/null", "/"],
    "HYBRID_EP_RESULT_CACHE_MIB": ["-1", "99999999999999999999", "1 GiB"],
    "HYBRID_EP_SEED": ["-5", "1.5", "99999999999999999999"],
}


def test_habits_every_variable_of_a_buffer_has_nonsense():
    assert set(NONSENSE) == {name for name in env.TABLE if not name.startswith("EXPERT_")}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in NONSENSE.items() for value in values])
def test_habits_nonsense_in_the_environment(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    world = VirtualWorld(1, 1)
    with pytest.raises(ValueError) as error:
        world.run(lambda rank, group: HybridEPBuffer(group, H, 8, E, timeout_s=5))
    assert name in str(error.value) and value in str(error.value), error.value
    monkeypatch.delenv(name)
    world.run(lambda rank, group: round_trip(make(group)))


@pytest.mark.parametrize("library", [None, {"devices": [], "why_none": "the driver is too old"}])
def test_habits_an_executor_in_the_environment_that_this_machine_lacks(monkeypatch, library):
    """The remedy names the variable whether the library is missing or finds no device."""

    def load():
        if library is None:
            raise RuntimeError("the library was not built")
        return library

    monkeypatch.setattr(devices, "load", load)
    monkeypatch.setenv("HYBRID_EP_EXECUTOR", "cuda")
    world = VirtualWorld(1, 1)
    with pytest.raises(ValueError, match="(not built|too old).*HYBRID_EP_EXECUTOR asks for it"):
        world.run(lambda rank, group: HybridEPBuffer(group, H, 8, E, timeout_s=5))
    monkeypatch.delenv("HYBRID_EP_EXECUTOR")
    world.run(lambda rank, group: round_trip(make(group)))


@pytest.mark.parametrize("argument", ["num_sms_dispatch_api", "num_blocks_unpermute"])
def test_habits_more_blocks_than_any_device_has(argument):
    world = VirtualWorld(1, 1)
    with pytest.raises(ValueError, match=f"{argument}=100000 must be an integer from 1 to 1024"):
        world.run(lambda rank, group: make(group, **{argument: 100000}))
    with pytest.raises(ValueError, match="num_sms=100000 must be an integer from 1 to 1024"):
        world.run(lambda rank, group: make(group).dispatch(X, topk_idx=IDX, num_sms=100000))
    world.run(lambda rank, group: round_trip(make(group, **{argument: 1024})))


def other_environment(ctx, name: str, values: list[str]) -> dict | str:
    os.environ[name] = values[ctx.rank]
    try:
        with HybridEPBuffer(ctx.group(2), H, 8, 2) as buffer:
            round_trip(buffer)
        return "right"
    except ValueError as error:
        return error_of(error)
    finally:
        del os.environ[name]


@pytest.mark.parametrize("name, values", [("HYBRID_EP_TIMEOUT_S", ["40", "50"]), ("HYBRID_EP_SEED", ["1", "2"]),
                                          ("HYBRID_EP_RESULT_CACHE_MIB", ["0", "7"])])
def test_habits_ranks_whose_environments_may_differ(world, name, values):
    assert world.run(other_environment, name, values, ranks=range(2)) == ["right"] * 2


@pytest.mark.parametrize("name, values, said", [
    ("HYBRID_EP_NUM_BLOCKS", ["1", "2"], "num_sms_dispatch_api"),
    ("HYBRID_EP_RANKS_PER_NODE", ["1", "2"], "num_of_hybrid_ep_ranks_per_nvlink_domain"),
    ("HYBRID_EP_EXECUTOR", ["host", "host_checked"], "executor")])
def test_habits_ranks_whose_environments_must_agree(world, name, values, said):
    first, second = world.run(other_environment, name, values, ranks=range(2))
    assert first["type"] == second["type"] == "ValueError" and first["message"] == second["message"]
    assert said in first["message"] and "must be the same on every rank" in first["message"]


def nonsense_here(ctx, name: str, value: str, which: list[int]) -> list:
    """Two attempts of which the first fails on some ranks, on one group; then buffers of that group still meet."""
    group = ctx.group(2)
    errors = []
    for _ in range(2):
        if ctx.rank in which:
            os.environ[name] = value
        try:
            HybridEPBuffer(group, H, 8, 2, timeout_s=200)
        except ValueError as error:
            errors.append(str(error))
        finally:
            os.environ.pop(name, None)
    with HybridEPBuffer(group, H, 8, 2) as buffer:
        round_trip(buffer)
    return errors


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
def test_habits_nonsense_on_some_ranks(world, which):
    """Nobody waits for the ranks that refused, who say why, and later buffers of the same group meet as before."""
    answers = world.run(nonsense_here, "HYBRID_EP_NUM_BLOCKS", "4.5", which, ranks=range(2))
    for rank, errors in enumerate(answers):
        assert len(errors) == 2 and all("HYBRID_EP_NUM_BLOCKS='4.5'" in e for e in errors)
        assert all(("refused the arguments" in e) == (rank not in which) for e in errors)


# ---- what a process is born with
PROGRAM = HERE / "habit_program.py"


def program(*flags: str, **variables: str) -> str:
    """What it prints; nothing on stderr, in the middle or when the interpreter ends."""
    done = subprocess.run([sys.executable, *flags, str(PROGRAM)], capture_output=True, text=True, timeout=240,
                          env={**os.environ, **variables})
    assert done.returncode == 0 and not done.stderr, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def test_habits_a_process_is_born_with():
    """No assertions and no docstrings, Python's development mode, warnings as errors, memory that malloc spoils."""
    from habit_program import digest

    said = program("-OO", "-X", "dev", "-X", "utf8=0", "-W", "error::UserWarning", MALLOC_PERTURB_="165",
                   MALLOC_CHECK_="3", TMPDIR="/nonexistent", LC_ALL="C", PYTHONHASHSEED="1", OMP_NUM_THREADS="3")
    assert said.split() == [digest(), "atexit", "last"]
