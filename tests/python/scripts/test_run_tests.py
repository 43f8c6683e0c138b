"""What the summary of run_tests.py says of stages that lack something: the reason, in the stage's note."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import build_cuda
import cuda_packages
import run_tests
import stage_runner
import test_matrix

REASON = "needs 9 GB of disk, there are 5.0 GB; free some"


def test_why_the_oldest_megatron_has_no_environment_is_in_the_note(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_runner, "BUILD", tmp_path)
    monkeypatch.setattr(test_matrix, "choose_python", lambda version, wanted: "3.11")
    program = f"import sys; print('installing'); sys.exit('test_matrix: {REASON}')"
    runner = run_tests.Runner(False, run_tests.Preparation("megatron-oldest", [sys.executable, "-c", program]))
    runner.deadline = time.monotonic() + 60
    result = run_tests.megatron_oldest(runner)
    assert (result.status, result.note) == ("FAILED", f"its environment cannot be made: {REASON}")
    assert REASON in run_tests.table({"megatron-oldest": result})[0]


class StandInRunner:
    """Notes the commands of a stage; those that have one of the words in `failing` fail."""

    def __init__(self, *failing):
        self.failing, self.commands = failing, []

    def run(self, command, quiet=False):
        self.commands.append(" ".join(map(str, command)).removeprefix(sys.executable + " "))
        status = int(any(word in self.commands[-1] for word in self.failing))
        return status, "cubin_check: 5 kernels, 0 complaints" if "cubin_check" in self.commands[-1] else ""

    def pytest(self, folder, marker="", more=()):
        self.commands.append(" ".join(["pytest", folder, *more]))
        return run_tests.Result("passed", (0, 0, 61), "61 skipped")

    def those_of(self, script):
        return [c.partition(" ")[2] for c in self.commands if c.startswith(f"scripts/{script}.py")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an nvcc of CUDA 13, and no NVSHMEM."""
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    monkeypatch.setattr(cuda_packages, "FOLDER", tmp_path)
    monkeypatch.setattr(cuda_packages.shutil, "which", lambda name: None)
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: (Path("/cuda/bin/nvcc"), None))
    monkeypatch.setattr(build_cuda, "nvcc_version", lambda nvcc: (13, 0))
    monkeypatch.setattr(build_cuda, "nvshmem_home", lambda nvcc: None)
    return monkeypatch


def test_cuda_compiles_and_inspects_the_kernels_over_nvshmem(machine):
    machine.setattr(build_cuda, "nvshmem_home", lambda nvcc: Path("/packages/nvshmem"))
    runner = StandInRunner()
    result = run_tests.cuda(runner)
    assert runner.those_of("build_cuda") == ["--nvshmem sm_90a --nvshmem-home /packages/nvshmem"]
    library = build_cuda.BUILD / "sm_90a" / build_cuda.NVSHMEM_LIBRARY
    assert runner.those_of("cubin_check") == ["", f"{library} --rail nvshmem --arch sm_90a", "--planted"]
    assert not any("pip" in command for command in runner.commands)
    assert result.note == "5 kernels, 0 complaints; over NVSHMEM 5 kernels, 0 complaints; 61 skipped"


def test_nvshmem_is_installed_where_there_is_none_for_the_compilers_cuda(machine, tmp_path):
    runner = StandInRunner()
    run_tests.cuda(runner)
    target = tmp_path / "nvidia-nvshmem-cu13"
    assert runner.commands[0] == ("-m pip install -q --target "
                                  f"{target} --no-deps nvidia-nvshmem-cu13{cuda_packages.NVSHMEM_VERSIONS}")
    assert runner.those_of("build_cuda") == [f"--nvshmem sm_90a --nvshmem-home {target / 'nvidia' / 'nvshmem'}"]


def test_nvshmem_that_cannot_be_had_is_said_and_is_no_failure(machine):
    runner = StandInRunner("pip install")
    result = run_tests.cuda(runner)
    assert runner.those_of("build_cuda") == ["--no-nvshmem"]
    assert runner.those_of("cubin_check") == ["", "--planted"]
    assert result.status == "passed"
    assert result.note == ("5 kernels, 0 complaints; kernels over NVSHMEM not compiled: nvidia-nvshmem-cu13>=3.4,<3.8 "
                           "cannot be installed here; 61 skipped")


@pytest.mark.parametrize("failing, note", [
    ("build_cuda", "does not build"),
    ("--rail nvshmem", "over NVSHMEM 5 kernels, 0 complaints"),
    ("--planted", "cubin_check.py --planted"),
    ("twin_check", "twin_check.py"),
])
def test_what_fails_of_cuda_is_named(machine, failing, note):
    result = run_tests.cuda(StandInRunner(failing))
    assert (result.status, result.note) == ("FAILED", note)


def test_ptx_is_interpreted_with_planted_bugs(machine):
    runner = StandInRunner()
    result = run_tests.ptx(runner)
    assert runner.commands == ["scripts/build_cuda.py --interpreted --arch sm_90a", "pytest tests/ptx",
                               "pytest tests/gpu --ptx-machine --ptx-everyday", "tests/ptx/mutants.py --everyday"]
    assert (result.status, result.counts) == ("passed", (0, 0, 122))
    assert run_tests.ptx(StandInRunner("mutants.py")).status == "FAILED"
    assert run_tests.ptx(StandInRunner("--interpreted")).note == "does not build"


@pytest.mark.parametrize("stage", [run_tests.cuda, run_tests.ptx])
def test_without_any_nvcc_a_stage_is_skipped_and_says_why(machine, stage):
    machine.setattr(build_cuda, "find_nvcc", lambda: (None, "none"))
    result = stage(StandInRunner("pip install"))
    assert result.status == "skipped"
    assert result.note == "no nvcc, and cuda-toolkit[nvcc,cudart,cccl]==13.0.* cannot be installed here"
