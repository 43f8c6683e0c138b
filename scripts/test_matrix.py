"""tests/megatron with each supported megatron-core, newest patch of each, both hooks, EP 1, 2 and 4.

One environment a Python holds torch, the core and the tools (.venvs/pyX.Y); one a version adds nothing but
its megatron-core to it (.venvs/pyX.Y-megatron-V), so that torch is on the disk once a Python.

    python scripts/test_matrix.py [--versions 0.16,0.19] [--python 3.12] [-- pytest arguments]"""

import argparse
import os
import shutil
import sys
import time

import setup_env
from stage_runner import Runner, StageTimeout

ROOT = setup_env.ROOT
# megatron-core: Pythons to try in this order. Releases before 0.17 are what Python 3.10 and 3.11 get.
VERSIONS = {
    "0.16": ("3.11", "3.10", "3.12"),
    "0.17": ("3.12", "3.13"),
    "0.18": ("3.12", "3.13"),
    "0.19": ("3.12", "3.13"),
}
# What megatron-core imports and does not ask for; see the extra `megatron` in pyproject.toml.
COMPANIONS = ("pyyaml>=6,<7", "triton>=3.4,<4")
PYTEST_TIMEOUT_S = 3600


def choose_python(version, wanted):
    """The first Python of this machine that the version of megatron-core has a release for."""
    choices = [p for p in VERSIONS[version] if not wanted or p == wanted]
    if not choices:
        raise setup_env.SetupError(
            f"megatron-core {version} runs on Python {', '.join(VERSIONS[version])}, "
            f"not on {wanted}; leave --python out."
        )
    for python in choices:
        try:
            setup_env.choose_python(python)
            return python
        except setup_env.SetupError as error:
            problem = error
    raise problem


def make_base(python):
    """The environment of one Python that all versions of megatron-core share (minutes, where it is new)."""
    return setup_env.ensure(
        ROOT / ".venvs" / f"py{python}", python, "train,test", os.environ.get("HYBRID_EP_TORCH_INDEX", "")
    )


def make_environment(version, python):
    """The interpreter of the environment for one megatron-core, made anew each time (seconds)."""
    base = make_base(python)
    folder = ROOT / ".venvs" / f"py{python}-megatron-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    if shutil.which("uv"):
        creation = ["uv", "venv", "--seed", "--python", base.python, folder]
    else:
        creation = [base.python, "-m", "venv", folder]
    setup_env.run(creation, "creating the virtual environment", 300)
    library = f"lib/python{python}/site-packages"
    # addsitedir, not a bare path: it also runs the .pth file that makes the editable package importable.
    shared = str(base.folder / library)
    (folder / library / "base.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    # pip sees the base's packages as installed, hence takes megatron-core alone.
    interpreter = folder / "bin" / "python"
    pip_install = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    what = f"megatron-core=={version}.*"
    setup_env.run([*pip_install, what, *COMPANIONS], f"installing {what}")
    return interpreter


def run_version(version, python, pytest_arguments):
    """(exit status, pytest's closing line) of tests/megatron in the environment of one version."""
    interpreter = make_environment(version, python)
    runner = Runner(quick=False)
    runner.deadline = time.monotonic() + PYTEST_TIMEOUT_S
    runner.run([interpreter, "-c", "from importlib.metadata import version as v; print(v('megatron-core'))"])
    status, last = runner.run([interpreter, "-m", "pytest", "tests/megatron", "-q", *pytest_arguments])
    return status, last.strip("= ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default=",".join(VERSIONS), help="of megatron-core [%(default)s]")
    parser.add_argument("--python", default="", choices=("", *setup_env.VERSIONS), help="this Python only")
    parser.add_argument(
        "--everyday",
        action="store_true",
        help="the steps of make test, and only what may differ from version to version",
    )
    parser.add_argument("--prepare", action="store_true", help="make the Pythons' environments, test nothing")
    parser.add_argument("pytest_arguments", nargs="*", help="handed to pytest, after --")
    args = parser.parse_args()
    if args.everyday:
        args.pytest_arguments = ["-m", "not version_free", *args.pytest_arguments]
    else:
        os.environ["HYBRID_EP_TEST_MATRIX"] = "1"  # tests of parity train longer
    versions = [version.strip() for version in args.versions.split(",")]
    if unknown := [version for version in versions if version not in VERSIONS]:
        parser.error(f"--versions: {unknown[0]!r} is not supported; there are {', '.join(VERSIONS)}")
    if args.prepare:
        try:
            for python in {choose_python(version, args.python) for version in versions}:
                make_base(python)
        except setup_env.SetupError as error:
            sys.exit(f"test_matrix: {error}")
        return
    rows, failed = [], False
    for version in versions:
        start = time.monotonic()
        try:
            python = choose_python(version, args.python)
            print(f"\n=== megatron-core {version}, Python {python}", flush=True)
            status, last = run_version(version, python, args.pytest_arguments)
        except setup_env.SetupError as error:
            python, status, last = "-", 1, str(error)
        except StageTimeout:
            status, last = 1, f"stopped after {PYTEST_TIMEOUT_S} s"
        failed = failed or status != 0
        verdict = "FAILED" if status else "passed"
        rows.append(f"{version:<14} {python:<7} {verdict:<7} {time.monotonic() - start:>8.1f}  {last}")
    header = f"{'megatron-core':<14} {'python':<7} {'result':<7} {'seconds':>8}  pytest"
    print("\n" + "\n".join([header, *rows]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
