"""The launcher: one failure ends the job and is shown once, signals stop it, nothing is left running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Ranks print their pid, then do what the test is about. No torch: these runs take fractions of a second.
PROGRAM = """
import os, signal, sys, time
from recipes import launch

def main(context):
    context.emit("pid", {"pid": os.getpid()})
    behave(context)

def behave(context):
    BEHAVIOUR

def on_event(rank, kind, fields):
    print(rank, kind, fields, flush=True)

try:
    number = launch.run_ranks(3, main, on_event, GRACE)
except launch.RankFailed as error:
    print("FAILED", error, "signal", error.signal, flush=True)
    sys.exit(1)
print("STOPPED BY", number and int(number), flush=True)
"""


def start(behaviour: str, grace: float = 5.0, own_group: bool = False) -> subprocess.Popen:
    program = PROGRAM.replace("BEHAVIOUR", behaviour.replace("\n", "\n    ")).replace("GRACE", str(grace))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=own_group,
    )


def finish(job: subprocess.Popen, head: str = "") -> tuple[int, str]:
    try:
        output = head + job.communicate(timeout=20)[0]
    finally:
        job.kill()
    assert_gone(pids_in(output))
    return job.returncode, output


def pids_in(output: str) -> list[int]:
    return [int(line.split("'pid':")[1].strip(" }")) for line in output.splitlines() if "'pid':" in line]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        time.sleep(0.02)
    assert not left, f"ranks {left} outlived the job"


def read_until_all_run(job: subprocess.Popen) -> str:
    head = ""
    while len(pids_in(head)) < 3:
        line = job.stdout.readline()
        assert line, f"the job ended early:\n{head}"
        head += line
    return head


def test_events_arrive_and_the_job_ends():
    code, output = finish(start("context.emit('done', {'rank': context.rank})"))
    assert code == 0 and "STOPPED BY None" in output
    assert all(f"{rank} done {{'rank': {rank}}}" in output for rank in range(3))


def test_a_failing_rank_ends_the_job_and_is_shown_once():
    began = time.monotonic()
    behaviour = "if context.rank == 1: raise RuntimeError('broken on purpose')\ntime.sleep(60)"
    code, output = finish(start(behaviour))
    assert code == 1 and time.monotonic() - began < 15
    assert "FAILED rank 1: RuntimeError: broken on purpose" in output
    assert output.count("Traceback") == 1 and "behave" in output


def test_the_first_of_several_errors_is_the_cause():
    behaviour = "time.sleep(0 if context.rank == 2 else 0.2)\nraise RuntimeError(f'error of rank {context.rank}')"
    code, output = finish(start(behaviour))
    assert code == 1 and "FAILED rank 2: RuntimeError: error of rank 2" in output
    assert "error of rank 0" not in output and output.count("Traceback") == 1


def test_a_killed_rank_is_named():
    behaviour = (
        "if context.rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(0.1)\nraise ConnectionError('peer is gone')"
    )
    code, output = finish(start(behaviour))
    assert code == 1 and "FAILED rank 0 was killed by SIGKILL" in output
    assert "peer is gone" not in output


def test_a_rank_that_leaves_silently_is_an_error():
    code, output = finish(start("if context.rank == 1: os._exit(7)\ntime.sleep(60)"))
    assert code == 1 and "exit codes {1: 7" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_ask_all_ranks_to_stop(number):
    job = start("while not context.stop_requested(): time.sleep(0.01)\ncontext.emit('left', {})")
    head = read_until_all_run(job)
    job.send_signal(number)
    code, output = finish(job, head)
    assert code == 0 and f"STOPPED BY {int(number)}" in output
    assert output.count(" left ") == 3


def test_ctrl_c_reaches_ranks_through_the_launcher_only():
    """A terminal signals the whole process group; ranks must not die of it."""
    behaviour = "while not context.stop_requested(): time.sleep(0.01)\ncontext.emit('left', {})"
    job = start(behaviour, own_group=True)
    head = read_until_all_run(job)
    os.killpg(job.pid, signal.SIGINT)
    code, output = finish(job, head)
    assert code == 0 and output.count(" left ") == 3 and "Traceback" not in output


def test_a_second_signal_ends_the_job_at_once():
    job = start("time.sleep(60)", grace=60)
    head = read_until_all_run(job)
    job.send_signal(signal.SIGINT)
    head += job.stdout.readline()
    job.send_signal(signal.SIGINT)
    code, output = finish(job, head)
    assert code == 1 and "ended at once by a second signal" in output


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_handed_on_as_well_asks_once(again):
    """As timeout(1) and make do: it comes to the group, and again from the parent."""
    job = start("while not context.stop_requested(): time.sleep(0.01)\ntime.sleep(0.5)\ncontext.emit('left', {})")
    head = read_until_all_run(job)
    job.send_signal(signal.SIGTERM)
    head += job.stdout.readline()
    job.send_signal(again)
    code, output = finish(job, head)
    assert code == 0 and output.count(" left ") == 3 and f"STOPPED BY {int(signal.SIGTERM)}" in output


def test_a_rank_that_does_not_stop_is_killed():
    job = start("while context.rank == 1 or not context.stop_requested(): time.sleep(0.01)", grace=0.5)
    head = read_until_all_run(job)
    job.send_signal(signal.SIGTERM)
    code, output = finish(job, head)
    assert code == 1 and "ranks [1] did not stop within 0.5 s" in output


def test_ranks_die_with_the_launcher():
    job = start("time.sleep(60)")
    head = read_until_all_run(job)
    job.kill()
    finish(job, head)
