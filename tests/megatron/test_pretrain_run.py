"""`recipes.pretrain` from end to end on four ranks: it learns, resumes bit for bit, and stops cleanly.

Importing Megatron takes far longer than these runs, so one process makes most of them, one after the other.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

# Prints one line "EXIT <run> <code>" a run.
PROGRAM = """
import sys
from recipes.pretrain import main
for line in sys.argv[1:]:
    name, arguments = line.split(":", 1)
    print("BEGIN", name, flush=True)
    print("EXIT", name, main(arguments.split()), flush=True)
"""


def have_core() -> bool:
    return find_spec("hybrid_ep") is not None and find_spec("hybrid_ep._core") is not None


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def launch(runs_dir: Path, *runs: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, *(f"{run} --runs-dir {runs_dir}" for run in runs)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# What a step computes, as opposed to how long it took.
RESULTS = ("step", "train_loss", "grad_norm", "lr", "tokens", "held_out_loss", "expert_load")


def results(folder: Path) -> list[dict]:
    return [{name: line[name] for name in RESULTS if name in line} for line in metrics(folder)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(runs folder, output of each run, exit code of each run)."""
    runs_dir = tmp_path_factory.mktemp("runs")
    alltoall = "tiny_cpu_smoke --dispatcher alltoall"
    lines = [
        f"whole:{alltoall} --name whole",
        f"first:{alltoall} --name halves --stop-after 3",
        "second:--resume halves",
        "again:--resume halves",
        "longer:--resume halves --steps 7",
        "allgather:tiny_cpu_smoke --dispatcher allgather --name allgather",
    ]
    if have_core():
        lines.append("hybrid_ep:tiny_cpu_smoke --dispatcher hybrid_ep --name hybrid_ep")
    before = shared_memory()
    job = launch(runs_dir, *lines)
    try:
        text, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0, text
    assert shared_memory() <= before, "the runs left something in shared memory"
    outputs = {part.split("\n", 1)[0].strip(): part for part in text.split("BEGIN ")[1:]}
    codes = {name: int(part.rsplit(f"EXIT {name} ", 1)[1]) for name, part in outputs.items()}
    return runs_dir, outputs, codes


def test_a_run_leaves_its_folder(runs):
    runs_dir, outputs, codes = runs
    folder = runs_dir / "whole"
    assert codes["whole"] == 3, "six steps cannot beat the unigram entropy, and the exit code must say so"
    assert "NOT LEARNED" in outputs["whole"] and "unigram entropy" in outputs["whole"]
    wanted = {"config.yaml", "metrics.jsonl", "loss.png", "expert_load.png", "checkpoint"}
    assert wanted <= {path.name for path in folder.iterdir()}
    assert (folder / "checkpoint" / "latest").read_text().strip() == "step_000006"
    for name in ("loss.png", "expert_load.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_metrics_are_complete_and_plausible(runs):
    runs_dir, _, _ = runs
    first, *steps = metrics(runs_dir / "whole")
    # Fresh weights know nothing: close to the loss of a uniform guess over 256 bytes.
    assert first["step"] == 0 and abs(first["held_out_loss"] - math.log(256)) < 0.5
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in steps if "held_out_loss" in line] == [3, 6]
    assert steps[-1]["held_out_loss"] < first["held_out_loss"] - 0.3
    for line in steps:
        assert 0 < line["dispatch_s"] < line["step_s"] and 0 < line["combine_s"] < line["step_s"]
        assert line["tokens_per_s"] == pytest.approx(4 * 64 / line["step_s"])
        assert 0 <= line["rank_imbalance"] <= line["rank_imbalance_max"] <= 3
        # 4 ranks x 64 tokens x top-4 rows in each of 2 layers, every one of them counted once
        assert [sum(layer) for layer in line["expert_load"]] == [4 * 64 * 4] * 2
        assert all(math.isfinite(line[name]) for name in ("train_loss", "grad_norm", "lr"))


def test_resuming_gives_the_same_run_bit_for_bit(runs):
    runs_dir, outputs, codes = runs
    assert codes["first"] == 0 and "Stopped after step 3" in outputs["first"]
    assert codes["second"] == 3
    halves = results(runs_dir / "halves")
    assert halves[:7] == results(runs_dir / "whole")
    assert len({line["train_loss"] for line in halves[1:]}) == len(halves) - 1, "nothing moved"


def test_a_finished_run_is_not_resumed_but_can_be_extended(runs):
    runs_dir, outputs, codes = runs
    assert codes["again"] == 2 and "has finished its 6 steps" in outputs["again"]
    assert codes["longer"] == 3
    assert [line["step"] for line in metrics(runs_dir / "halves")] == list(range(8))


needs_core = pytest.mark.skipif(not have_core(), reason="the compiled core is not built")


@pytest.mark.parametrize("dispatcher", ["allgather", pytest.param("hybrid_ep", marks=needs_core)])
def test_all_dispatchers_train_the_same_model(runs, dispatcher):
    runs_dir, _, _ = runs
    ours, theirs = metrics(runs_dir / dispatcher), metrics(runs_dir / "whole")
    for mine, reference in zip(ours, theirs, strict=True):
        for name in {"train_loss", "grad_norm", "held_out_loss"} & set(reference):
            assert mine[name] == pytest.approx(reference[name], rel=2e-6), (mine["step"], name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_ranks_with_a_checkpoint(number, tmp_path):
    before = shared_memory()
    dispatcher = "hybrid_ep" if have_core() else "alltoall"
    job = launch(tmp_path, f"run:tiny_cpu_smoke --dispatcher {dispatcher} --name run --steps 100000")
    try:
        lines = []
        for line in job.stdout:
            lines.append(line)
            if line.startswith("step     5/"):
                break
        ranks = children_of(job.pid)
        assert len(ranks) == 4, "".join(lines)
        began = time.monotonic()
        job.send_signal(number)
        rest, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    output = "".join(lines) + rest
    assert time.monotonic() - began < 45
    assert f"EXIT run {128 + number}" in output and "Traceback" not in output, output
    assert "Stopped after step" in output and "RESUME=run" in output
    last = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoint" / "latest").read_text().strip() == f"step_{last:06d}"
    assert (tmp_path / "run" / "loss.png").is_file()
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert shared_memory() <= before


def test_a_killed_rank_ends_the_run(tmp_path):
    job = launch(tmp_path, "run:tiny_cpu_smoke --dispatcher alltoall --name run --steps 100000")
    try:
        for line in job.stdout:
            if line.startswith("step     2/"):
                break
        ranks = children_of(job.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        output, _ = job.communicate(timeout=30)
    finally:
        job.kill()
    assert "was killed by SIGKILL" in output and "EXIT run 1" in output, output
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
