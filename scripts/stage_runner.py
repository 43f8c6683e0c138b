"""How a stage of run_tests.py runs its commands: within a deadline, in sessions that end with it, output as it
comes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_core
from stage_result import Result, result_of

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests"
KILL_AFTER_S = 20
SHM = "/dev/shm"


class StageTimeout(Exception):
    """A stage's time is over; its processes are gone."""


class Ended(Exception):
    """Nobody waits for what is being run any more."""


class Runner:
    """Runs the commands of a stage within the stage's deadline. cores: that they may use at once."""

    def __init__(self, quick, cores=2):
        self.quick, self.cores = quick, cores
        self.deadline = time.monotonic()
        self.variables = {}  # of the commands' environment, beside those of all stages
        self.within = []  # words before every command: what it runs in (own_shm)
        self.lock = threading.Lock()
        self.process, self.ended = None, False
        self.cpu_s = 0.0  # of the commands that have ended, with all that these started and waited for

    def show(self, text):
        print(text, end="", flush=True)

    def late(self):
        """A runner that works at the same time, and keeps what it has to say."""
        return LateRunner(self)

    def started(self, process):
        with self.lock:
            self.process = process
        if self.ended:
            end_group(process)

    def end(self):
        """From another thread: what runs is ended, and nothing more begins."""
        self.ended = True
        with self.lock:
            process = self.process
        if process:
            end_group(process)

    def run(self, command, quiet=False):
        """(exit status, last line printed). Output is shown as it comes, with `quiet` only on failure."""
        if self.ended:
            raise Ended
        self.show("+ " + " ".join(map(str, command)) + "\n")
        # A session of its own: whatever a test leaves behind ends with the stage.
        process = subprocess.Popen(
            [*self.within, *map(str, command)],
            cwd=ROOT,
            env={**test_environment(), **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.started(process)
        lines = []

        def read():
            for line in process.stdout:
                lines.append(line)
                if not quiet:
                    self.show(line)

        # A thread reads, so that a stray grandchild that keeps the pipe open cannot hold up the stage.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        # So does one that waits and leaves the process to be waited for: who has waited cannot ask for its CPU time.
        ends = threading.Thread(target=self.count_cpu, args=(process.pid,), daemon=True)
        ends.start()
        ends.join(max(1.0, self.deadline - time.monotonic()))
        try:
            if ends.is_alive():
                raise StageTimeout
            status = process.wait()
        finally:
            end_group(process)
            reader.join(KILL_AFTER_S)
        if quiet and status:
            self.show("".join(lines))
        return status, last_line(lines)

    def count_cpu(self, pid):
        """Waits for the end of a process, which stays to be waited for."""
        with contextlib.suppress(OSError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            # user, system, and both of the children that it has waited for; behind the name, which may hold anything
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            self.cpu_s += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def pytest(self, folder, marker="", more=(), name=None):
        """`name`: of its report, where two runs of a folder may be under way at once."""
        report = BUILD / f"{name or folder.replace('/', '-')}.xml"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.unlink(missing_ok=True)
        color = "yes" if sys.stdout.isatty() else "no"
        command = [sys.executable, "-m", "pytest", folder, f"--junitxml={report}", f"--color={color}", *more]
        status, last = self.run([*command, *(["-m", marker] if marker else [])])
        return result_of(status, report, re.sub(r"\x1b\[[0-9;]*m", "", last).strip("= "))

    def build_cpp(self, variant):
        """Whether the C++ tests are built: of the product (""), with injected bugs or with a sanitizer."""
        chosen = ["--variant", variant] if variant else []
        command = [sys.executable, "scripts/build_core.py", "--target", "cpp_tests", *chosen]
        return self.run(command, quiet=True)[0] == 0

    def ctest(self, name, variant):
        """Builds and runs the C++ tests of one build folder."""
        if not self.build_cpp(variant):
            return Result("FAILED", note="does not build")
        report = BUILD / f"{name}.xml"
        report.unlink(missing_ok=True)
        # Two at once, where it may: one program waits for deadlines most of its time, another computes.
        status, last = self.run(
            [
                build_core.tool("ctest"),
                "--test-dir",
                build_core.folder_of(variant),
                "--output-on-failure",
                "--no-tests=error",
                # A report keeps the ends of outputs, where the counts stand.
                "--test-output-truncation",
                "head",
                "--parallel",
                self.cores,
                "--timeout",
                "600",
                "--output-junit",
                report,
            ]
        )
        return result_of(status, report, last if status else "")


class LateRunner(Runner):
    """What it has to say is shown later, by another."""

    def __init__(self, beside):
        super().__init__(beside.quick, beside.cores)
        self.deadline, self.variables, self.within, self.said = beside.deadline, beside.variables, beside.within, []

    def show(self, text):
        self.said.append(text)


def at_once(runner, *parts):
    """The results of functions of a runner that take a core each, run at the same time, where the runner has the cores;
    what the later ones print is shown after the first's."""
    if runner.cores == 1:
        return [part(runner) for part in parts]
    runners = [runner, *(runner.late() for _ in parts[1:])]
    with ThreadPoolExecutor(len(parts)) as pool:
        working = [pool.submit(part, its_own) for part, its_own in zip(parts, runners, strict=True)]
        try:
            return [work.result() for work in working]
        except BaseException:
            for its_own in runners:
                its_own.end()
            raise
        finally:
            for late in runners[1:]:
                runner.show("".join(late.said))
                runner.cpu_s += late.cpu_s


def own_shm():
    """Words before a command that give it and what it starts a /dev/shm of their own, empty and as large as this one;
    none where the system does not let (it takes root, and util-linux)."""
    facts = os.statvfs(SHM)
    mount = f'mount -t tmpfs -o size={facts.f_blocks * facts.f_frsize} tmpfs {SHM} && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    try:
        tried = subprocess.run([*words, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return words if tried.returncode == 0 else []


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
    """Ends what is left of a command and all it started: an interrupt for a clean end, then kill. Where interrupts are
    ignored, as in what a shell has started in the background, it is the kill."""
    for number in (signal.SIGINT, signal.SIGKILL) if process.poll() is None else (signal.SIGKILL,):
        signal_group(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_AFTER_S)
