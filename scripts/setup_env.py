"""Makes everything that the Makefile's commands need on a bare machine: a virtual environment in .venv, the
dependencies, the compiled core. Does nothing when nothing changed.

Steps, each remembered by a hash of what it was made from, so that a second call starts at once. Where dependencies are
to be installed, the disk is looked at before the first:
  1. choose a Python (3.10 to 3.14; from 3.12 on the newer megatron-core releases exist);
  2. create the environment: venv, else uv, else virtualenv;
  3. build the core, after a look at the compiler: one that is missing is reported in seconds;
  4. meanwhile install the dependencies, by uv when it is on PATH, else by pip, then the package in editable mode.

Environment: HYBRID_EP_PYTHON (a version such as 3.12, or a path) chooses the Python; HYBRID_EP_TORCH_INDEX
(an index URL) is where torch comes from, for example an index of CPU-only wheels. Any Python >= 3.7 can run
this file; it uses the standard library alone."""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Best first: megatron.training 0.19 does not start on 3.14, where argparse refuses some of its flags.
VERSIONS = ("3.13", "3.12", "3.14", "3.11", "3.10")
BUILD_REQUIREMENTS = (
    "scikit-build-core>=1.1,<2",
    "pip>=23.1",
    "hatch-fancy-pypi-readme>=25",
    "pybind11>=3,<4",
    "cmake>=3.24,<5",
    "ninja>=1.11,<2",
    "tomli>=2; python_version < '3.11'",
)
DEFAULT_EXTRAS = "megatron,train,bench,balance,docs,test"
LOCK_TIMEOUT_S = 1800
NEEDED_DISK_GB = 9
STAMP_NAME = "hybrid_ep.json"

# Run by each candidate: what it is, and whether environments and extension modules can be made with it.
PROBE = """
import importlib.util, json, os, platform, sys, sysconfig
print(json.dumps({
    "path": sys.executable,
    "version": "%d.%d" % sys.version_info[:2],
    "full": platform.python_version(),
    "ok": platform.python_implementation() == "CPython" and sys.maxsize > 2**32
          and sys.version_info.releaselevel == "final" and not sysconfig.get_config_var("Py_GIL_DISABLED"),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
    "virtualenv": importlib.util.find_spec("virtualenv") is not None,
    "headers": os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h"))}))
"""

# Run by the environment's Python: the requirements of a pyproject.toml and of its extras, one a line.
REQUIREMENTS = """
import sys
try:
    import tomllib
except ImportError:
    import tomli as tomllib
with open(sys.argv[1], "rb") as text:
    project = tomllib.load(text)["project"]
extras = [project["optional-dependencies"][extra] for extra in sys.argv[2].split(",") if extra]
print("\\n".join(sum(extras, project["dependencies"])))
"""


class SetupError(Exception):
    """What is wrong and what to do about it, in a sentence for the user."""


def say(text):
    print("hybrid_ep set-up: " + text, flush=True)


def call(command, timeout_s):
    """The exit status of a command, run in the root of the checkout with its output shown."""
    return subprocess.run(command, cwd=str(ROOT), stdin=subprocess.DEVNULL, timeout=timeout_s).returncode


def run(command, what, timeout_s=3600):
    """Runs a command. SetupError, which names what it was for, if it fails."""
    try:
        status = call(command, timeout_s)
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"{what} took longer than {timeout_s} s and was stopped; check the network and call again"
        ) from None
    if status:
        raise SetupError(f"{what} failed (see above); the command was: {' '.join(map(str, command))}")


# ---- the choice of a Python


def candidate_paths():
    """Every place a Python may be: PATH, pyenv's versions, uv's."""
    for version in VERSIONS:
        yield shutil.which("python" + version)
    yield shutil.which("python3")
    yield shutil.which("python")
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv" / "python")
    for folder in (pyenv / "versions", uv):
        for path in sorted(folder.glob("*/bin/python3"), reverse=True):
            yield str(path)


