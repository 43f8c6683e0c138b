"""All checks and tests, stage after stage, and a table of what passed at the end. Exits with 1 if any stage failed.
Most of them wait for one process at a time, hence they run two at a time (TOGETHER, stage_pairs.py), while what later
ones have to download and build is made on what the two leave of the cores (build_ahead.py). Those that look at all of
/dev/shm have one of their own; where the system gives them none they run alone.

    python scripts/run_tests.py [--only lint,cpp,python] [--quick] [--budget-minutes 38]

Runs in the Python of the environment that scripts/setup_env.py made (`make test` does both)."""

import argparse
import functools
import signal
import sys
import time

from build_ahead import Ahead
from stage_pairs import two_at_a_time
from stage_result import Result, result_of
from stage_runner import BUILD, ROOT, LateRunner, Runner, StageTimeout, at_once, own_shm


def has_tests(folder):
    return any((ROOT / folder).rglob("test_*.py"))


# ---- the stages


def lint(runner):
    """Likely bugs, and the layout of Python and C++ files."""
    if runner.run([sys.executable, "-m", "ruff", "check", "."])[0]:
        return Result("FAILED", note="ruff check")
    if runner.run([sys.executable, "-m", "ruff", "format", "--check", "."])[0]:
        return Result("FAILED", note="run make format")
    if runner.run([sys.executable, "scripts/format_cpp.py", "--check"])[0]:
        return Result("FAILED", note="run make format")
    return Result("passed")


def layers(runner):
    status, last = runner.run([sys.executable, "scripts/check_layers.py"])
    return Result("FAILED" if status else "passed", note=last.removeprefix("check_layers: "))


def types(runner):
    """mypy over the packages, and the types of the compiled core against the core that is built."""
    if runner.run([sys.executable, "-m", "mypy"])[0]:
        return Result("FAILED", note="mypy")
    stale = runner.run([sys.executable, "scripts/core_stubs.py", "--check"])[0]
    return Result("FAILED" if stale else "passed", note="hybrid_ep/_core.pyi is stale" if stale else "")


def cpp(runner):
    return runner.ctest("cpp", "")


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
    import test_matrix

    try:
        test_matrix.choose_python(OLDEST_MEGATRON, "")
    except setup_env.SetupError as error:
        return Result("skipped", note=str(error))
    status, last = runner.run(oldest("--prepare"))
    if status:
        return Result("FAILED", note=f"its environment cannot be made: {last.removeprefix('test_matrix: ')}")
    status, last = runner.run(oldest("--everyday"))
    return Result("FAILED" if status else "passed", note=last)


