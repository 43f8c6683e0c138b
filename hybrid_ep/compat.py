"""`import deep_ep` gives hybrid_ep: for callers written for deep_ep.HybridEPBuffer that import it by that
name."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import hybrid_ep

_previous: ModuleType | None = None


def installed() -> bool:
    return getattr(sys.modules.get("deep_ep"), "__hybrid_ep__", False)


def install_as_deep_ep(force: bool = False) -> ModuleType:
    """Makes `import deep_ep` mean a module with HybridEPBuffer and HybridEpConfigInstance. Idempotent.

    Call it before anything imports deep_ep. Raises RuntimeError when a real deep_ep is imported or
    importable, unless force=True; modules that imported its classes before keep them."""
    global _previous
    if installed():
        return sys.modules["deep_ep"]
    real = sys.modules.get("deep_ep")
    if not force and (real is not None or importlib.util.find_spec("deep_ep") is not None):
        where = getattr(real, "__file__", None) or "on the import path"
        raise RuntimeError(f"a real deep_ep is there ({where}); uninstall it, or hide it with "
                           "install_as_deep_ep(force=True)")
    module = ModuleType("deep_ep", "hybrid_ep under deep_ep's name.")
    module.__hybrid_ep__ = True
    module.__version__ = f"{hybrid_ep.__version__}+hybrid_ep"
    module.HybridEPBuffer = hybrid_ep.HybridEPBuffer
    module.HybridEpConfigInstance = hybrid_ep.HybridEpConfigInstance
    module.__all__ = ["HybridEPBuffer", "HybridEpConfigInstance"]
    _previous = real
    sys.modules["deep_ep"] = module
    return module


def uninstall() -> None:
    """Takes it back; what deep_ep was before, if anything, is there again. Idempotent."""
    global _previous
    if not installed():
        return
    del sys.modules["deep_ep"]
    if _previous is not None:
        sys.modules["deep_ep"] = _previous
    _previous = None
