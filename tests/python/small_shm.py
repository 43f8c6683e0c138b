"""A /dev/shm of a few MiB, which the other processes of this machine do not see."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading

import pytest


def with_small_shm(mebibytes: int, work):
    """work() in a thread of its own with a private /dev/shm of that size; skips where one may not be mounted."""
    answer: list = []

    def body() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000):  # CLONE_NEWNS: of this thread, and of those it starts
            answer.append(pytest.skip.Exception(f"no mount namespace here: {os.strerror(ctypes.get_errno())}"))
            return
        for command in (
            ["mount", "--make-rprivate", "/"],
            ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", "/dev/shm"],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                answer.append(pytest.skip.Exception(f"{' '.join(command)}: {done.stderr.strip()}"))
                return
        try:
            answer.append(work())
        except BaseException as error:
            answer.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return answer[0]