def probe(path):
    """What PROBE says of the Python at a path, or None if it does not run (a dead pyenv shim, say)."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
        result = subprocess.run(
            [path, "-c", PROBE], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30
        )
        if result.returncode == 0:
            return json.loads(result.stdout.decode())
    return None


def can_make_environment(probed):
    return bool(probed["venv"] or shutil.which("uv") or probed["virtualenv"])


def complaint(probed):
    """Why a Python of a suitable version cannot be used, or an empty string."""
    version = probed["version"]
    if not probed["headers"]:
        return (
            f"{probed['path']} (Python {version}) lacks Python.h; Debian/Ubuntu: apt-get install "
            f"python{version}-dev; RHEL/Fedora: dnf install python{version}-devel"
        )
    if not can_make_environment(probed):
        return (
            f"{probed['path']} (Python {version}) cannot make virtual environments; Debian/Ubuntu: "
            f"apt-get install python{version}-venv; or install uv and put it on PATH"
        )
    return ""


def choose_python(wanted=""):
    """Facts of the best usable Python; of the wanted one if a version or a path is given."""
    is_path = bool(wanted) and wanted not in VERSIONS
    paths = [wanted] if is_path else [path for path in candidate_paths() if path]
    known = {}
    for path in paths:
        probed = probe(path)
        if probed and probed["path"] not in known:
            known[probed["path"]] = probed
    versions = (wanted,) if wanted in VERSIONS else VERSIONS
    suitable = [f for f in known.values() if f["ok"] and f["version"] in versions]
    suitable.sort(key=lambda f: VERSIONS.index(f["version"]))
    for probed in suitable:
        if not complaint(probed):
            return probed
    if suitable:
        raise SetupError(complaint(suitable[0]) + ".")
    found = ", ".join(sorted({f["full"] for f in known.values()})) or "none"
    range_text = f"Python {wanted}" if wanted else "a CPython 3.10 to 3.14 (64 bit, 3.12 or newer preferred)"
    raise SetupError(
        f"needs {range_text} and found: {found}. Install one (Debian/Ubuntu: apt-get install "
        "python3 python3-dev python3-venv; pyenv install 3.12; uv python install 3.12) or name "
        "one with HYBRID_EP_PYTHON=/path/to/python."
    )


# ---- hashes


def digest(parts):
    state = hashlib.sha256()
    for part in parts:
        state.update(part if isinstance(part, bytes) else str(part).encode())
        state.update(b"\0")
    return state.hexdigest()


def dependency_hash(extras, torch_index):
    """Of all that decides which packages are installed: pyproject.toml without the settings of the tools."""
    lines, keep = [], True
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.startswith("["):
            keep = not line.startswith(("[tool.ruff", "[tool.pytest", "[tool.mypy", "[[tool.mypy"))
        if keep and not line.startswith("#"):
            lines.append(line)
    return digest(["\n".join(lines), extras, torch_index, ROOT])


def core_hash():
    """Of all that decides what the compiled core is."""
    own = [ROOT / "CMakeLists.txt", *(ROOT / "cmake").iterdir(), ROOT / "scripts" / "build_core.py"]
    files = [*sorted(own), *sorted(p for p in (ROOT / "csrc").rglob("*") if p.is_file())]
    variables = [os.environ.get(name, "") for name in ("CXX", "CXXFLAGS", "LDFLAGS")]
    return digest([*variables, *(part for f in files for part in (f.relative_to(ROOT), f.read_bytes()))])


# ---- the environment


class Environment:
    """A virtual environment of this checkout, and what it was last made from."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.python = self.folder / "bin" / "python"
        self.stamp_path = self.folder / STAMP_NAME
        self.stamp = {}
        with contextlib.suppress(OSError, ValueError):
            self.stamp = json.loads(self.stamp_path.read_text())

    def note(self, **probed):
        self.stamp.update(probed)
        scratch = self.stamp_path.with_suffix(".new")
        scratch.write_text(json.dumps(self.stamp, indent=1))
        os.replace(str(scratch), str(self.stamp_path))

    def is_usable(self, wanted):
        """Whether it exists, works where it lies and is of the wanted Python (any, if none is wanted)."""
        if not self.python.exists() or self.stamp.get("folder") != str(self.folder):
            return False
        if wanted in VERSIONS:
            return self.stamp.get("version") == wanted
        return not wanted or self.stamp.get("base") == wanted

    def has_core(self):
        return any((ROOT / "hybrid_ep").glob(f"_core.cpython-{self.stamp['version'].replace('.', '')}-*.so"))

    def check_disk(self, torch_index):
        """SetupError where the dependencies would not fit."""
        there = next(f for f in (self.folder, *self.folder.parents) if f.exists())
        free_gb = shutil.disk_usage(str(there)).free / 1e9
        if free_gb < NEEDED_DISK_GB and not torch_index:
            raise SetupError(
                f"needs {NEEDED_DISK_GB} GB of disk for torch and its CUDA libraries, {self.folder} has "
                f"{free_gb:.1f} GB; free some, or set HYBRID_EP_TORCH_INDEX to an index of CPU wheels."
            )

    def create(self, probed, wanted):
        say(f"creating {self.folder} with Python {probed['full']} ({probed['path']})")
        if self.folder.exists():
            if not (self.folder / "pyvenv.cfg").exists():
                raise SetupError(f"{self.folder} exists and is not a virtual environment; move it away.")
            shutil.rmtree(str(self.folder))
        if probed["venv"]:
            command = [probed["path"], "-m", "venv", self.folder]
        elif shutil.which("uv"):
            command = ["uv", "venv", "--seed", "--python", probed["path"], self.folder]
        else:
            command = [probed["path"], "-m", "virtualenv", self.folder]
        run(command, "creating the virtual environment", 300)
        self.stamp = {}
        self.note(folder=str(self.folder), version=probed["version"], base=wanted or probed["path"])

    def install(self, packages, options=()):
        """Installs packages by uv when it is on PATH, else by pip."""
        if shutil.which("uv"):
            command = ["uv", "pip", "install", "--python", self.python, *options, *packages]
        else:
            quiet = [] if sys.stdout.isatty() else ["--quiet", "--progress-bar", "off"]
            # Byte code is written on first import: compiling all of it takes longer than the rest.
            command = [
                self.python,
                "-m",
                "pip",
                "install",
                "--disable-pip-version-check",
                "--no-compile",
                *quiet,
                *options,
                *packages,
            ]
        run(command, f"installing {' '.join(packages)}")

    def build_core(self, *options):
        start = time.monotonic()
        if call([str(self.python), str(ROOT / "scripts" / "build_core.py"), *options], 1800):
            raise SetupError("the C++ core was not built; the reason is above.")
        if not options:
            say(f"the C++ core is built ({time.monotonic() - start:.0f} s)")

    def install_dependencies(self, extras, torch_index):
        start = time.monotonic()
        say("installing torch, megatron-core and the rest; the first time this downloads about 3 GB")
        if torch_index:
            self.install(["torch>=2.9"], ["--index-url", torch_index])
        self.install(self.requirements(extras))
        say(f"dependencies are installed ({time.monotonic() - start:.0f} s)")

    def requirements(self, extras):
        """What pyproject.toml says the package and its extras need."""
        command = [str(self.python), "-c", REQUIREMENTS, str(ROOT / "pyproject.toml"), extras]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout.decode().splitlines()

    def install_package(self):
        """In editable mode, beside a core that is built."""
        without_core = "--config-settings=cmake.define.HEP_MODULE=OFF"
        self.install(["-e", "."], ["--no-deps", "--no-build-isolation", without_core])
        check = "import torch, hybrid_ep, hybrid_ep._core"
        run([self.python, "-c", check], "importing what was installed", 300)


