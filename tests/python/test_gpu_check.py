"""What gpu_check.py asks of other programs, as far as a machine without a GPU can tell."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402  (a script)


def test_the_sanitizer_runs_the_two_smallest_worlds_alone():
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider", "-k",
               gpu_check.SANITIZED]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)
    found = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert found == ["test_examples[shape0-cuda]", "test_examples[shape1-cuda]"], done.stdout + done.stderr


def test_what_did_not_run_is_said(tmp_path, capsys):
    steps = gpu_check.Steps(tmp_path, 60, {"left"})
    assert steps.run("good", [sys.executable, "-c", "print('fine')"], 30)
    assert not steps.run("left", [sys.executable, "-c", ""], 30)
    assert not steps.run("bad", [sys.executable, "-c", "raise SystemExit(3)"], 30)
    assert {name: step["result"] for name, step in steps.results.items()} == {
        "good": "passed", "left": "skipped", "bad": "FAILED (3)"}
    assert gpu_check.verdict(steps.results) == ("FAILED: bad; did not run: left", 1)
    assert gpu_check.verdict({"good": steps.results["good"]}) == ("passed", 0)
