"""What a measurement ran on: written above the table and into the JSON, so a number can be placed later."""

from __future__ import annotations

import datetime
import os
import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hybrid_ep.tuning import cpu_model, device_name

__all__ = ["describe", "device_name", "peak_rss_bytes"]


def describe() -> dict[str, Any]:
    """Versions, machine, commit and time, as plain data."""
    return {
        "version": _version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_model": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": list(os.getloadavg()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _version() -> str:
    try:
        return metadata.version("hybrid_ep")
    except metadata.PackageNotFoundError:
        return "(source tree)"


def _commit() -> str:
    """The checkout's commit, with + when tracked files were changed; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return "unknown"
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()
