"""Runs tests of tests/python on a core that is built with AddressSanitizer and UndefinedBehaviorSanitizer, then some on
the ordinary core with memory that malloc fills with rubbish.

    python scripts/python_asan.py [--build] [--junitxml FILE] [pytest's options and tests, from the root]

--build tests nothing; without tests named, those below are run.
The build is that of the C++ tests, build/tests/cpp-address, whose objects are used again; the module lies beside links
to the package's other files in build/tests/python-asan, so that the ordinary build stays as it is."""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tests" / "cpp-address"
PACKAGE = ROOT / "build" / "tests" / "python-asan"
TESTS = ROOT / "tests" / "python"

# Every binding and both ways to a plan, in few calls: seconds, not minutes.
SANITIZED = ["test_asan.py", "test_boundary.py", "test_boundary_pages.py", "test_bad_input.py", "test_sync_free.py"]
PERTURBED = ["test_boundary_tensors.py", "test_results.py"]
FILLED_WITH = "165"


def build():
    """The module; exits with what the compiler said where it does not build."""
    command = [sys.executable, ROOT / "scripts" / "build_core.py", "--variant", "address", "--target", "_core"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}python_asan: the sanitized core does not build")
    return BUILD / f"_core.{sysconfig.get_config_var('SOABI')}.so"


def lay_out(module):
    """A package of links to everything but the ordinary module."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    package = PACKAGE / "hybrid_ep"
    package.mkdir(parents=True)
    for path in (ROOT / "hybrid_ep").iterdir():
        if not path.name.startswith("_core.") and path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    (package / "_core.so").symlink_to(module)


def runtime(name):
    """The compiler's shared library."""
    compiler = os.environ.get("CXX", "c++").split()
    found = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"python_asan: {compiler[0]} has no {name}; install its sanitizer runtime, or set CXX=g++")
    return path


def pytest(names, environment, options, package):
    """The exit status; `package`: the folder whose hybrid_ep is tested, which -m puts in front of PYTHONPATH."""
    command = [sys.executable, "-m", "pytest", "-q", *options, *names]
    return subprocess.run(command, cwd=package, env={**os.environ, **environment}, check=False).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--junitxml", default="", help="JUnit report of the sanitized tests")
    parser.add_argument("--build", action="store_true", help="build the core, test nothing")
    args, chosen = parser.parse_known_args()
    module = build()
    if args.build:
        return
    lay_out(module)
    report = [f"--junitxml={Path(args.junitxml).resolve()}"] if args.junitxml else []
    sanitized = {
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        # libstdc++ first in the process too: without it ASan cannot see what the core throws.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        # Python and torch leave what the process frees by ending; a page edge is a test's own to watch.
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:detect_stack_use_after_return=0",
        "HYBRID_EP_TEST_EXAMPLES": "4",
    }
    # pytest runs elsewhere than its caller.
    chosen = [str(ROOT / word) if (ROOT / word.split("::")[0]).exists() else word for word in chosen]
    status = pytest(chosen or [next(TESTS.rglob(name)) for name in SANITIZED], sanitized, report, PACKAGE)
    if not chosen:
        rubbish = {"MALLOC_PERTURB_": FILLED_WITH, "PYTHONPATH": str(ROOT), "HYBRID_EP_TEST_EXAMPLES": "4"}
        status = pytest([next(TESTS.rglob(name)) for name in PERTURBED], rubbish, [], ROOT) or status
    print(f"python_asan: {'FAILED' if status else 'passed'}")
    sys.exit(1 if status else 0)


if __name__ == "__main__":
    main()
