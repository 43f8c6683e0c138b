"""`recipes.pretrain` from end to end on four ranks: it learns, resumes bit for bit, and stops cleanly.

Importing Megatron takes far longer than these runs, so one process makes most of them, one after the other.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
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


def have_latent_attention() -> bool:
    return tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 17)


needs_core = pytest.mark.skipif(not have_core(), reason="the compiled core is not built")


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
        lines.append("hybrid_ep:tiny_cpu_smoke --dispatcher hybrid_ep --name hybrid_ep --profile-step 4")
        grouped = "tiny_cpu_smoke --dispatcher hybrid_ep --grouped-gemm"
        lines += [
            f"stacked:{grouped} --name stacked",
            f"stacked_first:{grouped} --name stacked_halves --stop-after 3",
            "stacked_second:--resume stacked_halves",
        ]
        proxy = "deepseek_v3_proxy --steps 3"
        lines.append(f"latent:{proxy} --name latent")
        if have_latent_attention():
            lines += [
                f"latent_alltoall:{proxy} --dispatcher alltoall --name latent_alltoall",
                f"latent_first:{proxy} --name latent_halves --stop-after 2",
                "latent_second:--resume latent_halves",
            ]
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


@needs_core
def test_latent_attention_and_multi_token_prediction_train(runs):
    """The same losses as over alltoall, and those of the whole run after a pause; the last MoE layer predicts."""
    runs_dir, outputs, codes = runs
    if not have_latent_attention():
        assert codes["latent"] == 1 and "has no latent attention without Transformer Engine" in outputs["latent"]
        return
    assert codes["latent"] == codes["latent_first"] == 0
    ours, theirs = metrics(runs_dir / "latent"), metrics(runs_dir / "latent_alltoall")
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=2e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-5)
        assert len(one["expert_load"]) == 3 and one["expert_load"][0] == other["expert_load"][0]
    assert ours[-1]["held_out_loss"] < ours[0]["held_out_loss"] - 0.1
    assert results(runs_dir / "latent_halves") == results(runs_dir / "latent")


@needs_core
def test_who_sent_to_whom_adds_up_to_the_loads(runs):
    folder = runs[0] / "hybrid_ep"
    for line in metrics(folder)[1:]:
        load = [sum(layer[i] for layer in line["expert_load"]) for i in range(16)]
        owners = [sum(load[4 * rank : 4 * rank + 4]) for rank in range(4)]
        assert [sum(column) for column in zip(*line["rank_sent"], strict=True)] == owners
        assert len(line["rank_sent"]) == 4 and len({sum(row) for row in line["rank_sent"]}) == 1, "equal batches"
    assert (folder / "traffic.png").is_file() and (folder / "traffic.svg").is_file()


@needs_core
def test_who_waits_for_whom_is_told_of_every_step(runs):
    folder, alltoall = runs[0] / "hybrid_ep", runs[0] / "latent_alltoall"
    # Waits of a step may be longer than it takes rank 0, who evaluates and writes between two; not than the run.
    whole_s = (folder / "metrics.jsonl").stat().st_mtime - (folder / "config.yaml").stat().st_mtime
    of_run = [[0.0] * 4 for _ in range(4)]
    for line in metrics(folder)[1:]:
        waited = line["rank_waited"]
        assert [len(row) for row in waited] == [4] * 4 and all(waited[rank][rank] == 0 for rank in range(4))
        assert all(s >= 0 for row in waited for s in row)
        of_run = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(of_run, waited, strict=True)]
    assert max(max(row) for row in of_run) < whole_s
    assert sum(s for line in metrics(folder)[1:] for row in line["rank_waited"] for s in row) > 0
    assert (folder / "waits.png").is_file()
    if have_latent_attention():
        assert not any(s for line in metrics(alltoall)[1:] for row in line["rank_waited"] for s in row)
        assert not (alltoall / "waits.png").exists()


@needs_core
def test_a_profiled_step_lists_what_it_launched(runs):
    runs_dir, outputs, _ = runs
    lines = (runs_dir / "hybrid_ep" / "profile.md").read_text().splitlines()
    assert lines[0].startswith("Step 4, rank 0: ") and lines[0] in outputs["hybrid_ep"] and "0 kernels" in lines[0]
    calls = {row[1].strip(" `"): int(row[2].replace(",", "")) for row in (line.split("|") for line in lines[4:])}
    # two layers, one micro-batch: each exchange once forward and once backward
    assert [calls[f"_{name}{way}"] for name in ("Dispatch", "Combine") for way in ("", "Backward")] == [2] * 4
    assert calls["aten::mm"] > 16 and not (runs_dir / "whole" / "profile.md").exists()
    assert "gpuGetDeviceCount" not in outputs["hybrid_ep"]


def test_a_run_leaves_its_folder(runs):
    runs_dir, outputs, codes = runs
    folder = runs_dir / "whole"
    assert codes["whole"] == 0, "six steps cannot beat the unigram entropy, and this recipe does not ask them to"
    assert "RAN: 6 steps" in outputs["whole"] and "unigram entropy" in outputs["whole"]
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
        assert 1 << 26 < line["memory_bytes"] < 1 << 40
        assert all(math.isfinite(line[name]) for name in ("train_loss", "grad_norm", "lr"))


def test_resuming_gives_the_same_run_bit_for_bit(runs):
    runs_dir, outputs, codes = runs
    assert codes["first"] == 0 and "Stopped after step 3" in outputs["first"]
    assert codes["second"] == 0
    halves = results(runs_dir / "halves")
    assert halves[:7] == results(runs_dir / "whole")
    assert len({line["train_loss"] for line in halves[1:]}) == len(halves) - 1, "nothing moved"


@needs_core
def test_experts_that_are_stacked_resume_bit_for_bit(runs):
    runs_dir, outputs, codes = runs
    assert codes["stacked_first"] == 0, outputs["stacked_first"]
    assert codes["stacked"] == codes["stacked_second"] == 0, outputs["stacked_second"]
    assert results(runs_dir / "stacked_halves") == results(runs_dir / "stacked")


def test_a_finished_run_is_not_resumed_but_can_be_extended(runs):
    runs_dir, outputs, codes = runs
    assert codes["again"] == 2 and "has finished its 6 steps" in outputs["again"]
    assert codes["longer"] == 0
    assert [line["step"] for line in metrics(runs_dir / "halves")] == list(range(8))


@pytest.mark.parametrize("dispatcher", ["allgather", pytest.param("hybrid_ep", marks=needs_core)])
def test_all_dispatchers_train_the_same_model(runs, dispatcher):
    runs_dir, _, _ = runs
    ours, theirs = metrics(runs_dir / dispatcher), metrics(runs_dir / "whole")
    for mine, reference in zip(ours, theirs, strict=True):
        for name in {"train_loss", "grad_norm", "held_out_loss"} & set(reference):
            assert mine[name] == pytest.approx(reference[name], rel=2e-6), (mine["step"], name)


@dataclass
class Ended:
    """A run that did not come to its end by itself."""

    folder: Path
    output: str
    ranks: list[int]
    seconds: float  # from the blow to the launcher's last word


def end(job: subprocess.Popen, runs_dir: Path, run: str, step: int, blow) -> Ended:
    """Waits for a step of the run that `job` comes to now, strikes, and reads on until the run is over."""
    lines, ranks, began = [], [], math.inf
    for line in job.stdout:
        lines.append(line)
        if line.startswith(f"step {step:5d}/") and not ranks:
            ranks = children_of(job.pid)
            began = time.monotonic()
            blow(ranks)
        if line.startswith(f"EXIT {run} "):
            break
    output = "".join(lines)
    assert len(ranks) == 4, output
    return Ended(runs_dir / run, output, ranks, time.monotonic() - began)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """{name: Ended} of a run whose last rank is killed and of two that are told to stop, one after the other."""
    runs_dir = tmp_path_factory.mktemp("ended")
    dispatcher = "hybrid_ep" if have_core() else "alltoall"
    before = shared_memory()
    common = f"tiny_cpu_smoke --dispatcher {dispatcher} --steps 100000"
    job = launch(runs_dir, *(f"{name}:{common} --name {name}" for name in ("KILLED", "SIGTERM", "SIGINT")))
    watchdog = threading.Timer(LIMIT_S, job.kill)
    watchdog.start()
    try:
        found = {"KILLED": end(job, runs_dir, "KILLED", 2, lambda ranks: os.kill(ranks[-1], signal.SIGKILL))}
        for name in ("SIGTERM", "SIGINT"):
            found[name] = end(job, runs_dir, name, 5, lambda _, n=name: job.send_signal(signal.Signals[n]))
        assert job.wait(30) == 0
    finally:
        watchdog.cancel()
        job.kill()
        job.stdout.close()
    assert shared_memory() <= before, "the runs left something in shared memory"
    return found


@pytest.mark.version_free
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_ranks_with_a_checkpoint(ended, number):
    run = ended[number.name]
    assert run.seconds < 45
    assert f"EXIT {number.name} {128 + number}" in run.output and "Traceback" not in run.output, run.output
    assert "Stopped after step" in run.output and f"RESUME={number.name}" in run.output
    last = metrics(run.folder)[-1]["step"]
    assert (run.folder / "checkpoint" / "latest").read_text().strip() == f"step_{last:06d}"
    assert (run.folder / "loss.png").is_file()
    assert not [pid for pid in run.ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.version_free
def test_a_killed_rank_ends_the_run(ended):
    run = ended["KILLED"]
    assert run.seconds < 30
    assert "was killed by SIGKILL" in run.output and "EXIT KILLED 1" in run.output, run.output
    assert not [pid for pid in run.ranks if Path(f"/proc/{pid}").exists()]
