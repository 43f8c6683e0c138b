"""`hybrid-ep doctor`: is this machine fit to train on? One line a check, OK, WARN or FAIL, each with its remedy.

A check is a function that returns or yields findings; an exception in one is a FAIL of that check and no other. Nothing
is changed, nothing is contacted: versions, memory limits, the grouped GEMM's behaviour and a small dispatch and
combine between two ranks inside this process. Exit code 0, or 1 when a line says FAIL.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from hybrid_ep.cli import EXIT_OK, EXIT_WRONG

OK, WARN, FAIL = "OK", "WARN", "FAIL"
MEGATRON_TESTED = ((0, 16), (0, 19))  # as megatron_patches/seams.py, which this package must not import
SHM = "/dev/shm"
SHM_FAIL_BYTES, SHM_WARN_BYTES = 64 << 20, 1 << 30  # what containers get by default; what small training needs
LOOPBACK_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """check: its name; status: OK, WARN or FAIL; text: what was found; remedy: what to do, empty when OK."""

    check: str
    status: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5}{self.check:<15}{self.text}" + (f"\n{'':20}-> {self.remedy}" if self.remedy else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, one object")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    findings = examine()
    if args.json:
        counts = {status: sum(f.status == status for f in findings) for status in (OK, WARN, FAIL)}
        print(json.dumps({"findings": [dataclasses.asdict(f) for f in findings], "counts": counts}, indent=2))
    else:
        for finding in findings:
            print(finding)
    return EXIT_WRONG if any(f.status == FAIL for f in findings) else EXIT_OK


def examine() -> list[Finding]:
    """All findings, in the order of CHECKS."""
    findings = []
    for name, check in CHECKS.items():
        try:
            findings += [Finding(name, *found) for found in check()]
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            findings.append(Finding(name, FAIL, text, "this check itself failed; the message says why"))
    return findings


Found = Iterator[tuple[Any, ...]]  # (status, text) or (status, text, remedy)


def _python() -> Found:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        yield WARN, text, "hybrid_ep is tested with Python 3.10 to 3.13; use one of those"
    elif platform.system() != "Linux":
        yield FAIL, text, "hybrid_ep needs Linux"
    else:
        yield OK, text


def _environment() -> Found:
    from hybrid_ep import env

    bad = False
    for name in env.TABLE:
        try:
            env.get(name)
        except ValueError as error:
            bad = True
            yield FAIL, str(error), f"unset {name} or give it a value of that type"
    if not bad:
        given = [f"{name}={env.get(name)}" for name in env.TABLE if env.get(name) != env.TABLE[name].default]
        yield OK, ", ".join(given) or "no HYBRID_EP_* variable differs from its default"


def _torch() -> Found:
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    text = f"torch {torch.__version__}, distributed {'with gloo' if torch.distributed.is_available() else 'missing'}"
    if release < (2, 9):
        yield FAIL, text, "install torch >= 2.9"
    elif not torch.distributed.is_available():
        yield FAIL, text, "install a torch built with torch.distributed"
    else:
        yield OK, text


def _core() -> Found:
    import hybrid_ep
    from hybrid_ep import _core as core

    yield OK, f"hybrid_ep {hybrid_ep.__version__}, executors {', '.join(core.executors())}"


def _gpu() -> Found:
    import torch

    if not torch.cuda.is_available():
        yield WARN, "torch sees no GPU", "nothing to do on a machine without one: the host executor trains on CPUs"
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        facts = torch.cuda.get_device_properties(index)
        yield OK, f"GPU {index}: {facts.name}, compute capability {major}.{minor}, {facts.total_memory >> 30} GiB"
    if torch.distributed.is_nccl_available():
        yield OK, f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _megatron() -> Found:
    version = _version("megatron-core")
    low, high = MEGATRON_TESTED
    if version is None:
        yield WARN, "megatron-core is not installed", "pip install 'hybrid_ep[megatron]' to train with Megatron"
    elif not low <= tuple(int(part) for part in version.split(".")[:2]) <= high:
        yield WARN, f"megatron-core {version}", "tested with 0.16 to 0.19; install one of those"
    else:
        yield OK, f"megatron-core {version}"


def _optional() -> Found:
    found = {name: _version(package) or ("present" if importlib.util.find_spec(module) else None)
             for name, package, module in (("Transformer Engine", "transformer-engine", "transformer_engine"),
                                           ("apex", "apex", "apex"), ("Triton", "triton", "triton"),
                                           ("NVSHMEM", "nvidia-nvshmem-cu13", "nvshmem"))}
    yield OK, "optional: " + ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())


def _shared_memory() -> Found:
    from hybrid_ep import _core as core

    free = shutil.disk_usage(SHM).free
    text = f"{SHM} has {free / 2**20:,.0f} MiB free"
    name = f"/hybrid_ep_doctor_{os.getpid()}"
    segment = core.Segment.create(name, 1 << 20)  # maps it for real: a full or forbidden /dev/shm raises here
    segment.unlink()
    remedy = "registered buffers live there; enlarge it (docker run --shm-size=16g, or mount -o remount,size=16g)"
    if free < SHM_WARN_BYTES:
        yield (FAIL if free < SHM_FAIL_BYTES else WARN), text, remedy
    else:
        yield OK, text


def _grouped_gemm() -> Found:
    import torch

    from hybrid_ep.moe.backends import BACKENDS
    from hybrid_ep.moe.probing import examine as probe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable = 0
    for backend in BACKENDS.values():
        if backend.name == "te" and importlib.util.find_spec("transformer_engine") is None:
            continue
        found = probe(backend, device, torch.bfloat16)
        text = f"{backend.name}, bfloat16 on {found.device}: {found.found}; remedy {found.remedy}"
        usable += found.remedy != "unusable"
        if found.remedy == "unusable":
            yield WARN, text, "grouped_mm uses another backend; a newer torch may lift this"
        else:
            yield OK, text + (" (grouped_mm applies it by itself)" if found.remedy != "none" else "")
    if not usable:
        yield FAIL, "no backend multiplies groups correctly here", "install torch >= 2.10"


def _loopback() -> Found:
    """Integers, so that every sum is exact: each token must come back as often as it was sent."""
    import torch

    from hybrid_ep import HybridEPBuffer
    from hybrid_ep.testing import VirtualWorld

    ranks, experts, tokens, hidden, topk = 4, 8, 64, 256, 3
    world = VirtualWorld(2, 2)

    def body(rank, group):
        g = torch.Generator().manual_seed(rank)
        x = torch.randint(-8, 9, (tokens + rank, hidden), generator=g).bfloat16()
        idx = torch.rand(tokens + rank, experts, generator=g).argsort(1)[:, :topk]
        with HybridEPBuffer(group, hidden, tokens + ranks, experts // ranks, timeout_s=LOOPBACK_TIMEOUT_S,
                            num_of_hybrid_ep_ranks_per_nvlink_domain=2) as buffer:
            rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=experts,
                                                                 pad_multiple=8, pad_empty_experts=True)
            out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        return torch.equal(out, x * topk)

    wrong = [rank for rank, right in enumerate(world.run(body)) if not right]
    text = f"dispatch and combine between {ranks} ranks (2 nodes x 2) in this process"
    if wrong:
        yield FAIL, f"{text}: wrong sums on ranks {wrong}", "rebuild the core (pip install --force-reinstall .)"
    else:
        yield OK, f"{text}: every sum exact"


CHECKS = {
    "python": _python, "environment": _environment, "torch": _torch, "core": _core, "gpu": _gpu,
    "megatron": _megatron, "optional": _optional, "shared memory": _shared_memory, "grouped gemm": _grouped_gemm,
    "loopback": _loopback,
}
