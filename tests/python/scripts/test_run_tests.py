"""run_tests.py: the reason that its summary gives for what a stage lacks, and what is built ahead of stages."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import build_ahead
import build_cuda
import cuda_packages
import run_tests
import stage_result
import stage_runner
import test_matrix

REASON = "needs 9 GB of disk, there are 5.0 GB; free some"


def test_why_the_oldest_megatron_has_no_environment_is_in_the_note(monkeypatch):
    monkeypatch.setattr(test_matrix, "choose_python", lambda version, wanted: "3.11")
    runner = StandInRunner("--prepare", says=f"test_matrix: {REASON}")
    result = run_tests.megatron_oldest(runner)
    assert (result.status, result.note) == ("FAILED", f"its environment cannot be made: {REASON}")
    assert REASON in run_tests.table({"megatron-oldest": result}, 1.0)[0]


# ---- parts of a stage that run at once


def real_runner(seconds=60):
    runner = stage_runner.Runner(quick=False)
    runner.deadline = time.monotonic() + seconds
    return runner


def test_parts_of_a_stage_run_at_once_and_one_speaks_after_the_other(tmp_path, capsys):
    """Each waits for the other's file, so that neither ends alone."""

    def part(mine, other):
        program = (
            f"import os, time; open({str(tmp_path / mine)!r}, 'w'); print({mine!r}, flush=True)\n"
            f"while not os.path.exists({str(tmp_path / other)!r}): time.sleep(0.01)\nprint({mine!r})"
        )
        return lambda runner: runner.run([sys.executable, "-c", program], quiet=False)

    results = stage_runner.at_once(real_runner(), part("first", "second"), part("second", "first"))
    assert results == [(0, "first"), (0, "second")]
    lines = [line for line in capsys.readouterr().out.splitlines() if line in ("first", "second")]
    assert lines == ["first", "first", "second", "second"]


