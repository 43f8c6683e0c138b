"""What one GPU can show, in one command of under 9 minutes: build, inspection, tests, benchmarks, sanitizers.

    python scripts/gpu_check.py [--out FOLDER] [--minutes 8.5] [--skip tests,racecheck,...] [--wheels FOLDER]
    python scripts/gpu_check.py --peer deep_ep-hybrid=FOLDER [--peer deep_ep-v2=FOLDER ...]     times peers instead

Needs torch with CUDA, a C++20 compiler and nvcc (or a library that was built before); pytest and hypothesis for the
tests. On a machine without a network --wheels installs what is missing from a folder of wheels. What is missing then is
said and skipped, and so are the last steps when --minutes are over, which cut off a step under way: what is known best
elsewhere comes last. Prints one line a step and a summary, writes FOLDER/gpu_check.json and the output of every step
beside it, and exits with 1 if a step failed.

With --peer it builds, then times hybrid_ep and every peer named, each in processes of its own with build folders of
its own, on the same tokens and routing (scripts/gpu_peer.py), and prints the ratios of the same run. FOLDER holds the
peer's package deep_ep. One that cannot be imported or cannot take part is skipped, with its reason."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A rank alone and two virtual ranks, smallest shapes: every role runs, the sanitizer's slowness stays bearable.
SANITIZED = "test_examples and ([shape0- or [shape1-) and not loopback"
LEAST_S = 5.0  # what a step that begins must have left
# Tests in steps of their own: worlds of processes, which take turns on the device, and what is slow to start.
PROCESSES = ("tests/gpu/test_processes.py", "tests/gpu/test_travelling_processes.py", "tests/gpu/test_nvshmem.py")
EXPANDABLE = "tests/gpu/test_expandable.py"
WHEELS = ("pybind11", "cmake", "ninja", "pytest", "hypothesis", "pytest-timeout")


def environment_of():
    """The environment of the steps: checkout first, queues enough for 32 virtual ranks, kernels loaded at once."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
        "PYTHONUNBUFFERED": "1",
    }


