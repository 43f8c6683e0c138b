"""Builds hybrid_ep._core in this checkout, beside its sources, and the CUDA library where nvcc is found; or the C++
tests. Compiles what changed.

    python scripts/build_core.py                                     the module
    python scripts/build_core.py --configure                         look at compiler and headers, compile nothing
    python scripts/build_core.py --target cpp_tests [--variant mutants|address|thread]

The build is CMake's (CMakeLists.txt) in build/core-ABI; the tests are linked with what is compiled for the module. What
does not know Python is taken from the build for another Python, where there is one and nothing of it has changed. A
variant is another build, for tests alone, in build/tests/cpp-VARIANT. Read from the environment: CXX, CXXFLAGS,
LDFLAGS, MAX_JOBS, CUDA_HOME; HYBRID_EP_CUDA=0 leaves the CUDA library out,
HYBRID_EP_CUDA=1 makes a missing nvcc an error."""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("mutants", "address", "thread")
LOCK_TIMEOUT_S = 1800
# Targets whose code knows no Python: the same commands compile them, whichever Python the module is for.
WITHOUT_PYTHON = ("hep_host", "hep_engine", "hep_balance")
NINJA_FILES = (".ninja_log", ".ninja_deps")


def tool(name):
    """A program of this environment, else of PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        sys.exit(f"hybrid_ep: needs {name}; python -m pip install cmake ninja, or call make build, which does")
    return found


def folder_of(variant=""):
    """Where CMake builds: for this Python, or for tests alone."""
    if variant:
        return ROOT / "build" / "tests" / f"cpp-{variant}"
    return ROOT / "build" / f"core-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def configuration(folder, variant):
    """The command that configures, and anew where CMake would go on with a compiler or flags of another time."""
    facts = [sys.executable, *(os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "LDFLAGS"))]
    stamp, text = folder / "made_with.txt", "\n".join(facts)
    fresh = not stamp.is_file() or stamp.read_text() != text
    stamp.write_text(text)
    return [
        *(tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"),
        *(["--fresh"] if fresh else []),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DHEP_VARIANT={variant}"),
        *("-DHEP_IN_TREE=ON", "-DHEP_TESTS=ON"),
        f"-DHEP_MODULE={'OFF' if variant in ('mutants', 'thread') else 'ON'}",
        "--log-level=NOTICE",
    ]


@contextmanager
def alone_in(folder):
    """One build at a time in a folder; a second waits and finds everything made."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    sys.exit(f"hybrid_ep: another build in {folder} has run for {LOCK_TIMEOUT_S} s; end it, call again")
                time.sleep(0.1)
        yield


def objects_without_python(folder):
    return [path for name in WITHOUT_PYTHON for path in (folder / "CMakeFiles" / f"{name}.dir").rglob("*.o")]


def take_over(folder):
    """Of a build that has compiled nothing yet: the objects without Python of one for another Python, with what ninja
    wrote of them, by which it finds out what of them it can use: their commands, and when their sources changed."""
    if objects_without_python(folder):
        return
    for other in sorted(folder.parent.glob("core-*")):
        if other == folder or not objects_without_python(other):
            continue
        with alone_in(other):  # no object is half written
            for path in (*objects_without_python(other), *(other / name for name in NINJA_FILES)):
                mine = folder / path.relative_to(other)
                mine.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, mine)
        return


def build(target="", variant="", compile_it=True):
    """Exits where it cannot be built; what the compiler said stands above."""
    folder = folder_of(variant)
    with alone_in(folder):
        run(configuration(folder, variant))
        if not compile_it:
            return
        take_over(folder)
        run([tool("cmake"), "--build", str(folder), *(["--target", target] if target else [])])


def run(command):
    if status := subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode:
        sys.exit(status)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configure", action="store_true", help="look at compiler and headers, compile nothing")
    parser.add_argument("--target", default="", help="of CMake: cpp_tests, _core [the module, in place]")
    parser.add_argument("--variant", default="", choices=VARIANTS, help="injected bugs or a sanitizer, for tests alone")
    args = parser.parse_args()
    build(args.target, args.variant, not args.configure)


if __name__ == "__main__":
    main()
