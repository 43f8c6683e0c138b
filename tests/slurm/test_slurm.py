"""Recipes on a real Slurm: four nodes train, a lost node's job resumes with the same losses, a failing rank ends it."""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, why_not

ROOT = Path(__file__).parents[2]
SECONDS = 150

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm():
    if reason := why_not():
        pytest.skip(reason)
    # A short path of its own: munge refuses folders that others may write, sockets have short names.
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        try:
            cluster = Cluster(Path(folder))
        except (RuntimeError, AssertionError) as error:
            pytest.skip(f"Slurm is installed and does not start here: {error}")
        try:
            yield cluster
        finally:
            cluster.stop()


def submit(slurm, runs: Path, name: str, *flags: str) -> int:
    command = [
        sys.executable,
        "-m",
        "recipes.launch_command",
        "qwen3_30b_a3b_proxy",
        "--slurm",
        "--name",
        name,
        "--runs-dir",
        str(runs),
        "--set",
        "model.num_layers=1",
        "--set",
        "schedule.eval_every=1000",
        *flags,
    ]
    environment = {**slurm.environment, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"Submitted batch job (\d+)", done.stdout)[1])


def finish(slurm, number: int, runs: Path, name: str, seconds: int = SECONDS) -> tuple[str, str]:
    """(state, log) once the job has ended."""
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def over() -> bool:
        job = slurm.job(number)
        assert "held" not in job["Reason"].lower(), f"job {number} is held: {job['Reason']}"
        return job["JobState"] in ended

    with explained(slurm, number, log := runs / name / "logs" / f"{number}.log"):
        slurm.wait(over, seconds, f"end of job {number}")
    return slurm.job(number)["JobState"], log.read_text()


def until(slurm, number: int, runs: Path, name: str, ready, what: str) -> None:
    """Waits while the job runs; AssertionError with its log when it ends, or time does, before ready()."""

    def there() -> bool:
        state = slurm.job(number)["JobState"]
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), f"{state} and no {what}"
        return ready()

    with explained(slurm, number, runs / name / "logs" / f"{number}.log"):
        slurm.wait(there, SECONDS, what)


@contextmanager
def explained(slurm, number: int, log: Path):
    """An AssertionError within also says what the daemons and the job's log said last."""
    try:
        yield
    except AssertionError as error:
        lines = log.read_text().splitlines()[-30:] if log.exists() else ["no log"]
        raise AssertionError("\n".join([str(error), slurm.report(number), f"== {log}", *lines])) from None


def losses(runs: Path, name: str) -> dict[int, float]:
    lines = (runs / name / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["train_loss"] for r in map(json.loads, lines) if "train_loss" in r}


def last_step(runs: Path, name: str) -> int:
    path = runs / name / "metrics.jsonl"
    return max(losses(runs, name), default=0) if path.exists() else 0


def test_four_nodes_train_and_a_lost_node_resumes_with_the_same_losses(slurm, tmp_path):
    """The node is lost some steps after a checkpoint, so that the job makes those steps twice."""
    steps = ("--set", "schedule.train_steps=80", "--set", "logging.checkpoint_every=25")
    number = submit(slurm, tmp_path, "hit", "--nodes", "4", "--no-preflight", *steps)
    until(slurm, number, tmp_path, "hit", lambda: last_step(tmp_path, "hit") >= 28, "steps after a checkpoint")
    slurm.kill_node("n3")
    slurm.start_node("n3")
    slurm.wait(lambda: (job := slurm.job(number))["Restarts"] == "1" and job["JobState"] == "PENDING", 60, "requeue")
    saved = int((tmp_path / "hit" / "checkpoint" / "latest").read_text().strip().removeprefix("step_"))
    first = {step: loss for step, loss in losses(tmp_path, "hit").items() if step > saved}
    assert len(first) >= 2, "the node was lost right after a checkpoint: nothing is made twice"
    state, log = finish(slurm, number, tmp_path, "hit")
    assert state == "COMPLETED", f"{slurm.report(number)}\n{log}"
    assert "restart 1" in log and f"resuming after step {saved}" in log
    again = losses(tmp_path, "hit")
    assert sorted(again) == list(range(1, 81))
    assert {step: again[step] for step in first} == first


