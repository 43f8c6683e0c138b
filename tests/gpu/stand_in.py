"""A pytest plugin that puts the host in the GPU's place, so that tests of this folder which need no device can be tried
without one: buffers run on the host's executors as if those ran beside the host, and there are no streams.

    PYTHONPATH=.:tests/gpu pytest -p stand_in tests/gpu/test_host_tests.py"""

from __future__ import annotations

import contextlib

import pytest
import torch

from hybrid_ep.testing import VirtualWorld

EXECUTORS = {"cuda": "host", "cuda_loopback": "host_checked"}  # whose rails delay and scatter
_buffers = VirtualWorld.buffers


class Stream:
    device = torch.device("cpu")

    def query(self) -> bool:
        return True


def buffers(self, *arguments, executor: str = "host", **options):
    if executor in EXECUTORS:
        self.streams = self.streams or self.more_streams()
    made = _buffers(self, *arguments, executor=EXECUTORS.get(executor, executor), **options)
    if executor in EXECUTORS:
        for buffer in made:
            buffer._session.runs_beside = True
    return made


def pytest_configure():
    VirtualWorld.buffers = buffers
    VirtualWorld.more_streams = lambda self: [Stream() for _ in range(self.size)]
    torch.cuda.Stream, torch.cuda.stream = Stream, lambda _: contextlib.nullcontext()
    torch.cuda._sleep = lambda _: None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:  # what conftest.py says of a machine without a GPU
        item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]
