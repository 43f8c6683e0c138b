"""PyTorch's own caching allocator on a machine without a GPU: a CUDA build of torch in a process whose CUDA runtime is
torch_allocator.cpp. Tensors of "cuda" are memory of the host there; no operation runs on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "ptx_machine" / "torch_allocator"
HEADERS = ROOT / "build" / "cuda-toolkit" / "nvidia" / "cu13" / "include"
# What torch looks for in the driver when it begins.
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuGetErrorString(int status, const char** text) { *text = "the stand-in"; return 0; }
"""


def why_not() -> str | None:
    """None, or why it cannot be built here."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    if torch.version.cuda is None or not library.is_file():
        return f"torch {torch.__version__} is no build for CUDA"
    if not (HEADERS / "cuda_runtime_api.h").is_file():
        return f"{HEADERS} is not there; the stage cuda of scripts/run_tests.py installs the toolkit"
    return None


def build() -> None:
    """The runtime and the driver, in BUILD."""
    import torch

    BUILD.mkdir(parents=True, exist_ok=True)
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("*.so"))
    asked = {name for library in libraries for name in _symbols(library, "--undefined-only") if "libcudart" in name}
    _compile("c++", "-O1", "-std=c++17", f"-I{HEADERS}", "-c", HERE / "torch_allocator.cpp", "-o", BUILD / "runtime.o")
    ours = set(_symbols(BUILD / "runtime.o", "--defined-only", dynamic=False))
    text = {"cudaGetErrorString", "cudaGetErrorName", "cudaRuntimeGetVersion"}  # the real library answers without a GPU
    rest = sorted({name.split("@")[0] for name in asked} - ours - text)
    (BUILD / "rest.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in rest))
    (BUILD / "driver.c").write_text(DRIVER)
    _compile("cc", "-O1", "-w", "-c", BUILD / "rest.c", "-o", BUILD / "rest.o")
    _compile("c++", "-shared", BUILD / "runtime.o", BUILD / "rest.o", "-o", BUILD / "runtime.so")
    _compile("cc", "-shared", BUILD / "driver.c", "-o", BUILD / "libcuda.so.1")


def run(programs: Path, *names: str, conf: str = "", timeout_s: float = 120) -> dict:
    """{name: what it returned}, of these functions in PROGRAMS of that module, or of all. conf: PYTORCH_ALLOC_CONF."""
    paths = [str(ROOT), str(ROOT / "tests" / "python"), str(HERE)]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(BUILD / "runtime.so"),
        "LD_LIBRARY_PATH": os.pathsep.join([str(BUILD), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTORCH_ALLOC_CONF": conf,
    }
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        environment.pop(name, None)
    command = [sys.executable, "-W", "error::RuntimeWarning", str(programs), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{programs.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _symbols(library: Path, which: str, dynamic: bool = True) -> list[str]:
    command = ["nm", *(["-D"] if dynamic else []), which, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    return [name for line in lines if (name := line.split()[-1]).startswith("cuda")]


def _compile(compiler: str, *arguments: object) -> None:
    command = [compiler, "-fPIC", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
