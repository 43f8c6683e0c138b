"""Whether every implementation's results land in memory that is already there.

PyTorch's CPU allocator is malloc, and glibc's malloc takes every large block fresh from the kernel and gives it back:
each iteration then pays for page faults and zeroing, which under a hypervisor can exceed the exchange itself. A GPU's
caching allocator has no such cost. `default` is malloc as users have it (hybrid_ep recycles its own large results, its
peers do not); `warm` keeps freed memory in the process, for all alike, and so compares the exchanges alone.
"""

from __future__ import annotations

import ctypes

MODES = ("default", "warm")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # <malloc.h>


def prepare(mode: str) -> str:
    """Sets this process's malloc up; returns the mode in force ("default" where malloc cannot be told)."""
    if mode != "warm":
        return "default"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return "default"
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
    return "warm" if all([mallopt(name, value) for name, value in settings]) else "default"
