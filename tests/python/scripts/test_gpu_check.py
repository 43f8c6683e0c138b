"""What gpu_check.py asks of other programs, as far as a machine without a GPU can tell."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402  (a script)


def test_the_sanitizer_runs_the_two_smallest_worlds_alone():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        gpu_check.SANITIZED,
    ]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)
    found = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert found == ["test_examples[shape0-cuda]", "test_examples[shape1-cuda]"], done.stdout + done.stderr


def test_a_step_cut_off_by_the_clock_did_not_run_and_one_over_its_own_limit_failed(tmp_path, capsys, monkeypatch):
    assert not gpu_check.Steps(tmp_path, gpu_check.LEAST_S - 0.1, set()).run("late", ["true"], 60)
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.1)
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    short, long = gpu_check.Steps(tmp_path, 0.6, set()), gpu_check.Steps(tmp_path, 60, set())
    assert not short.run("last", sleeps, 60) and not long.run("slow", sleeps, 1)
    assert short.results["last"]["result"] == "cut off"
    assert gpu_check.verdict(short.results) == ("passed; cut off by the clock: last", 0)
    assert long.results["slow"]["result"] == "FAILED (out of time)"


def test_the_clock_hides_no_failure(tmp_path, capsys):
    """All at once: each waits until its time is over."""
    lines = (
        "..s.F.",
        "E.. [ 12%]",
        "========= ERROR SUMMARY: 3 errors",
        "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
    )

    def cut_off(number):
        (folder := tmp_path / str(number)).mkdir()
        steps = gpu_check.Steps(folder, 5.2, set())
        says = f"import time; print({lines[number]!r}, flush=True); time.sleep(60)"
        assert not steps.run("last", [sys.executable, "-c", says], 60)
        return steps.results["last"]["result"], gpu_check.verdict(steps.results)[1]

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(cut_off, range(len(lines)))) == [("FAILED (out of time)", 1)] * len(lines)


def test_what_is_no_failure():
    for line in ("..s..", "passed", "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed", "[ 12%]", ""):
        assert not gpu_check.shows_failure(line)


def test_both_builds_are_reported(tmp_path, capsys):
    steps = gpu_check.Steps(tmp_path, 60, {"core", "cuda"})
    gpu_check.build(steps)
    assert {step["note"] for step in steps.results.values()} == {"left out with --skip"} and len(steps.results) == 2
    steps.run = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        gpu_check.build(steps)


def test_what_did_not_run_is_said(tmp_path, capsys):
    steps = gpu_check.Steps(tmp_path, 60, {"left"})
    assert steps.run("good", [sys.executable, "-c", "print('fine')"], 30)
    assert not steps.run("left", [sys.executable, "-c", ""], 30)
    assert not steps.run("bad", [sys.executable, "-c", "raise SystemExit(3)"], 30)
    assert {name: step["result"] for name, step in steps.results.items()} == {
        "good": "passed",
        "left": "skipped",
        "bad": "FAILED (3)",
    }
    assert gpu_check.verdict(steps.results) == ("FAILED: bad; did not run: left", 1)
    assert gpu_check.verdict({"good": steps.results["good"]}) == ("passed", 0)
