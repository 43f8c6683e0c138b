"""This machine: GPUs and their driver, the compiler for them, limits on memory."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

from hybrid_ep.cli import outputs
from hybrid_ep.cli.doctor.finding import FAIL, OK, SKIP, WARN, Found, build_remedy

SHM = "/dev/shm"
SHM_FAIL_BYTES, SHM_WARN_BYTES = 64 << 20, 1 << 30  # what containers get by default; what small training needs
_NVIDIA_SMI_S = 20
_LEFT_AFTER_MINUTES = 60  # far beyond any set-up, after which no segment has a name


def gpu(required: bool = False) -> Found:
    import torch

    missing = FAIL if required else WARN
    if not torch.cuda.is_available():
        if not required:
            remedy = "nothing to do on a machine without one: the host executor trains on CPUs"
        elif torch.version.cuda is None:
            remedy = f"torch {torch.__version__} is a build without CUDA: install one that has it"
        else:
            remedy = (
                "nvidia-smi must list the GPUs: load the driver, pass them into the container (--gpus all), ask "
                "Slurm for them (--gpus-per-node), and leave CUDA_VISIBLE_DEVICES unset or right"
            )
        yield missing, "torch sees no GPU", remedy
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        facts = torch.cuda.get_device_properties(index)
        text = f"GPU {index}: {facts.name}, compute capability {major}.{minor}, {facts.total_memory >> 30} GiB"
        if (major, minor) in ((9, 0), (10, 0)):
            yield OK, text
        else:
            yield (
                missing,
                text,
                (
                    "the CUDA executor has kernels for compute capability 9.0 and 10.0 alone; hide this "
                    "one (CUDA_VISIBLE_DEVICES), or train on CPUs"
                ),
            )


def cuda_library(required: bool = False) -> Found:
    """Ours: whether it is there, loads, and serves the current GPU. Without a GPU nothing needs it, unless required."""
    import torch

    from hybrid_ep.runtime import devices

    have_gpu = torch.cuda.is_available()
    try:
        if have_gpu:
            devices.current()
        else:
            devices.load()
    except (RuntimeError, ValueError) as error:
        if not (required or have_gpu):
            yield SKIP, f"{error}; nothing needs it without a GPU"
            return
        remedy = (
            "the message says what is in its way; the driver must be as new as the library's CUDA (nvidia-smi)"
            if devices.LIBRARY.is_file()
            else build_remedy()
        )
        yield (FAIL if required else WARN), str(error), f"{remedy}; CPU training works without"
    else:
        yield OK, f"{devices.LIBRARY.name} loads"


def nvlink() -> Found:
    """Links that are up, by GPU, as nvidia-smi tells them; direct access between every two GPUs, as CUDA does."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        yield SKIP, f"{outputs.count(count, 'GPU')}: nothing to link"
        return
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart[:4]) + (", ..." if len(apart) > 4 else "")
        yield (
            FAIL,
            f"no direct access between GPUs {pairs}",
            (
                "nvidia-smi topo -m shows the links; on NVSwitch machines nvidia-fabricmanager must run "
                "(systemctl status nvidia-fabricmanager), in containers all GPUs must be visible"
            ),
        )
    if (program := shutil.which("nvidia-smi")) is None:
        yield WARN, "nvidia-smi is not on PATH: the state of the links is not known", "put nvidia-smi on PATH"
        return
    said = subprocess.run(
        [program, "nvlink", "--status"], text=True, capture_output=True, timeout=_NVIDIA_SMI_S, check=False
    )
    yield from judge_links(said.stdout)


def judge_links(status: str) -> Found:
    """The text of `nvidia-smi nvlink --status`: as many links up on every GPU as on the best one."""
    up: list[int] = []
    for line in status.splitlines():
        if line.startswith("GPU "):
            up.append(0)
        elif up and "Link" in line and "GB/s" in line:
            up[-1] += 1
    text = f"NVLinks up by GPU: {', '.join(map(str, up)) or 'none found'}"
    if not up or max(up) == 0:
        yield WARN, text, "GPUs speak over PCIe, several times slower; ranks of one node are meant to share NVLink"
    elif min(up) < max(up):
        lame = [index for index, links in enumerate(up) if links < max(up)]
        yield FAIL, text, f"links of GPU {lame} are down: nvidia-smi nvlink --status -i {lame[0]}; reset or replace it"
    else:
        yield OK, text