@contextlib.contextmanager
def locked():
    """One set-up at a time in a checkout; a second waits for it, with a deadline."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(str(ROOT / "build" / "setup_env.lock"), "w") as handle:
        deadline, told = time.monotonic() + LOCK_TIMEOUT_S, False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"another set-up of this checkout has run for {LOCK_TIMEOUT_S} s; end it and call again."
                    ) from None
                if not told:
                    say("waiting for another set-up of this checkout")
                    told = True
                time.sleep(0.5)
        yield


def ensure(folder=ROOT / ".venv", wanted="", extras=DEFAULT_EXTRAS, torch_index=""):
    """An Environment that is ready. Steps whose inputs did not change are skipped. SetupError says what is
    missing."""
    if not sys.platform.startswith("linux"):
        raise SetupError(
            f"hybrid_ep runs on Linux only (this is {sys.platform}); use a Linux machine, a container or WSL 2."
        )
    with locked():
        env = Environment(folder)
        dependencies, core = dependency_hash(extras, torch_index), core_hash()
        usable = env.is_usable(wanted)
        if not usable or env.stamp.get("dependencies") != dependencies:
            env.check_disk(torch_index)
        if not usable:
            env.create(choose_python(wanted), wanted)
        if env.stamp.get("build_requirements") != list(BUILD_REQUIREMENTS):
            env.install(list(BUILD_REQUIREMENTS))
            env.note(build_requirements=list(BUILD_REQUIREMENTS))
        with ThreadPoolExecutor(1) as beside:
            built = None
            if env.stamp.get("core") != core or not env.has_core():
                env.build_core("--configure")
                built = beside.submit(env.build_core)
            if env.stamp.get("dependencies") != dependencies:
                install_beside(built, env, extras, torch_index)
            if built:
                built.result()
                env.note(core=core)
        if env.stamp.get("dependencies") != dependencies:
            env.install_package()
            env.note(dependencies=dependencies)
        return env


def install_beside(built, env, extras, torch_index):
    """Installs the dependencies while the core is built. Of two errors the core's is the cause."""
    try:
        env.install_dependencies(extras, torch_index)
    except SetupError:
        if built:
            built.result()
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", default=str(ROOT / ".venv"), help="folder of the environment [.venv]")
    parser.add_argument(
        "--python",
        default=os.environ.get("HYBRID_EP_PYTHON", ""),
        help="version (3.12) or path of the Python to use [the best usable]",
    )
    parser.add_argument("--extras", default=DEFAULT_EXTRAS, help="extras of pyproject.toml [%(default)s]")
    parser.add_argument(
        "--torch-index",
        default=os.environ.get("HYBRID_EP_TORCH_INDEX", ""),
        help="index URL that torch is taken from [the installer's default]",
    )
    args = parser.parse_args()
    try:
        ensure(Path(args.venv).absolute(), args.python, args.extras, args.torch_index)
    except SetupError as error:
        sys.exit(f"\nhybrid_ep set-up: {error}\n")
    except KeyboardInterrupt:
        sys.exit("\nhybrid_ep set-up: interrupted; call again to go on.\n")


if __name__ == "__main__":
    main()
