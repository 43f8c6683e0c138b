"""Ranks as processes: messages, ends, and that nothing outlives its parent."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from hybrid_ep.local_ranks import Ended, LocalRanks, variables
from hybrid_ep.testing import VirtualWorld


def started(main, num_ranks=2, duplex=False):
    return LocalRanks(multiprocessing.get_context("fork"), num_ranks, main, duplex=duplex)


def received(ranks, timeout_s=20.0):
    """{rank: its messages} until all have ended."""
    said = {rank: [] for rank in ranks.open}
    while ranks.open:
        news = ranks.receive(timeout_s)
        assert news, f"nothing came from {ranks.open}"
        for rank, message in news:
            said[rank].append(message)
    return said


def test_every_message_comes_and_then_the_end():
    def main(job):
        for i in range(3):
            job.pipe.send((job.rank, job.num_ranks, i, job.port))

    ranks = started(main, 3)
    said = received(ranks)
    ranks.kill()
    ports = {messages[0][3] for messages in said.values()}
    assert len(ports) == 1
    port = ports.pop()
    assert said == {rank: [(rank, 3, i, port) for i in range(3)] + [Ended] for rank in range(3)}


def test_nothing_comes_within_the_time():
    ranks = started(lambda job: time.sleep(60))
    before = time.monotonic()
    assert ranks.receive(0.1) == [] and ranks.alive() == [0, 1]
    ranks.kill()
    assert ranks.alive() == [] and time.monotonic() - before < 20
    assert [process.exitcode for process in ranks.processes] == [-signal.SIGKILL] * 2
    ranks.kill()  # again: nothing to do


def test_a_rank_is_at_its_end_though_a_child_of_its_holds_the_pipe():
    def main(job):
        if job.rank == 0:
            child = os.fork()
            if child == 0:
                time.sleep(60)
            job.pipe.send(child)
            os._exit(0)
        job.pipe.recv()

    ranks = started(main, duplex=True)
    (rank, child), *_ = ranks.receive(20)
    try:
        assert rank == 0 and ranks.receive(20) == [(0, Ended)] and ranks.open == {1}
        ranks.pipes[1].send("go")
        assert ranks.receive(20) == [(1, Ended)]
    finally:
        os.kill(child, signal.SIGKILL)
        ranks.kill()


def test_ranks_meet_at_a_port_of_their_own():
    def main(job):
        store = job.store(30)
        store.set(f"{job.rank}", f"rank {job.rank}")
        job.pipe.send(store.get(f"{1 - job.rank}").decode())
        store.wait(["0", "1"])
        if job.rank == 0:  # who serves leaves last
            store.get("left")
        else:
            store.set("left", "")

    ranks = started(main)
    said = received(ranks)
    ranks.kill()
    assert said == {0: ["rank 1", Ended], 1: ["rank 0", Ended]}


PARENT = """
import multiprocessing, os, signal, time
from hybrid_ep.local_ranks import LocalRanks

def main(job):
    job.pipe.send(os.getpid())
    time.sleep(60)

ranks = LocalRanks(multiprocessing.get_context("fork"), 2, main)
pids = []
while len(pids) < 2:
    pids += [message for _, message in ranks.receive(20)]
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_die_with_their_parent():
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    left = [int(pid) for pid in done.stdout.split()]
    assert len(left) == 2
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid)]
        time.sleep(0.01)
    assert left == []


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # gone
        return True


@pytest.mark.parametrize("rank, num_ranks", [(0, 1), (3, 4)])
def test_the_variables_of_torchrun(rank, num_ranks):
    assert variables(rank, num_ranks, 1234) == {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }


RANK = """
import atexit, sys
from pathlib import Path
from hybrid_ep.cli import main

def threads():
    print("threads", *[comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")], flush=True)

atexit.register(threads)  # the last to be called: the others are registered later
sys.exit(main(sys.argv[1:]))
"""
FAILS = RANK.replace("sys.exit(", "from hybrid_ep.cli.bench.world import World\nWorld.gather = None\nsys.exit(")
BENCH = "bench --ranks 1 --tokens 8 --hidden 64 --experts 4 --topk 2 -n 1 -w 1 --impl hybrid_ep"


def _ended(program: str, peer: str = "") -> tuple[int, str, str]:
    """Exit code and stderr of a bench of one rank, and its threads when the interpreter ends."""
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | variables(0, 1, 0)
    environment["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program, *(BENCH + peer).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("threads ")
    return done.returncode, done.stderr, last


@pytest.mark.parametrize("peer", ["", ",megatron-alltoall"])
def test_a_rank_has_no_thread_of_a_process_group_when_the_interpreter_ends(peer):
    """Which may hold a tensor, and would abort the process when it drops it then."""
    if peer and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    code, errors, threads = _ended(RANK, peer)
    assert code == 0, errors
    assert "gloo" not in threads and "tcpstore" not in threads


def test_nor_has_one_that_ends_in_an_exception():
    """Which the interpreter keeps, with the frames it came through."""
    code, errors, threads = _ended(FAILS)
    assert code == 3 and "'NoneType' object is not callable" in errors
    assert "gloo" not in threads and "tcpstore" not in threads


def test_a_dropped_buffer_lets_go_of_its_group_without_the_garbage_collector():
    (buffer,) = VirtualWorld(1, 1).buffers(64, 8, 2, timeout_s=20)
    session, view = weakref.ref(buffer._session), weakref.ref(buffer._session.meet.view)
    gc.disable()
    try:
        del buffer
        assert session() is None and view() is None
    finally:
        gc.enable()
