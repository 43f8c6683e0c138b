"""`hybrid-ep launch` that is asked to end: steps are finished, nobody is left behind, nothing is printed at length."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _signals_are_not_ignored():
    """Nor by what a test starts: nohup, or a shell that runs something in the background, has children ignore some."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    ignored = [n for n in handlers if signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, handlers[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


STUB = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
stopped = []
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a rank that somebody else's handler serves
if sys.argv[2] != "early":  # which is still importing
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
(here / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
while not stopped or sys.argv[2] == "deaf":
    time.sleep(0.05)
(here / f"saved{os.environ['RANK']}").touch()
"""


def _megatron_like_run(tmp_path, how, torchrun=True, before=()):
    """A run of two stubs in Megatron's place, up to the moment when both are there: (launcher, their pids). torchrun:
    False has a shell in its place, which is there sooner."""
    (tmp_path / "stub.py").write_text(STUB)
    script = tmp_path / "job.sh"
    ranks = f"{tmp_path / 'stub.py'} {tmp_path} {how}"
    script.write_text(
        f"exec {sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {ranks}\n"
        if torchrun
        else f"for rank in 0 1; do RANK=$rank {sys.executable} {ranks} & done; wait\n"
    )
    program = (
        f"from pathlib import Path; from recipes import launch_run; code = launch_run.run_script(Path('{script}'))"
    )
    program = f"import sys\ntry:\n    {program}\nexcept KeyboardInterrupt:\n    code = 130\nsys.exit(code)"
    started = subprocess.Popen(
        [*before, sys.executable, "-c", program],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    files, deadline = [tmp_path / f"pid{r}" for r in range(2)], time.monotonic() + 120
    while not all(f.exists() and f.read_text() for f in files):
        assert started.poll() is None and time.monotonic() < deadline, started.communicate()[0]
        time.sleep(0.1)
    return started, [int(f.read_text()) for f in files]


@pytest.mark.parametrize(
    "number, torchrun, code", [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGHUP, False, 129)]
)
def test_signals_ask_megatron_s_ranks_as_megatron_is_asked(number, torchrun, code, tmp_path):
    started, _ = _megatron_like_run(tmp_path, "listens", torchrun)
    started.send_signal(number)
    said, _ = started.communicate(timeout=60)
    assert started.returncode == code and "Traceback" not in said and "stopping, after its step" in said
    assert number == signal.SIGINT or said.endswith(f"hybrid-ep launch: ended by {number.name}\n")
    assert all((tmp_path / f"saved{r}").exists() for r in range(2))


def test_a_signal_that_comes_twice_is_meant_once(tmp_path):
    """timeout(1) sends SIGTERM to the command and to its group, systemd SIGHUP behind it."""
    started, ranks = _megatron_like_run(tmp_path, "deaf", torchrun=False)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        started.send_signal(number)
        time.sleep(0.2)
    assert started.poll() is None and all(map(_runs, ranks))
    time.sleep(1)
    started.send_signal(signal.SIGTERM)
    said, _ = started.communicate(timeout=20)
    assert started.returncode == 143 and said.count("\n") == 3 and not any(map(_runs, ranks)), said


def test_what_nohup_ignores_stays_ignored(tmp_path):
    started, _ = _megatron_like_run(tmp_path, "listens", torchrun=False, before=("nohup",))
    started.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert started.poll() is None
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=20)
    assert started.returncode == 143


def test_a_second_ctrl_c_leaves_no_rank_of_megatron_s(tmp_path):
    started, ranks = _megatron_like_run(tmp_path, "deaf")
    started.send_signal(signal.SIGINT)
    time.sleep(1)
    assert started.poll() is None
    started.send_signal(signal.SIGINT)
    started.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while left := [pid for pid in ranks if _runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("number, torchrun, code", [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_signals_before_ranks_listen_end_all_at_once_and_quietly(number, torchrun, code, tmp_path):
    """A rank that a signal ends would make torchrun report a failure, with a traceback."""
    started, ranks = _megatron_like_run(tmp_path, "early", torchrun)
    started.send_signal(number)
    said, _ = started.communicate(timeout=60)
    assert started.returncode == code and "Traceback" not in said and "stopping, after its step" not in said
    assert not any(_runs(pid) for pid in ranks)


def _runs(pid: int) -> bool:
    """And is no zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_ctrl_c_lets_a_local_run_finish_its_step(tmp_path):
    """Of the launcher alone, as from a terminal: a checkpoint, no traceback of anybody, and nothing that runs on."""
    command = [sys.executable, "-m", "recipes.launch_command", "tiny_cpu_smoke", "--name", "n"]
    command += ["--runs-dir", str(tmp_path), "--set", "schedule.train_steps=4000", "--tasks-per-node=2"]
    command += ["--set", "parallel.expert_parallel_size=2", "--set", "parallel.ranks_per_node=2"]
    started = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    metrics, deadline = tmp_path / "n" / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert started.poll() is None and time.monotonic() < deadline, started.communicate()[0]
        time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=120)  # until the last who has its stdout is gone
    assert started.returncode == 130 and "Traceback" not in said and "stopped after step" in said
    assert not (tmp_path / "n" / "verdict.txt").exists()
    assert (tmp_path / "n" / "checkpoint" / "latest").exists()
