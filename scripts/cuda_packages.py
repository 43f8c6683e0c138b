"""nvcc and NVSHMEM for the stage `cuda`: where build_cuda.py finds them, else out of pip into build/cuda-toolkit, which
no environment knows of, so that no user's dependencies grow."""

import shutil
import sys
from pathlib import Path

import build_cuda

FOLDER = Path(__file__).resolve().parent.parent / "build" / "cuda-toolkit"
TOOLKIT = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"
NVSHMEM_VERSIONS = ">=3.4,<3.9"  # the releases that were compiled and linked with; see docs/cuda.md


def install(run, folder, *requirements):
    """Whether pip (or uv) put the requirements into the folder; `run` gives (exit status, last line) of a command."""
    uv = shutil.which("uv")
    pip = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    return run([*pip, "-q", "--target", folder, *requirements])[0] == 0


def find_toolkit(run):
    """(CUDA_HOME that the build needs, or None where it finds nvcc by itself; why there is none, or None)."""
    if build_cuda.find_nvcc()[0]:
        return None, None
    if not any(FOLDER.glob("nvidia/cu*/bin/nvcc")) and not install(run, FOLDER, TOOLKIT):
        return None, f"no nvcc, and {TOOLKIT} cannot be installed here"
    return max(FOLDER.glob("nvidia/cu*")), None


def find_nvshmem(run, nvcc):
    """(NVSHMEM's folder, or None; why there is none, or None)."""
    package = build_cuda.nvshmem_package(nvcc)
    if home := build_cuda.nvshmem_home(nvcc):
        return home, None
    # A folder of its own: pip leaves out what falls into a folder (nvidia/) that its target already has. And without
    # what it depends on, which is in the toolkit.
    target = FOLDER / package
    home = target / "nvidia" / "nvshmem"
    wanted = package + NVSHMEM_VERSIONS
    if not build_cuda.has_nvshmem(home) and not install(run, target, "--no-deps", wanted):
        return None, f"{wanted} cannot be installed here"
    return home, None