def device_memory() -> Found:
    """A real allocation of each kind that ranks could share, made, exported and mapped again."""
    import torch

    from hybrid_ep.runtime import devices

    if not torch.cuda.is_available():
        yield SKIP, "no GPU: registered buffers live in host memory"
        return
    try:
        devices.current()
    except ValueError:
        yield SKIP, "not tried: the line 'cuda library' says why"
        return
    kinds = devices.working_kinds()
    text = f"kinds of device memory that can be shared: {', '.join(kinds) or 'none'}"
    channel = Path("/dev/nvidia-caps-imex-channels/channel0")
    if not kinds:
        yield FAIL, text, "in containers run with --ipc=host and all GPUs; see the driver's log (dmesg)"
    elif "fabric" in kinds:
        yield OK, text
    elif channel.exists():
        yield (
            WARN,
            text,
            (
                "an IMEX channel exists and fabric handles do not work: is nvidia-imex running on every "
                "host of the domain (nvidia-imex-ctl -N)?"
            ),
        )
    else:
        yield OK, f"{text}; fabric handles, which NVLink domains of several hosts need, do not work here"


def nvcc() -> Found:
    import torch

    home = os.environ.get("CUDA_HOME", "")
    found = next(
        filter(None, (shutil.which(os.path.join(home, "bin", "nvcc")) if home else None, shutil.which("nvcc"))), None
    )
    if found:
        yield OK, f"{found} (needed to build only)"
    elif torch.cuda.is_available():
        yield WARN, "no nvcc in CUDA_HOME or on PATH", f"needed to build only: {build_remedy()}"
    else:
        yield SKIP, "no nvcc, and no GPU to build for"


def locked_memory() -> Found:
    """RDMA pins what it moves."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield OK, "no limit on locked memory"
    elif Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        yield (
            WARN,
            f"at most {soft / 2**20:,.0f} MiB may be locked",
            (
                "RDMA registers all its buffers: ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: "
                "PropagateResourceLimitsExcept=MEMLOCK)"
            ),
        )
    else:
        yield OK, f"at most {soft / 2**20:,.0f} MiB may be locked; without RDMA nothing is"


def shared_memory() -> Found:
    from hybrid_ep import _core as core

    free = shutil.disk_usage(SHM).free
    text = f"{SHM} has {free / 2**20:,.0f} MiB free"
    name = f"/hybrid_ep_doctor_{os.getpid()}"
    segment = core.Segment.create(name, 1 << 20)  # maps it for real: a full or forbidden /dev/shm raises here
    segment.unlink()
    remedy = (
        f"registered buffers live there; enlarge it (docker run --shm-size=16g, or mount -o remount,size=16g {SHM})"
    )
    if free < SHM_WARN_BYTES:
        yield (FAIL if free < SHM_FAIL_BYTES else WARN), text, remedy
    else:
        yield OK, text
    if left := _left_segments():
        remedy = f'find {SHM} -maxdepth 1 -name "hybrid_ep*" -user $(id -un) -mmin +{_LEFT_AFTER_MINUTES} -delete'
        size = sum(left) / 2**20
        yield WARN, f"{size:,.0f} MiB of it are held by {len(left)} segments of jobs killed while they set up", remedy


def _left_segments() -> list[int]:
    """Bytes of this user's segments that still have a name though their set-up is long over."""
    left = []
    for path in Path(SHM).glob("hybrid_ep*"):
        with contextlib.suppress(FileNotFoundError):  # a job that is setting up removes its own
            found = path.stat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > 60 * _LEFT_AFTER_MINUTES:
                left.append(found.st_size)
    return left
