"""The machine's limit: how fast all ranks together can stream memory, measured beside the rest.

Each rank copies between two private buffers larger than a last-level cache slice, one thread each, all at the same
time; libc's memmove is what a copy costs at best."""

from __future__ import annotations

import ctypes

import torch

DEFAULT_BYTES = 64 << 20


class Memcpy:
    """A copy of `num_bytes` within this rank; one `run()` is one sample."""

    def __init__(self, num_bytes: int = DEFAULT_BYTES) -> None:
        self.num_bytes = num_bytes
        self._source = torch.ones(num_bytes, dtype=torch.uint8, device="cpu")
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")  # written here: no page fault is timed

    def run(self) -> None:
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self.num_bytes)
