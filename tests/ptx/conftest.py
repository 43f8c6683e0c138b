"""Tests of the PTX machine itself; they skip where its library was not built (scripts/build_cuda.py --interpreted)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


SLOW = {"test_megatron.py": "a training takes half a minute", "test_counts.py": "ptxas compiles the kernels"}


def pytest_addoption(parser):
    parser.addoption("--ptx-slow", action="store_true", help="also the tests that CI leaves to the soak")


def pytest_collection_modifyitems(config, items):
    from ptx_machine import LIBRARY

    slow = config.getoption("--ptx-slow", default=False)
    for item in items:
        if HERE in Path(item.path).parents and not slow and (why := SLOW.get(Path(item.path).name)):
            item.add_marker(pytest.mark.skip(reason=f"{why}; --ptx-slow runs it"))
        if HERE in Path(item.path).parents and not LIBRARY.is_file():
            item.add_marker(pytest.mark.skip(reason=f"{LIBRARY.name} for the PTX machine is not built"))
