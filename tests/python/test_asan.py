"""On a core built with AddressSanitizer (scripts/python_asan.py): the tests beside this one run on that core, and a
tensor that lies about its size would be found out."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from hybrid_ep import _core

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__asan_init"), reason="not under AddressSanitizer")

PLANTED = """
import torch
from boundary import changed, given, watched_run

def lie(verb, call, arguments):
    if verb == "dispatch":
        short = torch.empty(arguments["x"].num_bytes - 16, dtype=torch.uint8)
        arguments["x"] = changed(arguments["x"], address=short.data_ptr(), tensor=short)
    return arguments

watched_run(1, 1, lie, lambda b, mine: b.dispatch(mine.hidden, topk_idx=mine.idx))
"""


def test_the_core_is_the_sanitized_one():
    assert "python-asan" in _core.__file__


def test_an_over_read_is_found(request):
    result = subprocess.run(
        [sys.executable, "-c", PLANTED],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=request.path.parent,
    )
    assert result.returncode and "AddressSanitizer: heap-buffer-overflow" in result.stderr, result.stderr[-2000:]
