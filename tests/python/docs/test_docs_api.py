"""docs/api.md shows every public method of the classes it names, those of their bases too."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

API = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text()
CLASSES = re.findall(r"^\.\. autoclass:: (\S+)\n((?:   :\S+:.*\n)*)", API, re.MULTILINE)


@pytest.mark.parametrize("name, options", CLASSES, ids=[name for name, _ in CLASSES])
def test_methods_of_bases_are_shown(name, options):
    module, _, cls = name.rpartition(".")
    found = getattr(importlib.import_module(module), cls)
    bases = [base for base in found.__mro__[1:] if base.__module__.startswith("hybrid_ep")]
    inherited = {
        method
        for base in bases
        for method, value in vars(base).items()
        if not method.startswith("_") and method not in vars(found) and inspect.getdoc(value)
    }
    assert not inherited or ":inherited-members:" in options, f"{name}: {sorted(inherited)} are left out"


def test_a_buffer_has_methods_of_bases():
    assert dict(CLASSES)["hybrid_ep.HybridEPBuffer"].count("members:") == 2