def machine():
    """What the numbers belong to."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = list(torch.cuda.get_device_capability())
    asked = {
        "driver": ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"],
        "commit": ["git", "-C", str(ROOT), "rev-parse", "HEAD"],
    }
    for name, command in asked.items():
        if shutil.which(command[0]):
            found[name] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found


def shows_failure(line):
    """Whether a line of a step that did not end says that something failed: pytest's progress, a sanitizer's count."""
    return bool(
        re.fullmatch(r"[.sxX]*[FE][.sxXFE]*( +\[ *\d+%\])?", line.strip())
        or re.search(r"ERROR SUMMARY: [1-9]|: [1-9]\d* hazards? displayed|Race reported", line)
    )


class Steps:
    """Runs the steps one after another within the time that is left."""

    def __init__(self, out, seconds, skip):
        self.out, self.end, self.skip, self.results = out, time.monotonic() + seconds, skip, {}

    def run(self, name, command, limit_s, needs=None, env=None, skipped=None):
        """Whether it ran and passed. needs: why the step cannot run, if so; skipped(): why it did not, afterwards."""
        left = self.end - time.monotonic()
        if name in self.skip:
            needs = "left out with --skip"
        elif left < LEAST_S:
            needs = "no time left"
        if needs:
            self._say(name, "skipped", 0.0, needs)
            return False
        began, log = time.monotonic(), self.out / f"{name}.log"
        with log.open("w") as stream:
            try:
                status = subprocess.run(
                    list(map(str, command)),
                    cwd=ROOT,
                    env=env or environment_of(),
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=min(limit_s, left),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = "out of time"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = skipped and status == 0 and skipped()
        result = "skipped" if reason else "passed" if status == 0 else f"FAILED ({status})"
        if status == "out of time" and left < limit_s and not any(map(shows_failure, lines)):
            result, reason = "cut off", "no time left; nothing had failed until then"
        self._say(name, result, time.monotonic() - began, reason or (lines[-1][:120] if lines else ""))
        return result == "passed"

    def _say(self, name, result, seconds, note):
        self.results[name] = {"result": result, "seconds": round(seconds, 1), "note": note}
        print(f"{name:<12} {result:<20} {seconds:>7.1f} s  {note}", flush=True)


def missing(*modules):
    import importlib.util

    absent = [m for m in modules if importlib.util.find_spec(m) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def build(steps, wheels=None):
    python = sys.executable
    if wheels:
        steps.run("wheels", [python, "-m", "pip", "install", "--no-index", "--find-links", wheels, *WHEELS], 120)
    # Of which the kernels over NVSHMEM, where its package is, take as long again: several processes use them here.
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(
                steps.run,
                "core",
                [python, "scripts/build_core.py"],
                240,
                missing("pybind11"),
                {**environment_of(), "HYBRID_EP_CUDA": "0"},
            ),
            pool.submit(steps.run, "cuda", [python, "scripts/build_cuda.py"], 240, no_compiler()),
        ]
        for one in both:
            one.result()


def no_compiler():
    """Why no CUDA library can be built here, or None."""
    find = subprocess.run(
        [sys.executable, "scripts/build_cuda.py", "--find"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return find.stderr.strip() or None


def find_sanitizer():
    """compute-sanitizer of PATH, else of the toolkit."""
    home = environment_of().get("CUDA_HOME", "/usr/local/cuda")
    places = [os.environ.get("PATH", ""), f"{home}/bin", f"{home}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run_steps(steps, wheels):
    python = sys.executable
    build(steps, wheels)
    tools = subprocess.run(
        [
            python,
            "-c",
            "import sys; sys.path.insert(0, 'scripts'); import cubin_check; sys.exit(not cubin_check.find_tools())",
        ],
        cwd=ROOT,
        check=False,
    ).returncode
    steps.run("cubins", [python, "scripts/cubin_check.py"], 60, "no cuobjdump and nvdisasm" if tools else None)
    no_tests = missing("pytest", "hypothesis", "pytest_timeout")
    pytest = ["-m", "pytest", "-m", "gpu", "--timeout=120", "--maxfail=5", "-q"]
    apart = [f"--ignore={path}" for path in (*PROCESSES, EXPANDABLE)]
    steps.run("tests", [python, *pytest, "tests/gpu", *apart], 200, no_tests)
    for name, script in (("bench", "gpu_bench"), ("stages", "gpu_bench_stages")):
        steps.run(name, [python, f"scripts/{script}.py", "--out", steps.out / f"{script}.json"], 120)
    litmus = [python, "scripts/gpu_litmus.py", "--rounds", "200000", "--seconds", "20", "--load"]
    steps.run("litmus", [*litmus, "--json", steps.out / "gpu_litmus.json"], 60, no_compiler())
    steps.run("processes", [python, *pytest, *PROCESSES], 180, no_tests)
    sanitizer = find_sanitizer()
    few = {**environment_of(), "HYBRID_EP_TEST_EXAMPLES": "2"}
    for tool in ("memcheck", "racecheck"):
        command = [sanitizer, f"--tool={tool}", "--error-exitcode=9", "--launch-timeout=60", python, *pytest]
        steps.run(
            tool,
            [*command, "tests/gpu", "-k", SANITIZED],
            90,
            no_tests or (None if sanitizer else "no compute-sanitizer on PATH or in CUDA_HOME"),
            few,
        )
    steps.run("expandable", [python, *pytest, "--timeout=170", EXPANDABLE], 180, no_tests)
    steps.run("moe", [python, "scripts/gpu_bench_moe.py", "--json", steps.out / "gpu_bench_moe.json"], 60)


def time_peers(steps, peers, *options):
    """Ours, then the peers; {name: what gpu_peer.py wrote}. options: of gpu_peer.py."""
    found = {}
    for name, folder in {"hybrid_ep": None, **peers}.items():
        out = steps.out / f"peer-{name}.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "scripts/gpu_peer.py", name, "--out", out, *options]
        said = lambda out=out: json.loads(out.read_text()).get("skipped")  # noqa: E731
        if steps.run(name, [*command, *(["--path", folder] if folder else [])], 200, skipped=said):
            found[name] = json.loads(out.read_text())
    return found


def peer_table(found):
    """Lines: by shape, microseconds of the API and of kernels, and ours over the peer's of the same shape."""
    ours = {(r["dtype"], r["num_sms"]): r for r in found.get("hybrid_ep", {}).get("rows", ())}
    yield f"{'who':<16} {'dtype':<5} {'SMs':>4} {'verb':<9} {'API us':>10} {'kernels us':>11} {'API ours/peer':>14}"
    for name, said in found.items():
        for row in said["rows"]:
            key = row["dtype"], row["num_sms"]
            if why := row.get("skipped") or row.get("error"):
                yield f"{name:<16} {key[0]:<5} {key[1]:>4} {why}"
                continue
            for verb in ("dispatch", "combine"):
                times, base = row[verb], ours.get(key, {}).get(verb)
                kernels = "-" if times["kernel_us"] is None else f"{times['kernel_us']:.1f}"
                ratio = "" if name == "hybrid_ep" or not base else f"{base['api_us'] / times['api_us']:.3f}"
                yield f"{name:<16} {key[0]:<5} {key[1]:>4} {verb:<9} {times['api_us']:>10.1f} {kernels:>11} {ratio:>14}"


def peer_of(text):
    name, _, folder = text.partition("=")
    if not name.startswith("deep_ep-") or not Path(folder).is_dir() or not folder:
        raise argparse.ArgumentTypeError(f"{text!r}: give deep_ep-hybrid=FOLDER, deep_ep-v1=... or deep_ep-v2=...")
    return name, Path(folder).resolve()


def verdict(results):
    """(what the last line says, exit status); a step that did not run is no failure and no silence."""
    failed = [name for name, step in results.items() if step["result"].startswith("FAILED")]
    said = f"FAILED: {', '.join(failed)}" if failed else "passed"
    for result, words in (("cut off", "cut off by the clock"), ("skipped", "did not run")):
        if names := [name for name, step in results.items() if step["result"] == result]:
            said += f"; {words}: {', '.join(names)}"
    return said, int(bool(failed))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--skip", default="", help="steps, separated by commas")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help=f"wheels of {', '.join(WHEELS)} to install")
    parser.add_argument(
        "--peer",
        action="append",
        type=peer_of,
        default=[],
        metavar="NAME=FOLDER",
        help="time this peer, and ours, instead of the checks",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = machine()
    if "gpu" not in found:
        sys.exit("gpu_check: torch sees no CUDA device here; scripts/run_tests.py --only cuda checks what needs none")
    print(json.dumps(found), flush=True)
    steps = Steps(args.out, 60 * args.minutes, set(filter(None, args.skip.split(","))))
    if args.peer:
        build(steps, args.wheels)
        print("\n".join(peer_table(time_peers(steps, dict(args.peer)))))
    else:
        run_steps(steps, args.wheels)
    (args.out / "gpu_check.json").write_text(json.dumps({"machine": found, "steps": steps.results}, indent=1) + "\n")
    said, status = verdict(steps.results)
    print(f"gpu_check: {said}; {args.out}")
    sys.exit(status)


if __name__ == "__main__":
    main()
