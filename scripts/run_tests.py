"""All checks and tests, stage after stage, never two at once (the stages start many processes themselves),
and a table of what passed at the end. Exits with 1 if any stage failed. What a stage only has to download and
build begins with the first stage, beside the others.

    python scripts/run_tests.py [--only lint,cpp,python] [--quick] [--budget-minutes 38]

Runs in the Python of the environment that scripts/setup_env.py made (`make test` does both)."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from stage_result import Result, result_of

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
CPP_SOURCES = ROOT / "tests" / "cpp"
KILL_AFTER_S = 20


class StageTimeout(Exception):
    """A stage's time is over; its processes are gone."""


class Runner:
    """Runs the commands of a stage within the stage's deadline."""

    def __init__(self, quick, preparation=None):
        self.quick = quick
        self.preparation = preparation
        self.deadline = time.monotonic()

    def prepared(self):
        """(exit status, last line printed) of what was begun ahead of this stage, if anything was, when it has ended;
        shows its output."""
        if self.preparation is None:
            return 0, ""
        try:
            status = self.preparation.process.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StageTimeout from None
        text = self.preparation.log.read_text(errors="replace")
        print(text, end="", flush=True)
        return status, last_line(text.splitlines())

    def run(self, command, quiet=False):
        """(exit status, last line printed). Output is shown as it comes, with `quiet` only on failure."""
        print("+ " + " ".join(map(str, command)), flush=True)
        # A session of its own: whatever a test leaves behind ends with the stage.
        process = subprocess.Popen([str(part) for part in command], cwd=ROOT, env=test_environment(),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, errors="replace", start_new_session=True)
        lines = []

        def read():
            for line in process.stdout:
                lines.append(line)
                if not quiet:
                    print(line, end="", flush=True)

        # A thread reads, so that a stray grandchild that keeps the pipe open cannot hold up the stage.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            status = process.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise StageTimeout from None
        finally:
            end_group(process)
            reader.join(KILL_AFTER_S)
        if quiet and status:
            print("".join(lines), end="", flush=True)
        return status, last_line(lines)

    def pytest(self, folder, marker="", more=()):
        report = BUILD / f"{folder.replace('/', '-')}.xml"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        color = "yes" if sys.stdout.isatty() else "no"
        command = [sys.executable, "-m", "pytest", folder, f"--junitxml={report}", f"--color={color}", *more]
        status, last = self.run([*command, *(["-m", marker] if marker else [])])
        return result_of(status, report, re.sub(r"\x1b\[[0-9;]*m", "", last).strip("= "))

    def ctest(self, name, sanitizer, selection):
        """Configures, builds and runs the C++ tests of one build folder."""
        cmake, ctest = tool("cmake"), tool("ctest")
        folder = BUILD / f"cpp-{sanitizer or 'plain'}"
        configure = [cmake, "-S", CPP_SOURCES, "-B", folder, "-G", "Ninja",
                     f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DHEP_SANITIZE={sanitizer}"]
        for command in (configure, [cmake, "--build", folder]):
            if self.run(command, quiet=True)[0]:
                return Result("FAILED", note="does not build")
        report = BUILD / f"{name}.xml"
        report.unlink(missing_ok=True)
        # Two at once: one program waits for deadlines most of its time, another computes.
        status, last = self.run([ctest, "--test-dir", folder, "--output-on-failure", "--no-tests=error", "--parallel",
                                 "2", "--timeout", "300", "--output-junit", report, *selection])
        return result_of(status, report, last if status else "")


class Preparation:
    """A command that runs beside other stages, its output in a file."""

    def __init__(self, name, command):
        self.log = BUILD / f"{name}-preparation.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "w") as output:
            print("+ " + " ".join(map(str, command)), file=output, flush=True)
            self.process = subprocess.Popen([str(part) for part in command], cwd=ROOT, env=test_environment(),
                                            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                            start_new_session=True)

    def end(self):
        end_group(self.process)


def test_environment():
    """The tests' environment: one compute thread a process, for the ranks share the cores; and bytecode is kept,
    whatever the caller's shell says, for the stages start hundreds of interpreters that import torch and Megatron."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def last_line(lines):
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def signal_group(process, number):
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def end_group(process):
    """Ends what is left of a command and all it started: an interrupt for a clean end, then kill."""
    if process.poll() is None:
        signal_group(process, signal.SIGINT)
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            pass
    signal_group(process, signal.SIGKILL)


def tool(name):
    """A program of this environment, else of PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        sys.exit(f"run_tests: needs {name}; call make build, which installs it")
    return found


def has_tests(folder):
    return any((ROOT / folder).rglob("test_*.py"))


# ---- the stages

def lint(runner):
    return Result("FAILED" if runner.run([sys.executable, "-m", "ruff", "check", "."])[0] else "passed")


def layers(runner):
    status, last = runner.run([sys.executable, "scripts/check_layers.py"])
    return Result("FAILED" if status else "passed", note=last.removeprefix("check_layers: "))


def cpp(runner):
    return runner.ctest("cpp", "", ["-LE", "mutant"])


def python_asan(runner):
    """tests/python on a core with AddressSanitizer; shares the objects of cpp-asan."""
    report = BUILD / "python-asan.xml"
    report.unlink(missing_ok=True)
    status, last = runner.run([sys.executable, "scripts/python_asan.py", "--junitxml", report])
    return result_of(status, report, last)


def python(runner):
    return runner.pytest("tests/python", "not slow" if runner.quick else "")


def megatron(runner):
    return runner.pytest("tests/megatron", "not slow" if runner.quick else "")


OLDEST_MEGATRON = "0.16"


def oldest(*arguments):
    return [sys.executable, "scripts/test_matrix.py", "--versions", OLDEST_MEGATRON, *arguments]


def megatron_oldest(runner):
    """What may differ with the oldest megatron-core that is supported, in an environment of its own."""
    import setup_env
    import test_matrix  # imports this module for its Runner

    try:
        test_matrix.choose_python(OLDEST_MEGATRON, "")
    except setup_env.SetupError as error:
        return Result("skipped", note=str(error))
    status, last = runner.prepared()
    if status:
        return Result("FAILED", note=f"its environment cannot be made: {last.removeprefix('test_matrix: ')}")
    status, last = runner.run(oldest("--everyday"))
    return Result("FAILED" if status else "passed", note=last)


def docs(runner):
    """The site, warnings as errors: dead links between pages and docstrings that do not render are failures."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html"]
    return Result("FAILED" if runner.run(command)[0] else "passed")


def find_nvcc(runner):
    """(nvcc, None), installed if it can be, or (None, why not)."""
    import build_cuda
    import cuda_packages

    home, why_not = cuda_packages.find_toolkit(runner.run)
    if why_not:
        return None, why_not
    if home:
        os.environ["CUDA_HOME"] = str(home)
    return build_cuda.find_nvcc()  # none where what was installed does not run here


def cuda(runner):
    """Compiles the CUDA library for both architectures and the kernels over NVSHMEM for one (they are the same roles
    again, and take as long), inspects the code of both, runs tests/gpu, which skip without a GPU."""
    import build_cuda
    import cuda_packages

    nvcc, why_not = find_nvcc(runner)
    if not nvcc:
        return Result("skipped", note=why_not)
    nvshmem, no_nvshmem = cuda_packages.find_nvshmem(runner.run, nvcc)
    arch = build_cuda.ARCHITECTURES[0]
    rail = ["--nvshmem", arch, "--nvshmem-home", nvshmem] if nvshmem else ["--no-nvshmem"]
    if runner.run([sys.executable, "scripts/build_cuda.py", *rail])[0]:
        return Result("FAILED", note="does not build")
    inspections = {"": []}
    if nvshmem:
        library = build_cuda.folder_of((arch,)) / build_cuda.NVSHMEM_LIBRARY
        inspections["over NVSHMEM "] = [library, "--rail", "nvshmem", "--arch", arch]
    notes = []
    for what, arguments in inspections.items():
        status, said = runner.run([sys.executable, "scripts/cubin_check.py", *arguments])
        notes.append(what + said.removeprefix("cubin_check: "))
        if status:
            return Result("FAILED", note=notes[-1])
    # With --planted and --mutant they must find what was planted.
    for check in (["cubin_check.py", "--planted"], ["twin_check.py"], ["twin_check.py", "--mutant"]):
        if runner.run([sys.executable, f"scripts/{check[0]}", *check[1:]])[0]:
            return Result("FAILED", note=" ".join(check))
    result = runner.pytest("tests/gpu")
    notes += [] if nvshmem else [f"kernels over NVSHMEM not compiled: {no_nvshmem}"]
    result.note = "; ".join([*notes, result.note])
    return result


def ptx(runner):
    """The CUDA library's PTX, executed on the CPU by an interpreter (docs/ptx_machine.md): the interpreter's own tests,
    tests of tests/gpu, and planted bugs, which must be noticed."""
    nvcc, why_not = find_nvcc(runner)
    if not nvcc:
        return Result("skipped", note=why_not)
    if runner.run([sys.executable, "scripts/build_cuda.py", "--interpreted", "--arch", "sm_90a"])[0]:
        return Result("FAILED", note="does not build")
    results = [runner.pytest("tests/ptx"), runner.pytest("tests/gpu", "", ["--ptx-machine", "--ptx-everyday"])]
    status, note = runner.run([sys.executable, "tests/ptx/mutants.py", "--everyday"])
    status = status or any(result.status == "FAILED" for result in results)
    counts = tuple(map(sum, zip(*(result.counts for result in results), strict=True)))
    return Result("FAILED" if status else "passed", counts, note)


def slurm(runner):
    return runner.pytest("tests/slurm") if has_tests("tests/slurm") else Result("skipped", note="no tests")


# name: (function, minutes at most, part of --quick)
STAGES = {
    "lint": (lint, 2, True),
    "layers": (layers, 2, True),
    "cpp": (cpp, 10, True),
    "cpp-mutants": (lambda runner: runner.ctest("cpp-mutants", "", ["-L", "mutant"]), 10, False),
    "cpp-tsan": (lambda runner: runner.ctest("cpp-tsan", "thread", ["-LE", "mutant"]), 15, False),
    "cpp-asan": (lambda runner: runner.ctest("cpp-asan", "address", ["-LE", "mutant"]), 15, False),
    "python-asan": (python_asan, 15, False),
    "cuda": (cuda, 15, False),
    "ptx": (ptx, 15, False),
    "python": (python, 30, True),
    "megatron": (megatron, 20, True),
    "megatron-oldest": (megatron_oldest, 20, False),
    "slurm": (slurm, 15, False),
    "docs": (docs, 3, False),
}


# name: command that makes what the stage needs, if it can be made; begun ahead where there are stages before it
PREPARATIONS = {"megatron-oldest": oldest("--prepare")}


def run_stages(names, quick, budget_s):
    """{stage: Result}; every stage runs, whatever the others did, until the budget is spent."""
    begun = {name: Preparation(name, PREPARATIONS[name]) for name in names[1:] if name in PREPARATIONS}
    try:
        return run_each(names, begun, quick, budget_s)
    finally:
        for preparation in begun.values():
            preparation.end()


def run_each(names, begun, quick, budget_s):
    end = time.monotonic() + budget_s
    results = {}
    for name in names:
        function, minutes, _ = STAGES[name]
        start = time.monotonic()
        if start >= end:
            results[name] = Result("FAILED", note="not run: the time budget is spent")
            continue
        print(f"\n=== {name}", flush=True)
        runner = Runner(quick, begun.get(name))
        runner.deadline = min(end, start + 60 * minutes)
        limit_s = runner.deadline - start
        try:
            result = function(runner)
        except StageTimeout:
            result = Result("FAILED", note=f"stopped after {limit_s:.0f} s")
        result.seconds = time.monotonic() - start
        results[name] = result
    return results


def table(results):
    """The summary, one line a stage."""
    lines = [f"{'stage':<15} {'result':<8} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}  note"]
    for name, result in results.items():
        counts = [str(n) for n in result.counts] if result.counts else ["-"] * 3
        lines.append(f"{name:<15} {result.status:<8} {counts[0]:>7} {counts[1]:>7} {counts[2]:>7} "
                     f"{result.seconds:>8.1f}  {result.note}".rstrip())
    failed = [name for name, result in results.items() if result.status == "FAILED"]
    seconds = sum(result.seconds for result in results.values())
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all stages passed"
    return "\n".join([*lines, f"run_tests: {verdict} ({seconds:.0f} s)"]), not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"stages, separated by commas, of: {', '.join(STAGES)}")
    parser.add_argument("--quick", action="store_true", help="no mutants, no sanitizers, no slow tests")
    parser.add_argument("--budget-minutes", type=float, default=120.0, help="for all stages [%(default)s]")
    args = parser.parse_args()
    names = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--only: no stage is called {unknown[0]!r}; there are {', '.join(STAGES)}")
    names = names or [name for name, (_, _, quick) in STAGES.items() if quick or not args.quick]
    # Stages run in sessions of their own: an end from outside must pass through the code that ends them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        summary, good = table(run_stages(names, args.quick, 60 * args.budget_minutes))
    except KeyboardInterrupt:
        sys.exit("\nrun_tests: interrupted")
    print("\n" + summary, flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
