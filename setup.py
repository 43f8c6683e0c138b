"""Builds hybrid_ep._core, the C++ core, from csrc/**/*.cpp with a C++20 compiler and nothing else; and, where
nvcc is found, the CUDA library (scripts/build_cuda.py), which the core loads when it is asked to.

Sources compile in parallel; an object is reused while its sources, headers and command are unchanged. The
result is portable: no -march=native, hot loops choose their instruction set at run time. pyproject.toml holds
everything else. What is missing on the machine is said in one sentence, without a traceback.

    python setup.py build_ext --inplace     (re)build in the source tree
    python setup.py check_toolchain         exit 0 if this machine can build, else say what to install

Read from the environment, as C++ builds do: CXX, CXXFLAGS, LDFLAGS, MAX_JOBS, CUDA_HOME; HYBRID_EP_CUDA=0
leaves the CUDA library out, HYBRID_EP_CUDA=1 makes a missing nvcc an error."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - run by hand, an old Python would fail further down
    sys.exit(
        "hybrid_ep needs Python 3.10 to 3.13; this is Python {}.{} ({}). Install a newer one, "
        "for example with pyenv (pyenv install 3.12).".format(*sys.version_info[:2], sys.executable)
    )

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

# -ffp-contract=off: the versions of a function for different instruction sets must round alike, or results
# would depend on the machine.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
]
LINK_FLAGS = ["-shared", "-pthread", "-lrt"]

# Newest first after the machine's default.
COMPILERS = [
    "g++",
    "clang++",
    "c++",
    *(f"g++-{v}" for v in range(16, 10, -1)),
    *(f"clang++-{v}" for v in range(22, 13, -1)),
]
PROBE = """
#if defined(__clang__) ? __clang_major__ < 14 : __GNUC__ < 11
#error too old
#endif
#include <concepts>
#include <version>
template <std::integral T> T twice(T x) { return x + x; }
int main() { return twice(0); }
"""
INSTALL_COMPILER = (
    "Debian/Ubuntu: apt-get install g++; RHEL/Fedora: dnf install gcc-c++ (RHEL 8 and 9: "
    "gcc-toolset-13); conda: conda install cxx-compiler. CXX=/path/to/compiler names one."
)


def stop(sentence):
    """Ends the build with a sentence and no traceback."""
    sys.exit(f"\nhybrid_ep: {sentence}\n")


def index_readme():
    """README.md for a package index, which shows one page alone: without its pictures, and with the words of links to
    other files and headings in place of the links."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def run(command, **options):
    return subprocess.run(command, text=True, capture_output=True, check=False, **options)


