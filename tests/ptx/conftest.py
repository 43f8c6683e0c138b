"""Tests of the PTX machine itself; they skip where its library was not built (scripts/build_cuda.py --interpreted)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(items):
    from ptx_machine import LIBRARY

    for item in items:
        if HERE in Path(item.path).parents and not LIBRARY.is_file():
            item.add_marker(pytest.mark.skip(reason=f"{LIBRARY.name} for the PTX machine is not built"))