def test_a_part_that_raises_ends_the_others(monkeypatch):
    monkeypatch.setattr(stage_runner, "KILL_AFTER_S", 5)
    begun = time.monotonic()

    def fails(runner):
        time.sleep(0.5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage_runner.at_once(real_runner(), fails, python("import time; time.sleep(50)"))
    assert time.monotonic() - begun < 30


def test_parts_come_one_after_the_other_where_a_runner_has_one_core():
    running = []

    def part(runner):
        running.append(1)
        time.sleep(0.01)
        return len(running), running.clear()

    assert stage_runner.at_once(stage_runner.Runner(False, cores=1), part, part) == [(1, None)] * 2


BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_cpu_time_is_that_of_commands_and_of_what_they_start(monkeypatch):
    """Whatever they sleep beside it, and however they run."""
    child = f"import subprocess, sys, time; time.sleep(0.5); subprocess.run([sys.executable, '-c', {BUSY!r}])"
    runner = stage_runner.Runner(False, 2)
    runner.deadline = time.monotonic() + 60
    stage_runner.at_once(runner, python(child), python(BUSY))
    assert 1.0 <= runner.cpu_s <= 1.8
    result = stage_result.Result("passed", cpu_s=runner.cpu_s)
    head, row = run_tests.table({"cpp": result}, 1.0)[0].splitlines()[:2]
    at = head.index("cpu s") + len("cpu s")
    assert float(row[at - 7 : at]) == round(runner.cpu_s, 1)


@pytest.mark.parametrize("cores", [1, 2])
def test_programs_of_a_runner_are_as_many_at_once_as_its_cores(monkeypatch, cores):
    commands = []
    runner = stage_runner.Runner(False, cores).late()
    monkeypatch.setattr(runner, "run", lambda command, quiet=False: commands.append(command) or (0, ""))
    runner.ctest("cpp", "")
    assert commands[-1][commands[-1].index("--parallel") + 1] == cores


# ---- builds ahead of their stages


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    """Makes an Ahead; nothing of it is left afterwards."""
    monkeypatch.setattr(build_ahead, "BUILD", tmp_path)
    monkeypatch.setattr(stage_runner, "KILL_AFTER_S", 5)
    made = []

    def make(builds):
        made.append(build_ahead.Ahead(builds))
        return made[0]

    yield make
    for one in made:
        one.end()


def python(program):
    """A build by a process that runs a program."""
    return lambda runner: runner.run([sys.executable, "-c", program])


def until(ready):
    end = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stage_waits_for_its_own_build_and_takes_over_what_is_not_begun(ahead, tmp_path):
    made, go = [], threading.Event()

    def first(runner):
        go.wait(60)
        made.append("first")

    builds = ahead(
        {"first": first, "second": lambda runner: made.append("second"), "third": lambda runner: made.append("third")}
    )
    until(lambda: builds.name == "first")
    builds.leave_to("second", time.monotonic() + 60)  # not begun, hence the stage's: no wait
    assert made == []
    with pytest.raises(stage_runner.StageTimeout):
        builds.leave_to("first", time.monotonic())
    go.set()
    builds.leave_to("first", time.monotonic() + 60)
    assert made[0] == "first"
    builds.thread.join(60)
    assert made == ["first", "third"]
    assert (tmp_path / "third-ahead.log").read_text().endswith(" s, 0.0 s of CPU\n")


def test_builds_ahead_give_way_until_a_stage_waits_for_them(ahead, tmp_path):
    """By nice values, and as a session where the kernel weighs sessions."""
    go = tmp_path / "go"
    program = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('built')"
    builds = ahead({"cpp": python(program)})

    def weights():
        pid = builds.runner.process.pid
        session = Path(f"/proc/{pid}/autogroup")
        of_session = session.read_text().split()[-1] if session.exists() else None
        return os.getpriority(os.PRIO_PROCESS, pid), of_session

    until(lambda: builds.runner and builds.runner.process)
    until(lambda: weights() in ((19, "19"), (19, None)))
    with pytest.raises(stage_runner.StageTimeout):
        builds.leave_to("cpp", time.monotonic())
    assert weights()[1] in ("0", None)
    go.touch()
    builds.leave_to("cpp", time.monotonic() + 60)
    assert "built\n" in (tmp_path / "cpp-ahead.log").read_text()


def test_the_end_of_the_stages_ends_what_is_built_ahead(ahead):
    made = []
    builds = ahead({"cpp": python("import time; time.sleep(600)"), "cuda": lambda runner: made.append("cuda")})
    until(lambda: builds.runner and builds.runner.process)
    builds.end()
    assert builds.runner.process.poll() is not None and not builds.thread.is_alive() and made == []


def test_a_stage_that_waits_for_its_build_waits_no_longer_once_all_is_ended(ahead):
    builds = ahead({"cpp": python("import time; time.sleep(600)")})
    until(lambda: builds.runner and builds.runner.process)
    ended = []

    def stage():
        with pytest.raises(stage_runner.Ended):
            builds.leave_to("cpp", time.monotonic() + 60)
        ended.append(True)

    waits = threading.Thread(target=stage)
    waits.start()
    builds.end()
    waits.join(20)
    assert ended


def test_a_build_that_fails_ahead_keeps_none_from_being_made(ahead, tmp_path):
    made = []
    builds = ahead({"cpp": lambda runner: 1 // 0, "cuda": lambda runner: made.append("cuda")})
    builds.thread.join(60)
    assert made == ["cuda"] and "ZeroDivisionError" in (tmp_path / "cpp-ahead.log").read_text()


def test_what_stages_build_is_made_ahead_of_the_first_that_has_others_before_it(monkeypatch):
    begun, left = [], []

    class StandIn:
        def __init__(self, builds):
            begun.extend(builds)

        def leave_to(self, name, deadline):
            left.append(name)

        def end(self):
            left.append("end")

    monkeypatch.setattr(run_tests, "Ahead", StandIn)
    monkeypatch.setattr(run_tests, "TOGETHER", ())
    for name in ("cpp", "layers", "cuda"):
        monkeypatch.setitem(run_tests.STAGES, name, (lambda runner: run_tests.Result("passed"), 1, True))
    run_tests.run_stages(["cpp", "layers", "cuda"], False, 60)
    assert (begun, left) == (["cuda"], ["cpp", "layers", "cuda", "end"])


class StandInRunner:
    """Notes the commands of a stage; those that have one of the words in `failing` fail."""

    cores, cpu_s = 2, 0.0

    def __init__(self, *failing, says=""):
        self.failing, self.says, self.commands, self.variables = failing, says, [], {}
        self.said = ()

    def late(self):
        return self

    def show(self, text):
        pass

    def run(self, command, quiet=False):
        self.commands.append(" ".join(map(str, command)).removeprefix(sys.executable + " "))
        status = int(any(word in self.commands[-1] for word in self.failing))
        return status, "cubin_check: 5 kernels, 0 complaints" if "cubin_check" in self.commands[-1] else self.says

    def pytest(self, folder, marker="", more=(), name=None):
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
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda home=None: (Path("/cuda/bin/nvcc"), None))
    monkeypatch.setattr(build_cuda, "nvcc_version", lambda nvcc: (13, 0))
    monkeypatch.setattr(build_cuda, "nvshmem_home", lambda nvcc: None)
    return monkeypatch


def test_cuda_compiles_and_inspects_the_kernels_over_nvshmem(machine):
    machine.setattr(build_cuda, "nvshmem_home", lambda nvcc: Path("/packages/nvshmem"))
    runner = StandInRunner()
    result = run_tests.cuda(runner)
    assert runner.those_of("build_cuda") == ["--nvshmem all --nvshmem-home /packages/nvshmem"]
    assert runner.those_of("cubin_check") == ["", "--rail nvshmem", "--planted"]
    assert not any("pip" in command for command in runner.commands)
    assert result.note == "5 kernels, 0 complaints; over NVSHMEM 5 kernels, 0 complaints; 61 skipped"


def test_nvshmem_is_installed_where_there_is_none_for_the_compilers_cuda(machine, tmp_path):
    runner = StandInRunner()
    run_tests.cuda(runner)
    target = tmp_path / "nvidia-nvshmem-cu13"
    assert runner.commands[0] == (
        f"-m pip install -q --target {target} --no-deps nvidia-nvshmem-cu13{cuda_packages.NVSHMEM_VERSIONS}"
    )
    assert runner.those_of("build_cuda") == [f"--nvshmem all --nvshmem-home {target / 'nvidia' / 'nvshmem'}"]


def test_nvshmem_that_cannot_be_had_is_said_and_is_no_failure(machine):
    runner = StandInRunner("pip install")
    result = run_tests.cuda(runner)
    assert runner.those_of("build_cuda") == ["--no-nvshmem"]
    assert runner.those_of("cubin_check") == ["", "--planted"]
    assert result.status == "passed"
    assert result.note == (
        "5 kernels, 0 complaints; kernels over NVSHMEM not compiled: nvidia-nvshmem-cu13>=3.4,<3.9 "
        "cannot be installed here; 61 skipped"
    )


@pytest.mark.parametrize(
    "failing, note",
    [
        ("build_cuda", "does not build"),
        ("devices.load", "does not load"),
        ("--rail nvshmem", "over NVSHMEM 5 kernels, 0 complaints"),
        ("--planted", "cubin_check.py --planted"),
        ("twin_check", "twin_check.py"),
    ],
)
def test_what_fails_of_cuda_is_named(machine, failing, note):
    result = run_tests.cuda(StandInRunner(failing))
    assert (result.status, result.note) == ("FAILED", note)


def test_ptx_is_interpreted_with_planted_bugs(machine):
    runner = StandInRunner()
    result = run_tests.ptx(runner)
    assert runner.commands[0] == "scripts/build_cuda.py --interpreted"
    assert sorted(runner.commands[1:]) == [
        "pytest tests/gpu --ptx-machine --ptx-everyday",
        "pytest tests/gpu --ptx-machine --ptx-everyday --ptx-target 100",
        "pytest tests/ptx",
        "tests/ptx/mutants.py --everyday",
    ]
    assert (result.status, result.counts) == ("passed", (0, 0, 183))
    assert run_tests.ptx(StandInRunner("mutants.py")).status == "FAILED"
    assert run_tests.ptx(StandInRunner("--interpreted")).note == "does not build"


@pytest.mark.parametrize("stage", [run_tests.cuda, run_tests.ptx])
def test_without_any_nvcc_a_stage_is_skipped_and_says_why(machine, stage):
    machine.setattr(build_cuda, "find_nvcc", lambda home=None: (None, "none"))
    result = stage(StandInRunner("pip install"))
    assert result.status == "skipped"
    assert result.note == "no nvcc, and cuda-toolkit[nvcc,cudart,cccl]==13.0.* cannot be installed here"
