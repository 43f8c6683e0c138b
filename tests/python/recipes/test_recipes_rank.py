"""`python -m recipes.rank`: how its processes leave."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from hybrid_ep.local_ranks import Ended, LocalRanks, variables
from recipes import rank
from recipes.launch_command import main
from recipes.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]


def _leaves(program: str, code: str, **how) -> subprocess.CompletedProcess:
    """A process that runs `program` and ends by rank._leave(code)."""
    command = [sys.executable, "-c", f"from recipes import rank\nimport sys\n{program}\nrank._leave({code})"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(command, text=True, timeout=60, cwd=ROOT, env=environment, **how)


def test_a_rank_leaves_with_all_that_was_said_and_begun(tmp_path):
    """Without the interpreter's end, but with threads that it would wait for, and what is called at exit."""
    program = f"""
import atexit, ctypes, pathlib, threading, time
class Last:
    def __del__(self): print("destructor")
last = Last()
def late():
    time.sleep(0.2)
    pathlib.Path({str(tmp_path / "file")!r}).write_text("x")
threading.Thread(target=late).start()
atexit.register(print, "at exit")
ctypes.CDLL(None).printf(b"of C, ")
print("here", end=", ")
"""
    done = _leaves(program, "143", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (143, "here, at exit\nof C, ", "")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("closing", ["sys.stdout = None", "sys.stdout.close()"])
def test_a_rank_without_stdout_leaves_as_asked(closing):
    assert _leaves(closing, "0", stdout=subprocess.DEVNULL).returncode == 0


def test_a_rank_whose_last_words_are_lost_says_so():
    with open("/dev/full", "w") as full:
        done = _leaves("print('last words')", "0", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == rank.EXIT_FAILED
    assert done.stderr == "what this rank printed last is lost: [Errno 28] No space left on device\n"


def test_a_rank_that_waits_for_the_text_ends_at_once_on_sigterm():
    """As torchrun ends the others when rank 0 has failed; it gives them 30 s."""
    program = """
from recipes import rank
class Store:
    check = staticmethod(lambda keys: print("waits", flush=True))
rank.RunFolder.open = staticmethod(lambda *_: None)
rank.run = lambda folder, asked: rank.await_key(Store, "k", 60)
rank.main(["runs/n"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ran:
        assert ran.stdout.readline() == "waits\n"
        ran.terminate()
        assert (ran.wait(10), ran.stderr.read()) == (rank.EXIT_STOPPED, "")


def test_what_rank_0_never_sets_is_told_of():
    with pytest.raises(TimeoutError, match="rank 0 has not set k within 0.1 s"):
        rank.await_key(types.SimpleNamespace(check=lambda keys: False), "k", 0.1)


def test_a_finished_run_waits_for_ranks_that_start_late(tmp_path, capfd):
    """Rank 0 serves the store, and has nothing to do but to say so."""
    sizes = ["--tasks-per-node=2", "--set=parallel.expert_parallel_size=2", "--set=parallel.ranks_per_node=2"]
    where = ["--name", "n", "--no-submit", "--runs-dir", str(tmp_path), "--set=runtime.timeout_s=20"]
    assert main(["tiny_cpu_smoke", *where, *sizes]) == 0
    (tmp_path / "n" / "checkpoint" / "step_000006").mkdir(parents=True)
    (tmp_path / "n" / "checkpoint" / "latest").write_text("step_000006\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def run(job):
        os.environ.update(variables(job.rank, 2, port))
        time.sleep(1.5 * job.rank)
        job.pipe.send(rank.run(RunFolder(tmp_path / "n"), []))

    ranks = LocalRanks(multiprocessing.get_context("fork"), 2, run)
    said = {0: [], 1: []}
    try:
        while ranks.open:
            for who, message in ranks.receive(60):
                said[who].append(message)
    finally:
        ranks.kill()
    assert said == {0: [0, Ended], 1: [0, Ended]}
    assert "its 6 steps are done" in capfd.readouterr().out
