"""Ctrl-C while an operation waits for other ranks: the wait ends at once, and the buffer says why it is unusable."""

import signal
import time

import pytest
import torch

from hybrid_ep.errors import BufferFailedError
from hybrid_ep.testing import VirtualWorld


def test_a_signal_ends_the_wait_long_before_the_deadline():
    buffer = VirtualWorld(1, 2).buffers(64, 8, 2, timeout_s=60)[0]  # nobody plays rank 1
    call = dict(hidden=torch.zeros(8, 64), topk_idx=torch.zeros(8, 1, dtype=torch.int64), num_of_experts=4)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # as SIGINT, without a terminal
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            buffer.dispatch(**call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 30
    with pytest.raises(BufferFailedError, match="interrupted"):
        buffer.dispatch(**call)
