"""Builds the CUDA library, hybrid_ep/libhybrid_ep_cuda.so, ahead of time for sm_90a and sm_100a.

    python scripts/build_cuda.py [--out FOLDER] [--find] [--nvshmem | --no-nvshmem]

nvcc (12.8 or newer) comes from CUDA_HOME, PATH or the pip toolkit (pip install 'cuda-toolkit[nvcc,cudart,cccl]'), in
this order. The library holds no torch and no Python: one build serves every version of both. It is linked with the
static CUDA runtime, so that it loads on a machine without a driver and then says that there is no device. Objects are
reused while their sources and command are unchanged. Read from the environment: CUDA_HOME, CXX, MAX_JOBS.

Where the pip package nvidia-nvshmem-cu13 (or cu12) is, which torch's CUDA builds bring, libhybrid_ep_nvshmem.so is
built as well, the kernels whose rail is a NIC; --nvshmem makes a missing package an error. It is loaded only where
nodes have no mapped path between them."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda"
LIBRARY = "libhybrid_ep_cuda.so"
ARCHITECTURES = ("90a", "100a")
NVSHMEM_LIBRARY = "libhybrid_ep_nvshmem.so"
LEAST_NVCC = (12, 8)  # the first that knows sm_100a

# -fmad=false: a product and a sum round twice, as on the host; results are compared bit for bit. 128: a loop that a
# mutant alone would enter is not reachable.
FLAGS = ["-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-diag-suppress=128", "-lineinfo",
         "-Xcompiler=-fPIC,-fvisibility=hidden,-Wno-unknown-pragmas", "-Icsrc"]


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


def find_nvcc():
    """(nvcc, None), or (None, why not)."""
    home = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += [toolkit / "bin" / "nvcc" for toolkit in pip_toolkits()]
    found = [nvcc for nvcc in candidates if nvcc.is_file()]
    for nvcc in found:
        if nvcc_version(nvcc) >= LEAST_NVCC:
            return nvcc, None
    if found:
        return None, f"{found[0]} is older than {LEAST_NVCC[0]}.{LEAST_NVCC[1]}, the first that knows sm_100a"
    return None, "no nvcc in CUDA_HOME, on PATH or among this Python's packages"


def all_sources():
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cu"))


def nvshmem_sources():
    """Those of the NVSHMEM library, relative to the root."""
    return [s for s in all_sources() if Path(s).name.startswith("nvshmem_")]


def sources():
    """Those of the CUDA library."""
    return [s for s in all_sources() if s not in nvshmem_sources()]


def targets():
    return [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]


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
    obj, command = job
    if is_current(obj, command):
        return None
    print(f"compiling {command[-3]} for sm_{', sm_'.join(ARCHITECTURES)}", flush=True)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        return result.stderr + result.stdout
    if result.stderr.strip():
        print(result.stderr.strip(), flush=True)
    obj.with_suffix(".cmd").write_text(shlex.join(command))
    return None


def objects(nvcc, chosen, *options):
    """Compiles those of the sources that changed; all objects. Exits with the compiler's words on failure."""
    BUILD.mkdir(parents=True, exist_ok=True)
    jobs = []
    for source in chosen:
        obj = BUILD / (source.replace("/", "__") + ".o")
        deps = ["-MMD", "-MF", str(obj.with_suffix(".d"))]
        jobs.append((obj, [*base_command(nvcc), *options, *targets(), *deps, "-c", source, "-o", str(obj)]))
    limit = os.environ.get("MAX_JOBS", "")
    workers = int(limit) if limit.isdecimal() and int(limit) else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(workers, len(jobs))) as pool:
        errors = [error for error in pool.map(compile_one, jobs) if error]
    if errors:
        sys.exit("hybrid_ep: the CUDA library does not compile:\n\n" + "\n".join(errors))
    return [str(obj) for obj, _ in jobs]


def link(nvcc, library, *arguments):
    """Links into `library`. Exits with the linker's words on failure."""
    scratch = library.with_name(library.name + ".new")
    home = Path(nvcc).resolve().parent.parent
    folders = [f"-L{home / name}" for name in ("lib64", "lib") if (home / name).is_dir()]
    command = [str(nvcc), "-shared", "-cudart=static", *folders, *arguments, "-o", str(scratch)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"hybrid_ep: {library.name} does not link:\n\n" + result.stderr + result.stdout)
    os.replace(scratch, library)  # a running process keeps the file it has mapped
    return library


def build(nvcc, out):
    """The path of the CUDA library."""
    return link(nvcc, Path(out) / LIBRARY, *objects(nvcc, sources()))


def nvshmem_home():
    """NVSHMEM's package among this Python's, or None."""
    homes = [Path(sysconfig.get_path(name)) / "nvidia" / "nvshmem" for name in ("purelib", "platlib")]
    return next((h for h in homes if (h / "include" / "nvshmem.h").is_file()), None)


def build_nvshmem(nvcc, out):
    """The path of the NVSHMEM library: the kernels whose rail is a NIC, and the host's half. Its device code is linked
    with libnvshmem_device.a, which also brings the host functions that hand NVSHMEM's device state over; they stay
    hidden, for another library of the process may bring its own. libnvshmem_host.so.3 is found at run time by whoever
    loads this library."""
    home = nvshmem_home()
    if not home:
        sys.exit("hybrid_ep: no NVSHMEM among this Python's packages; pip install nvidia-nvshmem-cu13")
    found = objects(nvcc, nvshmem_sources(), "-isystem", str(home / "include"), "-rdc=true")
    return link(nvcc, Path(out) / NVSHMEM_LIBRARY, *targets(), "-Xcompiler=-fPIC", *found, f"-L{home / 'lib'}",
                "-lnvshmem_device", "-l:libnvshmem_host.so.3", "-Xlinker=--exclude-libs,ALL", "-Xlinker=-Bsymbolic")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=ROOT / "hybrid_ep", help="folder of the library")
    parser.add_argument("--find", action="store_true", help="only say which nvcc would build it")
    parser.add_argument("--nvshmem", action=argparse.BooleanOptionalAction,
                        help="also the library whose rail is a NIC; default: where NVSHMEM's package is")
    args = parser.parse_args()
    nvcc, why = find_nvcc()
    if not nvcc:
        sys.exit(f"hybrid_ep: no CUDA library: {why}")
    print(f"nvcc: {nvcc} {'.'.join(map(str, nvcc_version(nvcc)))}")
    if args.find:
        return
    print(build(nvcc, args.out))
    if nvshmem_home() if args.nvshmem is None else args.nvshmem:
        print(build_nvshmem(nvcc, args.out))


if __name__ == "__main__":
    main()
