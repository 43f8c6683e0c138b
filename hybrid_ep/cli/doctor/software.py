"""Versions: Python, torch, Megatron-Core and what it likes to find, and whether they were tested with this release.

Tested means: this release's tests ran with it, here said by (major, minor). What was not is called so, in one phrase;
it is a warning where training would use it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from typing import NamedTuple

from hybrid_ep.cli.doctor.finding import FAIL, OK, SKIP, WARN, Found, build_remedy

MEGATRON_TESTED = ((0, 16), (0, 19))  # as megatron_patches/hooks.py, which this package must not import
TORCH_OLDEST, TORCH_TESTED = (2, 9), ((2, 15),)
NOT_TESTED = "not tested with this release"
# megatron-core: the Pythons it has been tested on. Releases from 0.17 on need 3.12. On 3.14 dispatchers of 0.19
# work, and megatron.training does not start: its flags are made in a way that argparse no longer takes.
PYTHON_FOR_MEGATRON = {(0, 16): ((3, 10), (3, 12)), (0, 17): ((3, 12), (3, 13))}


def python() -> Found:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 14):
        yield WARN, f"{text}; {NOT_TESTED} (tested: 3.10 to 3.14)", "use one of those"
    elif platform.system() != "Linux":
        yield FAIL, text, "hybrid_ep needs Linux"
    else:
        yield OK, text


def environment() -> Found:
    from hybrid_ep import env

    bad = False
    for name in env.TABLE:
        try:
            env.get(name)
        except ValueError as error:
            bad = True
            yield FAIL, str(error), f"unset {name} or give it a value of that type"
    if not bad:
        try:
            env.check()
        except ValueError as error:
            bad = True
            yield FAIL, str(error), "unset HYBRID_EP_TUNING or give it a file of `hybrid-ep tune`"
    strange = env.unknown()
    for name, meant in strange.items():
        remedy = f"write {meant}, or unset it" if meant else "unset it; python -m hybrid_ep.env prints those there are"
        yield WARN, f"{name} is set, and nothing reads it", remedy
    if not bad:
        given = [f"{name}={env.get(name)}" for name in env.TABLE if env.get(name) != env.TABLE[name].default]
        if given or not strange:
            yield OK, ", ".join(given) or "no HYBRID_EP_* variable differs from its default"


def torch() -> Found:
    import torch

    release = _release(torch.__version__)
    text = f"torch {torch.__version__}, distributed {'with gloo' if torch.distributed.is_available() else 'missing'}"
    if release < TORCH_OLDEST:
        yield FAIL, text, "install torch >= 2.9"
    elif not torch.distributed.is_available():
        yield FAIL, text, "install a torch built with torch.distributed"
    elif release > TORCH_TESTED[-1]:
        yield WARN, f"{text}; newer, {NOT_TESTED}", f"tested: {_list(TORCH_TESTED)}; use that"
    elif release not in TORCH_TESTED:
        yield OK, f"{text}; {NOT_TESTED} (tested: {_list(TORCH_TESTED)})"
    else:
        yield OK, f"{text}; tested with this release"


def core() -> Found:
    import hybrid_ep
    from hybrid_ep import _core as core

    yield OK, f"hybrid_ep {hybrid_ep.__version__}, executors {', '.join(core.executors())}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, int]:
    """(major, minor) of a version."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _list(releases: tuple[tuple[int, int], ...]) -> str:
    *most, last = (f"{major}.{minor}" for major, minor in releases)
    return f"{', '.join(most)} and {last}" if most else last


def megatron(required: bool = False) -> Found:
    import torch

    version = _version("megatron-core")
    if version is None:
        yield (
            (FAIL if required else WARN),
            "megatron-core is not installed",
            ("pip install 'hybrid_ep[megatron]' to train with Megatron"),
        )
        return
    release, python = _release(version), sys.version_info[:2]
    text = f"megatron-core {version} on Python {python[0]}.{python[1]} with torch {torch.__version__}"
    low, high = MEGATRON_TESTED
    if not low <= release <= high:
        yield WARN, f"megatron-core {version}: {NOT_TESTED} (tested: 0.16 to 0.19)", "install one of those"
        return
    oldest, newest = PYTHON_FOR_MEGATRON[max(known for known in PYTHON_FOR_MEGATRON if known <= release)]
    if not oldest <= python <= newest:
        yield (
            WARN,
            f"{text}: {NOT_TESTED} (tested: Python {_list((oldest,))} to {_list((newest,))})",
            ("use one of those"),
        )
    elif _release(torch.__version__) not in TORCH_TESTED:
        yield OK, f"{text}: {NOT_TESTED} (tested: torch {_list(TORCH_TESTED)})"
    else:
        yield OK, f"{text}: tested together"


class Part(NamedTuple):
    """Something that is used where it is installed. packages: names of its distribution; tested: releases; how: what
    was done with those; remedy: for one that was not tested."""

    name: str
    packages: tuple[str, ...]
    module: str
    tested: tuple[tuple[int, int], ...]
    how: str
    remedy: str


_TE = "transformer_engine"
PARTS = (
    Part(
        "Transformer Engine",
        ("transformer-engine",),
        _TE,
        (),
        "",
        "our calls met a stand-in of it only; the line 'grouped gemm' tries them on this machine",
    ),
    Part("apex", ("apex",), "apex", (), "", "recipes leave it out with --set apex=no"),
    Part(
        "Triton",
        ("triton", "pytorch-triton"),
        "triton",
        ((3, 9),),
        "kernels compiled and interpreted, run on no GPU",
        "train a few steps with --hybrid-ep-grouped-gemm and without, and compare the losses",
    ),
    Part(
        "NVSHMEM",
        ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
        "",
        ((3, 4), (3, 7), (3, 8)),
        "kernels compiled and linked, run on no NIC",
        f"used between nodes only; after installing one of those: {build_remedy('--nvshmem')}",
    ),
)
NCCL = Part("NCCL", (), "", (), "", "torch's own collectives use it, dispatch and combine do not")


def optional(required: bool = False) -> Found:
    """Nothing here is required to import hybrid_ep; what is missing is named, so that nobody looks for it in a log.
    required: of a node that runs the GPU recipes, whose layers are Transformer Engine's."""
    missing = []
    for part in PARTS:
        version = next(filter(None, map(_version, part.packages)), None)
        if version is None and part.module and importlib.util.find_spec(part.module) is not None:
            version = "of unknown version"
        if version is None and required and part.module == _TE:
            yield (
                FAIL,
                f"{part.name} is not installed, and the GPU recipes run Megatron's layers with it",
                ("pip install --no-build-isolation 'transformer-engine[pytorch]', or a container that has it"),
            )
        elif version is None:
            missing.append(part.name)
        else:
            yield _judged(part, version)
    if (version := nccl_version()) is None:
        missing.append("NCCL")
    else:
        yield _judged(NCCL, version)
    if missing:
        yield SKIP, f"not installed: {', '.join(missing)}"


def _judged(part: Part, version: str) -> tuple[str, ...]:
    """The line of an installed part. Without a GPU nothing uses one, so that an untested one is no warning."""
    import torch

    text = f"{part.name} {version}"
    if version[0].isdigit() and _release(version) in part.tested:
        return OK, f"{text}: tested ({part.how})"
    text += f": {NOT_TESTED}" + (f" (tested: {_list(part.tested)})" if part.tested else "")
    return (WARN, text, part.remedy) if torch.cuda.is_available() else (OK, f"{text}; unused without a GPU")


def nccl_version() -> str | None:
    """Of the NCCL in torch, which says it without a GPU too; None where torch has none."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))
