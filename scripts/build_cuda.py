"""Builds the CUDA library, hybrid_ep/libhybrid_ep_cuda.so, ahead of time for sm_90a and sm_100.

    python scripts/build_cuda.py [--out FOLDER] [--find] [--compile-only]
                                 [--nvshmem [ARCH] | --no-nvshmem] [--nvshmem-home FOLDER]
    python scripts/build_cuda.py --interpreted [--arch sm_90a]

nvcc (12.8 or newer) comes from CUDA_HOME, PATH or the pip toolkit (pip install 'cuda-toolkit[nvcc,cudart,cccl]'), in
this order. The library holds no torch and no Python: one build serves every version of both. It is linked with the
static CUDA runtime, so that it loads on a machine without a driver and then says that there is no device. Objects are
reused while their sources and command are unchanged. Read from the environment: CUDA_HOME, CXX, MAX_JOBS.

Where the pip package nvidia-nvshmem-cu13 (or cu12) is, which torch's CUDA builds bring, libhybrid_ep_nvshmem.so is
built as well, the kernels whose rail is a NIC; --nvshmem makes a missing package an error, and --nvshmem-home names
NVSHMEM's folder where it is not among this Python's packages. The library is loaded only where nodes have no mapped
path between them. Built with --nvshmem ARCH it has that architecture alone and lies in
build/cuda/ARCH, to be inspected (cubin_check.py) and never in the place of a whole one.

--interpreted builds something else, for tests without a GPU: build/cuda/interpreted/libhybrid_ep_cuda.so, from the same
sources and flags, with their PTX in place of machine code and the PTX machine of tests/ptx in place of the CUDA runtime
(docs/ptx_machine.md)."""

import argparse
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda"
LIBRARY = "libhybrid_ep_cuda.so"
# Nothing here needs what sm_100a adds, whose code 10.3 (B300, GB300) refuses; it runs that of sm_100.
ARCHITECTURES = ("sm_90a", "sm_100")
NVSHMEM_LIBRARY = "libhybrid_ep_nvshmem.so"
MACHINE = "tests/ptx"
# The machine's own code: hot loops, compiled for any x86-64 or aarch64.
MACHINE_FLAGS = [
    "-std=c++20",
    "-O2",
    "-g1",
    "-DNDEBUG",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-semantic-interposition",
]
LEAST_NVCC = (12, 8)  # the first that knows sm_100

# -fmad=false: a product and a sum round twice, as on the host; results are compared bit for bit. 128: a loop that a
# mutant alone would enter is not reachable.
FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "-diag-suppress=128",
    "-lineinfo",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wno-unknown-pragmas",
    "-Icsrc",
]


@dataclass(frozen=True)
class Library:
    """A library, and what it is made from."""

    path: Path
    sources: tuple[str, ...]
    architectures: tuple[str, ...] = ARCHITECTURES
    compile_options: tuple[str, ...] = ()
    link_options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    source: str
    obj: Path
    architectures: tuple[str, ...]
    command: tuple[str, ...]


def pip_toolkits():
    """CUDA homes inside this Python's packages, newest layout first."""
    for name in ("purelib", "platlib"):
        packages = Path(sysconfig.get_path(name)) / "nvidia"
        yield from sorted(packages.glob("cu[0-9]*"), reverse=True)
        yield packages / "cuda_nvcc"


def nvcc_version(nvcc):
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return (0, 0)
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def find_nvcc(home=None):
    """(nvcc, None), or (None, why not). home: the toolkit's folder, in place of CUDA_HOME."""
    home = home or os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += [toolkit / "bin" / "nvcc" for toolkit in pip_toolkits()]
    found = [nvcc for nvcc in candidates if nvcc.is_file()]
    for nvcc in found:
        if nvcc_version(nvcc) >= LEAST_NVCC:
            return nvcc, None
    if found:
        return None, f"{found[0]} is older than {LEAST_NVCC[0]}.{LEAST_NVCC[1]}, the first that knows sm_100"
    return None, "no nvcc in CUDA_HOME, on PATH or among this Python's packages"


def all_sources():
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cu"))


def nvshmem_sources():
    """Those of the NVSHMEM library, relative to the root."""
    return [s for s in all_sources() if Path(s).name.startswith("nvshmem_")]


def sources():
    """Those of the CUDA library."""
    return [s for s in all_sources() if s not in nvshmem_sources()]


def targets(architectures=ARCHITECTURES):
    return [f"-gencode=arch={a.replace('sm', 'compute')},code={a}" for a in architectures]


def folder_of(architectures):
    """Where objects for these architectures lie, and a library that has not all of them."""
    return BUILD if architectures == ARCHITECTURES else BUILD / "-".join(architectures)


def base_command(nvcc):
    host = os.environ.get("CXX", "")
    return [str(nvcc), *FLAGS, *([f"-ccbin={shlex.split(host)[0]}"] if host else [])]