def compiles_cxx20(command):
    """Whether the command compiles C++20 with its standard library, by g++ >= 11 or clang++ >= 14."""
    syntax_only = [*command, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    return run(syntax_only, input=PROBE, timeout=60).returncode == 0


def version_line(command):
    """The first line of `command --version`."""
    text = run([*command, "--version"], timeout=60).stdout
    return text.splitlines()[0] if text else "no version"


def find_compiler():
    """The command line of a C++20 compiler: $CXX, else the first that qualifies on PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [[name] for name in COMPILERS]
    found = [command for command in candidates if shutil.which(command[0])]
    for command in found:
        if compiles_cxx20(command):
            return command
    if found:
        stop(
            f"needs a C++20 compiler, g++ 11 or clang++ 14 or newer; {shlex.join(found[0])} is too old or "
            f"incomplete ({version_line(found[0])}). {INSTALL_COMPILER}"
        )
    where = f"CXX={shlex.join(chosen)} is not there" if chosen else "there is none on PATH"
    stop(f"needs a C++20 compiler (g++ 11 or clang++ 14 or newer) and {where}. {INSTALL_COMPILER}")


def check_toolchain():
    """The compiler, after checking everything that a build needs of this machine."""
    if not sys.platform.startswith("linux"):
        stop(f"runs on Linux only (this is {sys.platform}); use a Linux machine, a container or WSL 2.")
    compiler = find_compiler()
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        version = "{}.{}".format(*sys.version_info[:2])
        stop(
            f"needs Python.h, the C headers of Python {version}. Debian/Ubuntu: apt-get install "
            f"python{version}-dev; RHEL/Fedora: dnf install python{version}-devel; Pythons of pyenv, uv and "
            "conda have them."
        )
    return compiler


def cpp_sources():
    """All C++ sources of the core, relative to the root; *_test.cpp belong to the tests."""
    return sorted(str(p.relative_to(ROOT)) for p in CSRC.rglob("*.cpp") if not p.name.endswith("_test.cpp"))


def is_current(obj, command):
    """Whether an object is newer than all it was made of, and made by the same command."""
    stamp, deps = obj.with_suffix(".cmd"), obj.with_suffix(".d")
    if not all(path.is_file() for path in (obj, deps, stamp)) or stamp.read_text() != shlex.join(command):
        return False
    made = obj.stat().st_mtime_ns
    # The compiler's make rule: "object: a.cpp b.h \<newline> c.h", blanks in names escaped.
    names = shlex.split(deps.read_text().replace("\\\n", " ").partition(": ")[2])
    return all(Path(name).is_file() and Path(name).stat().st_mtime_ns <= made for name in names)


LOCK_TIMEOUT_S = 1800


@contextlib.contextmanager
def alone_in(folder):
    """One build at a time in a folder of objects. A second one waits and finds them made: scripts/setup_env.py has pip
    install this package while the core is being compiled."""
    with open(folder / "lock", "w") as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    stop(f"another build in {folder} has run for {LOCK_TIMEOUT_S} s; end it and call again")
                time.sleep(0.1)
        yield


def num_jobs(num_sources):
    limit = os.environ.get("MAX_JOBS", "")
    jobs = int(limit) if limit.isdecimal() else len(os.sched_getaffinity(0))
    return max(1, min(jobs, num_sources))


class BuildCore(build_ext):
    """setuptools' build_ext with its compilation replaced; where the module goes stays its business."""

    def build_extension(self, ext):
        compiler = check_toolchain()
        if not ext.sources:
            stop(f"there is no C++ source under {CSRC}; is this a complete checkout?")
        import pybind11  # a build requirement; not needed for metadata

        os.chdir(ROOT)
        build_dir = self._object_dir()
        with alone_in(build_dir):
            self._build_in(build_dir, ext, compiler, pybind11.get_include())

    def _build_in(self, build_dir, ext, compiler, pybind11_headers):
        includes = ["csrc", pybind11_headers, sysconfig.get_path("include")]
        base = [
            *compiler,
            *COMPILE_FLAGS,
            *(f"-I{path}" for path in includes),
            *shlex.split(os.environ.get("CXXFLAGS", "")),
        ]
        jobs = []
        for source in ext.sources:
            obj = build_dir / (source.replace(os.sep, "__") + ".o")
            command = [*base, "-MMD", "-MF", str(obj.with_suffix(".d")), "-c", source, "-o", str(obj)]
            jobs.append((source, obj, command))
        stale = [job for job in jobs if not is_current(job[1], job[2])]
        with ThreadPoolExecutor(num_jobs(len(ext.sources))) as pool:
            errors = [error for error in pool.map(self._compile, stale) if error]
        if errors:
            stop("the C++ core does not compile:\n\n" + "\n".join(errors))
        library = build_dir / Path(self.get_ext_filename(ext.name)).name
        self._link(compiler, [job[1] for job in jobs], library)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, never overwritten: a running process keeps the file it has mapped.
        scratch = target.with_name(target.name + ".new")
        shutil.copy2(library, scratch)
        os.replace(scratch, target)
        self._build_cuda(target.parent)

    @staticmethod
    def _build_cuda(folder):
        """The CUDA library beside the core, by a process of its own: it needs nothing of this build."""
        wish = os.environ.get("HYBRID_EP_CUDA", "")
        if wish not in ("", "0", "1"):
            stop(f"HYBRID_EP_CUDA={wish!r} must be 0 (leave the CUDA library out) or 1 (insist on it)")
        if wish == "0":
            return
        script = [sys.executable, str(ROOT / "scripts" / "build_cuda.py")]
        found = run([*script, "--find"])
        if found.returncode:
            if wish == "1":
                stop(found.stderr.strip())
            print(f"{found.stderr.strip()}; everything else is built", flush=True)
        elif subprocess.run([*script, "--out", str(folder)], check=False).returncode:
            stop("the CUDA library does not build (see above); HYBRID_EP_CUDA=0 leaves it out")

    def _object_dir(self):
        """build/core-<ABI> in the source tree, where a rebuild is incremental; else the temporary folder."""
        folder = ROOT / "build" / f"core-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
        except OSError:
            pass
        fallback = Path(self.build_temp).resolve() / "core"
        fallback.mkdir(parents=True, exist_ok=True)
        return fallback

    @staticmethod
    def _compile(job):
        """Compiles one source; returns the compiler's output if it failed."""
        source, obj, command = job
        print(f"compiling {source}", flush=True)
        obj.with_suffix(".cmd").unlink(missing_ok=True)
        result = run(command)
        if result.returncode:
            return result.stderr or f"{source}: the compiler ended with status {result.returncode}"
        if result.stderr:
            print(result.stderr, flush=True)
        obj.with_suffix(".cmd").write_text(shlex.join(command))
        return None

    @staticmethod
    def _link(compiler, objects, library):
        user_flags = shlex.split(os.environ.get("LDFLAGS", ""))
        command = [*compiler, *map(str, objects), *LINK_FLAGS, *user_flags, "-o", str(library)]
        newest = max(obj.stat().st_mtime_ns for obj in objects)
        stamp = library.with_suffix(".cmd")
        same = stamp.is_file() and stamp.read_text() == shlex.join(command)
        if same and library.is_file() and library.stat().st_mtime_ns >= newest:
            return
        result = run(command)
        if result.returncode:
            stop("the C++ core does not link:\n\n" + result.stderr)
        stamp.write_text(shlex.join(command))


class CheckToolchain(Command):
    """python setup.py check_toolchain: can this machine build the core?"""

    user_options = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        print(f"C++ compiler: {version_line(check_toolchain())}")


setup(
    # recipes/ is a name of this checkout; among a user's packages it would be anybody's.
    packages=[
        *find_namespace_packages(include=["hybrid_ep*", "megatron_patches*"], exclude=["*.__pycache__"]),
        "hybrid_ep_recipes",
    ],
    package_dir={"hybrid_ep_recipes": "recipes"},
    long_description=index_readme(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("hybrid_ep._core", sources=cpp_sources())],
    cmdclass={"build_ext": BuildCore, "check_toolchain": CheckToolchain},
)
