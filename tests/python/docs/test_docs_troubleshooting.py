"""Whatever a timeout report or an exception of ours may be called, the troubleshooting page has it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from hybrid_ep import errors
from hybrid_ep.moe import RouterError

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SITES = set(re.findall(r'return "(\w+)";', (ROOT / "csrc/common/timeout_report.h").read_text()))
SITES -= {"test_site", "unknown"}
ABOVE = {"HookError", "RankFailed"}  # of megatron_patches and recipes
OURS = {
    kind.__name__
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.HybridEPError) and kind is not errors.HybridEPError
}


def test_there_are_sites():
    assert {"rail_chunk", "peer_done", "headers_differ"} <= SITES


@pytest.mark.parametrize("site", sorted(SITES))
def test_site_of_a_wait(site):
    assert f"`{site}`" in PAGE


@pytest.mark.parametrize("name", sorted({RouterError.__name__, *ABOVE, *OURS}))
def test_exception(name):
    assert f"`{name}`" in PAGE