def is_current(obj, command):
    stamp, deps = obj.with_suffix(".cmd"), obj.with_suffix(".d")
    if not all(p.is_file() for p in (obj, deps, stamp)) or stamp.read_text() != shlex.join(command):
        return False
    names = shlex.split(deps.read_text().replace("\\\n", " ").partition(": ")[2])
    made = obj.stat().st_mtime_ns
    return all((ROOT / n).is_file() and (ROOT / n).stat().st_mtime_ns <= made for n in names)


def compile_one(job):
    """The compiler's words when it failed, else None."""
    if is_current(job.obj, job.command):
        return None
    print(f"compiling {job.source} for {', '.join(job.architectures)}", flush=True)
    result = subprocess.run(job.command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        return result.stderr + result.stdout
    if result.stderr.strip():
        print(result.stderr.strip(), flush=True)
    job.obj.with_suffix(".cmd").write_text(shlex.join(job.command))
    return None


def jobs_of(nvcc, library):
    folder = folder_of(library.architectures)
    for source in library.sources:
        obj = folder / (source.replace("/", "__") + ".o")
        deps = ["-MMD", "-MF", str(obj.with_suffix(".d"))]
        yield Job(
            source,
            obj,
            library.architectures,
            (
                *base_command(nvcc),
                *library.compile_options,
                *targets(library.architectures),
                *deps,
                "-c",
                source,
                "-o",
                str(obj),
            ),
        )


def machine_jobs(nvcc):
    """Those of the PTX machine, by the host's compiler."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    include = Path(nvcc).resolve().parent.parent / "include"
    for path in sorted((ROOT / MACHINE / "machine").glob("*.cpp")) + sorted((ROOT / MACHINE / "runtime").glob("*.cpp")):
        source = str(path.relative_to(ROOT))
        obj = BUILD / "interpreted" / (source.replace("/", "__") + ".o")
        yield Job(
            source,
            obj,
            ("this machine",),
            (
                *compiler,
                *MACHINE_FLAGS,
                "-isystem",
                str(include),
                "-MMD",
                "-MF",
                str(obj.with_suffix(".d")),
                "-c",
                source,
                "-o",
                str(obj),
            ),
        )


def build_interpreted(nvcc, architectures, name=LIBRARY, of=None, exported="hep_cuda_entry"):
    """Builds a library that runs on the PTX machine, the CUDA library or that of other sources; its path. Exits with
    the compiler's words on failure."""
    virtual = tuple(a.replace("sm", "compute") for a in architectures)
    out = BUILD / "interpreted" / name
    library = Library(out, tuple(of or sources()), virtual, ("-no-compress",))
    (machine, bad), (objects, worse) = compile_jobs([list(machine_jobs(nvcc)), list(jobs_of(nvcc, library))])
    if bad or worse:
        sys.exit(f"hybrid_ep: {library.path.name} for the PTX machine does not compile:\n\n" + "\n".join(bad + worse))
    # The machine before the kernels, which announce themselves to it when the library is loaded.
    exports = out.with_suffix(".map")
    exports.write_text(f"{{ global: {exported}; cuda*; ptxm_*; local: *; }};\n")
    scratch = out.with_name(out.name + ".new")
    command = [
        *(shlex.split(os.environ.get("CXX", "")) or ["g++"]),
        "-shared",
        "-o",
        str(scratch),
        *machine,
        *objects,
        "-Wl,-Bsymbolic",
        "-Wl,-z,defs",
        f"-Wl,--version-script={exports}",
        "-lpthread",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"hybrid_ep: {out.name} for the PTX machine does not link:\n\n" + result.stderr + result.stdout)
    os.replace(scratch, out)
    return out


def compile_all(nvcc, libraries):
    """Compiles what changed of all libraries; of each (its objects, the compiler's words on what failed)."""
    return compile_jobs([list(jobs_of(nvcc, library)) for library in libraries])


def compile_jobs(jobs):
    """As compile_all, of lists of jobs. One pool, so that no core idles while another is busy with the longest file."""
    # In the order of names the kernels come first, which take longest.
    queue = sorted((job for of_one in jobs for job in of_one), key=lambda job: job.source)
    for job in queue:
        job.obj.parent.mkdir(parents=True, exist_ok=True)
    limit = os.environ.get("MAX_JOBS", "")
    workers = int(limit) if limit.isdecimal() and int(limit) else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(workers, len(queue))) as pool:
        words = dict(zip(queue, pool.map(compile_one, queue), strict=True))
    return [([str(job.obj) for job in of_one], [words[job] for job in of_one if words[job]]) for of_one in jobs]


def link(nvcc, library, objects):
    """Links a library; its path. Exits with the linker's words on failure."""
    scratch = library.path.with_name(library.path.name + ".new")
    home = Path(nvcc).resolve().parent.parent
    folders = [f"-L{home / name}" for name in ("lib64", "lib") if (home / name).is_dir()]
    command = [str(nvcc), "-shared", "-cudart=static", *folders, *objects, *library.link_options, "-o", str(scratch)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"hybrid_ep: {library.path.name} does not link:\n\n" + result.stderr + result.stdout)
    os.replace(scratch, library.path)  # a running process keeps the file it has mapped
    return library.path


