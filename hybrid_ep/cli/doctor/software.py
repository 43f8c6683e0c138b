"""Versions: Python, torch, Megatron-Core and what it likes to find, and whether they were tested together."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

from hybrid_ep.cli.doctor.finding import FAIL, OK, WARN, Found

MEGATRON_TESTED = ((0, 16), (0, 19))  # as megatron_patches/seams.py, which this package must not import
TORCH_OLDEST, TORCH_NEWEST_TESTED = (2, 9), (2, 15)
# megatron-core: the Pythons it has been tested on. Releases from 0.17 on need 3.12.
PYTHON_FOR_MEGATRON = {(0, 16): ((3, 10), (3, 12)), (0, 17): ((3, 12), (3, 13))}


def python() -> Found:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        yield WARN, text, "hybrid_ep is tested with Python 3.10 to 3.13; use one of those"
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
        given = [f"{name}={env.get(name)}" for name in env.TABLE if env.get(name) != env.TABLE[name].default]
        yield OK, ", ".join(given) or "no HYBRID_EP_* variable differs from its default"


def torch() -> Found:
    import torch

    release = _release(torch.__version__)
    text = f"torch {torch.__version__}, distributed {'with gloo' if torch.distributed.is_available() else 'missing'}"
    if release < TORCH_OLDEST:
        yield FAIL, text, "install torch >= 2.9"
    elif not torch.distributed.is_available():
        yield FAIL, text, "install a torch built with torch.distributed"
    elif release > TORCH_NEWEST_TESTED:
        yield WARN, text, f"newer than any that was tested; {'.'.join(map(str, TORCH_NEWEST_TESTED))} was the newest"
    else:
        yield OK, text


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


def megatron() -> Found:
    version = _version("megatron-core")
    if version is None:
        yield WARN, "megatron-core is not installed", "pip install 'hybrid_ep[megatron]' to train with Megatron"
        return
    release, python = _release(version), sys.version_info[:2]
    text = f"megatron-core {version} on Python {python[0]}.{python[1]}"
    low, high = MEGATRON_TESTED
    if not low <= release <= high:
        yield WARN, f"megatron-core {version}", "tested with 0.16 to 0.19; install one of those"
        return
    oldest, newest = PYTHON_FOR_MEGATRON[max(known for known in PYTHON_FOR_MEGATRON if known <= release)]
    if not oldest <= python <= newest:
        yield WARN, text, (f"not tested together: {release[0]}.{release[1]} was tested on Python "
                           f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}; use one of those")
    else:
        yield OK, f"{text}, tested together"


def optional() -> Found:
    """Nothing here is required; what is missing is named, so that nobody looks for it in a log."""
    found = {name: _version(package) or ("present" if importlib.util.find_spec(module) else None)
             for name, package, module in (("Transformer Engine", "transformer-engine", "transformer_engine"),
                                           ("apex", "apex", "apex"), ("Triton", "triton", "triton"))}
    found["NVSHMEM"] = _version("nvidia-nvshmem-cu13") or _version("nvidia-nvshmem-cu12")
    yield OK, ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