def docs(runner):
    """The site, warnings as errors: dead links between pages and docstrings that do not render are failures. Then every
    page in a browser, where there is one or apt brings one."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html"]
    if runner.run(command)[0]:
        return Result("FAILED")
    status, _ = runner.run([sys.executable, "scripts/site_check.py", "docs/_build/html"])
    if status == 2:
        return Result("passed", note="not looked at: no Chromium")
    return Result("FAILED" if status else "passed", note="looked at in Chromium")


def find_nvcc(runner):
    """(nvcc, None), installed if it can be, or (None, why not)."""
    import build_cuda
    import cuda_packages

    home, why_not = cuda_packages.find_toolkit(runner.run)
    if why_not:
        return None, why_not
    if home:
        runner.variables["CUDA_HOME"] = str(home)
    return build_cuda.find_nvcc(home)  # none where what was installed does not run here


def rail_of_cuda(runner, nvcc):
    """(build_cuda's flags for the kernels over NVSHMEM, why they are not compiled)."""
    import cuda_packages

    nvshmem, why_not = cuda_packages.find_nvshmem(runner.run, nvcc)
    flags = ["--nvshmem", "all", "--nvshmem-home", nvshmem] if nvshmem else ["--no-nvshmem"]
    return flags, why_not


INTERPRETED = ["scripts/build_cuda.py", "--interpreted"]


def cuda(runner):
    """Compiles the CUDA library and the kernels over NVSHMEM for both architectures, inspects the code of all, runs
    tests/gpu, which skip without a GPU."""

    nvcc, why_not = find_nvcc(runner)
    if not nvcc:
        return Result("skipped", note=why_not)
    rail, no_nvshmem = rail_of_cuda(runner, nvcc)
    if runner.run([sys.executable, "scripts/build_cuda.py", *rail])[0]:
        return Result("FAILED", note="does not build")
    if runner.run([sys.executable, "-c", "from hybrid_ep.runtime import devices; devices.load()"])[0]:
        return Result("FAILED", note="does not load")  # which needs no driver
    inspections = {"": []}
    if not no_nvshmem:
        inspections["over NVSHMEM "] = ["--rail", "nvshmem"]
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
    notes += [] if not no_nvshmem else [f"kernels over NVSHMEM not compiled: {no_nvshmem}"]
    result.note = "; ".join([*notes, result.note])
    return result


def ptx(runner):
    """The CUDA library's PTX, executed on the CPU by an interpreter (docs/ptx_machine.md): the interpreter's own tests,
    tests of tests/gpu, and planted bugs, which must be noticed."""
    nvcc, why_not = find_nvcc(runner)
    if not nvcc:
        return Result("skipped", note=why_not)
    if runner.run([sys.executable, *INTERPRETED])[0]:
        return Result("FAILED", note="does not build")
    mutants = [sys.executable, "tests/ptx/mutants.py", "--everyday"]
    everyday = ["--ptx-machine", "--ptx-everyday"]
    of_hopper, (of_machine, of_blackwell, (status, note)) = at_once(
        runner,
        lambda own: own.pytest("tests/gpu", "", everyday),
        lambda own: (
            own.pytest("tests/ptx"),
            own.pytest("tests/gpu", "", [*everyday, "--ptx-target", "100"], "tests-gpu-sm_100"),
            own.run(mutants),
        ),
    )
    results = [of_machine, of_hopper, of_blackwell]
    status = status or any(result.status == "FAILED" for result in results)
    counts = tuple(map(sum, zip(*(result.counts for result in results), strict=True)))
    return Result("FAILED" if status else "passed", counts, note)


def slurm(runner):
    return runner.pytest("tests/slurm") if has_tests("tests/slurm") else Result("skipped", note="no tests")


# name: (function, minutes at most, part of --quick). Those that build nothing come first: see BUILDS.
STAGES = {
    "lint": (lint, 2, True),
    "layers": (layers, 2, True),
    "types": (types, 5, True),
    "docs": (docs, 3, False),
    "python": (python, 40, True),
    "megatron": (megatron, 25, True),
    "megatron-oldest": (megatron_oldest, 25, False),
    "slurm": (slurm, 15, False),
    "cpp": (cpp, 10, True),
    "cpp-mutants": (lambda runner: runner.ctest("cpp-mutants", "mutants"), 10, False),
    "cpp-tsan": (lambda runner: runner.ctest("cpp-tsan", "thread"), 15, False),
    "cpp-asan": (lambda runner: runner.ctest("cpp-asan", "address"), 15, False),
    "python-asan": (python_asan, 15, False),
    "cuda": (cuda, 15, False),
    "ptx": (ptx, 25, False),
}

# Which stages run two at a time, in the order in which they begin: the longest first, so that none is left alone with
# it at the end.
TOGETHER = (
    ("docs", "types", "layers", "lint"),
    ("python", "megatron", "megatron-oldest", "slurm", "cpp-asan", "cuda", "ptx", "cpp-tsan", "cpp-mutants", "cpp",
     "python-asan"),
)  # fmt: skip
# Beside two others: its jobs wait for Slurm's daemons.
BESIDE = {"slurm"}
# Whose tests look at all of /dev/shm, where another's segments come and go.
LOOK_AT_SHM = {"python", "megatron", "megatron-oldest"}
# What has to end before a stage begins, which uses what that has made, would write the same files, or brings something
# that the tests of the others must not see come: the CUDA library in hybrid_ep/, Slurm's programs.
AFTER = {
    "slurm": ("python",),
    "cuda": ("python", "megatron", "megatron-oldest"),
    "ptx": ("cuda",),
    "python-asan": ("cpp-asan",),
}


# ---- what stages build, made ahead of them where there are stages before them


def build_asan(runner):
    """The programs of cpp-asan and the module of python-asan, which lie in one folder."""
    runner.build_cpp("address")
    runner.run([sys.executable, "scripts/python_asan.py", "--build"])


def build_cuda_objects(runner):
    """Of `cuda` and of `ptx`. The stage links the library: tests of others do not see it come."""
    nvcc, _ = find_nvcc(runner)
    if nvcc:
        runner.run([sys.executable, "scripts/build_cuda.py", "--compile-only", *rail_of_cuda(runner, nvcc)[0]])
        runner.run([sys.executable, *INTERPRETED])


# What is made for a stage is what the stage itself makes, so that it finds nothing left to do.
BUILDS = {
    "megatron-oldest": lambda runner: runner.run(oldest("--prepare")),
    "cpp": lambda runner: runner.build_cpp(""),
    "cpp-mutants": lambda runner: runner.build_cpp("mutants"),
    "cpp-tsan": lambda runner: runner.build_cpp("thread"),
    "cpp-asan": build_asan,
    "cuda": build_cuda_objects,
}


def run_stages(names, quick, budget_s):
    """{stage: Result}; every stage runs, whatever the others did, until the budget is spent."""
    ahead = Ahead({name: BUILDS[name] for name in names[1:] if name in BUILDS})
    try:
        return run_each(names, ahead, quick, budget_s)
    finally:
        ahead.end()


def groups(names, alone=()):
    """The names, those of each of TOGETHER that are among them as one group where its first stands, without `alone`."""
    left, found = list(names), []
    while left:
        together = next((group for group in TOGETHER if left[0] in group and left[0] not in alone), (left[0],))
        found.append([name for name in together if name in left and (name == left[0] or name not in alone)])
        left = [name for name in left if name not in found[-1]]
    return found


def run_each(names, ahead, quick, budget_s):
    shm = own_shm()
    work = functools.partial(run_stage, ahead, time.monotonic() + budget_s, shm)
    results = {}
    for group in groups(names, alone=() if shm else LOOK_AT_SHM):
        if len(group) > 1:
            print(f"\n=== {', '.join(group)}, two at a time; what they print is shown as they end", flush=True)
            runners = functools.partial(late_runner, quick)
            results |= two_at_a_time(group, AFTER, BESIDE, runners, work, ahead.end)
        else:
            print(f"\n=== {group[0]}", flush=True)
            results[group[0]] = work(group[0], Runner(quick))
    return {name: results[name] for name in names}


def late_runner(quick, cores):
    return LateRunner(Runner(quick, cores))


def run_stage(ahead, end, shm, name, runner):
    function, minutes, _ = STAGES[name]
    start = time.monotonic()
    if start >= end:
        return Result("FAILED", note="not run: the time budget is spent")
    runner.deadline = min(end, start + 60 * minutes)
    runner.within = shm if name in LOOK_AT_SHM else []
    limit_s = runner.deadline - start
    try:
        ahead.leave_to(name, runner.deadline)
        result = function(runner)
    except StageTimeout:
        result = Result("FAILED", note=f"stopped after {limit_s:.0f} s")
    result.seconds, result.cpu_s = time.monotonic() - start, runner.cpu_s
    return result


def table(results, seconds):
    """The summary, one line a stage; seconds: that all took."""
    lines = [
        f"{'stage':<15} {'result':<8} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8} {'cpu s':>7}  note"
    ]
    for name, result in results.items():
        counts = [str(n) for n in result.counts] if result.counts else ["-"] * 3
        lines.append(
            f"{name:<15} {result.status:<8} {counts[0]:>7} {counts[1]:>7} {counts[2]:>7} "
            f"{result.seconds:>8.1f} {result.cpu_s:>7.1f}  {result.note}".rstrip()
        )
    failed = [name for name, result in results.items() if result.status == "FAILED"]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all stages passed"
    return "\n".join([*lines, f"run_tests: {verdict} ({seconds:.0f} s)"]), not failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        start = time.monotonic()
        results = run_stages(names, args.quick, 60 * args.budget_minutes)
        summary, good = table(results, time.monotonic() - start)
    except KeyboardInterrupt:
        sys.exit("\nrun_tests: interrupted")
    print("\n" + summary, flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