def has_nvshmem(home):
    return (Path(home) / "include" / "nvshmem.h").is_file()


def nvshmem_package(nvcc):
    """The pip package that carries NVSHMEM for this nvcc's CUDA."""
    return f"nvidia-nvshmem-cu{nvcc_version(nvcc)[0]}"


def nvshmem_home(nvcc):
    """The folder of NVSHMEM's package for this nvcc's CUDA, which need not be torch's, among this Python's, or None."""
    package = nvshmem_package(nvcc)
    for folder in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        home = Path(folder) / "nvidia" / "nvshmem"
        if has_nvshmem(home) and any(importlib.metadata.distributions(name=package, path=[folder])):
            return home
    return None


def nvshmem_library(home, out, architectures):
    """The kernels whose rail is a NIC, and the host's half. Its device code is linked with libnvshmem_device.a, which
    also brings the host functions that hand NVSHMEM's device state over; they stay hidden, for another library of the
    process may bring its own. libnvshmem_host.so.3 is found at run time by whoever loads this library."""
    folder = Path(out) if architectures == ARCHITECTURES else folder_of(architectures)
    return Library(
        folder / NVSHMEM_LIBRARY,
        tuple(nvshmem_sources()),
        architectures,
        ("-isystem", str(home / "include"), "-rdc=true"),
        (
            *targets(architectures),
            "-Xcompiler=-fPIC",
            f"-L{home / 'lib'}",
            "-lnvshmem_device",
            "-l:libnvshmem_host.so.3",
            "-Xlinker=--exclude-libs,ALL",
            "-Xlinker=-Bsymbolic",
        ),
    )


def chosen_nvshmem(nvcc, args):
    """The NVSHMEM library as the command line wants it, or None. Exits where it is wanted and cannot be built."""
    if args.nvshmem == "no":
        return None
    home = Path(args.nvshmem_home).absolute() if args.nvshmem_home else nvshmem_home(nvcc)
    if not home and not args.nvshmem:
        print(f"no {NVSHMEM_LIBRARY}: this Python has no {nvshmem_package(nvcc)}")
        return None
    if not home or not has_nvshmem(home):
        where = f"in {home}" if home else "among this Python's packages"
        sys.exit(f"hybrid_ep: no NVSHMEM {where}; pip install {nvshmem_package(nvcc)}")
    print(f"NVSHMEM: {home}")
    return nvshmem_library(home, args.out, (args.nvshmem,) if args.nvshmem in ARCHITECTURES else ARCHITECTURES)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=ROOT / "hybrid_ep", help="folder of the library")
    parser.add_argument(
        "--interpreted", action="store_true", help="the library that runs on the PTX machine of tests/ptx"
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, help="of --interpreted: PTX for this one alone [both]")
    parser.add_argument("--find", action="store_true", help="only say which nvcc would build it")
    parser.add_argument("--compile-only", action="store_true", help="make the objects and no library of them")
    rail = parser.add_mutually_exclusive_group()
    rail.add_argument(
        "--nvshmem",
        nargs="?",
        const="all",
        choices=("all", *ARCHITECTURES),
        metavar="ARCH",
        help="also the library whose rail is a NIC (default: where NVSHMEM's package is); with ARCH, "
        f"one of {', '.join(ARCHITECTURES)}, for that one alone, into build/cuda/ARCH",
    )
    rail.add_argument("--no-nvshmem", dest="nvshmem", action="store_const", const="no", help="not that library")
    parser.add_argument("--nvshmem-home", metavar="FOLDER", help="NVSHMEM's folder, with include and lib in it")
    args = parser.parse_args()
    if args.nvshmem == "no" and args.nvshmem_home:
        parser.error("--nvshmem-home says where NVSHMEM is, --no-nvshmem that it is not wanted; leave one out")
    nvcc, why = find_nvcc()
    if not nvcc:
        sys.exit(f"hybrid_ep: no CUDA library: {why}")
    print(f"nvcc: {nvcc} {'.'.join(map(str, nvcc_version(nvcc)))}")
    if args.find:
        return
    if args.interpreted:
        print(build_interpreted(nvcc, (args.arch,) if args.arch else ARCHITECTURES))
        return
    libraries = [Library(Path(args.out) / LIBRARY, tuple(sources()))]
    if nvshmem := chosen_nvshmem(nvcc, args):
        libraries.append(nvshmem)
    failed = []  # a library that does not compile keeps no other from its users
    for library, (objects, errors) in zip(libraries, compile_all(nvcc, libraries), strict=True):
        if errors:
            failed.append(f"{library.path.name} does not compile:\n\n" + "\n".join(errors))
        elif not args.compile_only:
            print(link(nvcc, library, objects))
    if failed:
        sys.exit("hybrid_ep: " + "\n".join(failed))


if __name__ == "__main__":
    main()
