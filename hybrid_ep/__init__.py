"""hybrid_ep: expert-parallel dispatch and combine for Mixture-of-Experts training.

    from hybrid_ep import HybridEPBuffer

Submodules load on demand: errors, env, reference and traffic work without the compiled core; whatever needs
it says so when it is missing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "HybridEPBuffer": ("hybrid_ep.buffer", "HybridEPBuffer"),
    "HybridEpConfigInstance": ("hybrid_ep.config", "HybridEpConfigInstance"),
    "DeadlineError": ("hybrid_ep.errors", "DeadlineError"),
    "CapacityError": ("hybrid_ep.errors", "CapacityError"),
}

_SUBMODULES = ("compat", "functional", "reference")  # documented as attributes of the package

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"hybrid_ep.{name}")  # which sets the attribute
    if name not in _LAZY:
        raise AttributeError(f"module 'hybrid_ep' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES})