def test_two_tasks_a_node_and_sigterm_leaves_a_checkpoint(slurm, tmp_path):
    long = ("--set", "schedule.train_steps=5000", "--set", "logging.checkpoint_every=5000")
    number = submit(slurm, tmp_path, "pair", "--nodes", "4", "--tasks-per-node", "2", "--no-preflight", *long)
    until(slurm, number, tmp_path, "pair", lambda: last_step(tmp_path, "pair") > 2, "steps")
    slurm.do("scancel", "--signal=TERM", str(number))
    _, log = finish(slurm, number, tmp_path, "pair")
    step = int(re.search(r"stopped after step (\d+)", log)[1])
    folder = tmp_path / "pair" / "checkpoint" / f"step_{step:06d}"
    assert sorted(os.listdir(folder)) == [f"rank_{rank}.pt" for rank in range(8)]


def test_a_rank_that_dies_ends_the_job_at_once(slurm, tmp_path):
    """In the time that Slurm gives the others to go, long before any wait of theirs would end."""
    long = ("--set", "schedule.train_steps=5000", "--set", "logging.checkpoint_every=5000")
    number = submit(slurm, tmp_path, "dead", "--nodes", "2", "--no-preflight", *long)
    until(slurm, number, tmp_path, "dead", lambda: last_step(tmp_path, "dead") > 2, "steps")
    slurm.kill_rank(1)
    state, log = finish(slurm, number, tmp_path, "dead", seconds=60)
    assert state == "FAILED" and re.search(r"task 1: Killed", log)


def test_a_failing_rank_ends_the_job_with_its_timeout_report(slurm, tmp_path):
    bad = tmp_path / "bad"
    number = submit(slurm, tmp_path, "bad", "--nodes", "2", "--set", "data.source=/nowhere/at/all")
    state, log = finish(slurm, number, tmp_path, "bad")
    examined = re.findall(
        r"^\d: OK .* loopback .*2 nodes x 2", log, re.MULTILINE
    )  # what follows may be a line of its own
    assert len(examined) == 2, "each node is examined first"
    assert state == "FAILED" and "failed: ValueError" in log and "/nowhere/at/all" in log
    assert not (bad / "checkpoint").exists()


def test_gpus_are_granted_and_a_failing_pre_flight_starts_no_rank(slurm, tmp_path):
    """A GPU recipe's own script on nodes whose GPUs are counted by Slurm and not there: each node says so by name."""
    command = ["mixtral_8x7b", "--cluster", "b200_8x400g", "--slurm", "--no-submit", "--name", "gpus"]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.launch_command", *command, "--runs-dir", str(tmp_path)],
        cwd=ROOT,
        env={**slurm.environment, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    script = tmp_path / "gpus" / "job.sbatch"
    assert "#SBATCH --gpus-per-node=8\n" in script.read_text()
    with pytest.raises(RuntimeError, match="configuration is not available"):  # so that the 8 are really counted
        slurm.do("sbatch", "--gpus-per-node=9", str(script))
    number = int(slurm.do("sbatch", "--parsable", str(script)))
    state, log = finish(slurm, number, tmp_path, "gpus")
    assert state == "FAILED" and slurm.job(number)["TresPerNode"] == "gres:gpu:8", slurm.report(number)
    for node in range(2):
        assert re.search(rf"^{node}: FAIL \S+ +gpu +torch sees no GPU", log, re.MULTILINE), log
    assert "pre-flight: a node failed" in log
    assert [path.name for path in (tmp_path / "gpus" / "logs").iterdir() if "rank0" in path.name] == []
