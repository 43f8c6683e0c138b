"""What a rank had of a processor core while it was in a call: it ran, it was ready and waited for a core, or it slept.

Where ranks are more than cores, this tells what a call costs from what its ranks take from each other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class CoreTime(NamedTuple):
    """Seconds of the calling thread since its start. queued: ready to run, on no core."""

    running: float
    queued: float


def now() -> CoreTime | None:
    """Of the calling thread; None where the system does not say (anything but Linux)."""
    try:
        queued = int(_SCHEDSTAT.read_text().split()[1])  # its first number, of running, may be a scheduler's tick old
    except (OSError, IndexError, ValueError):
        return None
    return CoreTime(time.thread_time(), queued * 1e-9)
