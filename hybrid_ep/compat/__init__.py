"""`import deep_ep` gives hybrid_ep: for callers written for deep_ep that import it by that name.

    import hybrid_ep
    hybrid_ep.compat.install_as_deep_ep()
    from deep_ep import Buffer, HybridEPBuffer       # ours

What is served under which name is one table, SERVED. HybridEPBuffer is ours with what deep_ep's has besides; Buffer is
deep_ep's older interface, its high-throughput half, and ElasticBuffer the dispatch and combine of its V2, over the same
verbs."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import hybrid_ep

_BUFFER, _CASTS, _ELASTIC, _ENVS, _EVENTS, _HYBRID, _CONFIG = (
    "compat.buffer", "compat.casts", "compat.elastic", "compat.envs", "compat.events", "compat.hybrid", "config",
)  # fmt: skip
# Module -> what it holds -> where that comes from, below hybrid_ep.
SERVED: dict[str, dict[str, str]] = {
    "deep_ep": {
        "Buffer": _BUFFER,
        "Config": _EVENTS,
        "EPHandle": _ELASTIC,
        "ElasticBuffer": _ELASTIC,
        "EventHandle": _EVENTS,
        "EventOverlap": _EVENTS,
        "HybridEPBuffer": _HYBRID,
        "HybridEpConfigInstance": _CONFIG,
        "get_logical_domain_size": _ENVS,
        "get_physical_domain_size": _ENVS,
        "topk_idx_t": _EVENTS,
    },
    "deep_ep.buffer": {"Buffer": _BUFFER, "Config": _EVENTS, "EventHandle": _EVENTS, "EventOverlap": _EVENTS},
    "deep_ep.buffers": {},
    "deep_ep.buffers.elastic": {"EPHandle": _ELASTIC, "ElasticBuffer": _ELASTIC},
    "deep_ep.buffers.legacy": {"Buffer": _BUFFER},
    "deep_ep.utils": {"EventHandle": _EVENTS, "EventOverlap": _EVENTS},
    "deep_ep.utils.envs": {"get_logical_domain_size": _ENVS, "get_physical_domain_size": _ENVS},
    "deep_ep.utils.math": dict.fromkeys(
        ("align", "calc_diff", "ceil_div", "per_token_cast_back", "per_token_cast_to_fp8"), _CASTS
    ),
    "deep_ep.utils.event": {"EventHandle": _EVENTS, "EventOverlap": _EVENTS},
    "deep_ep.hybrid_ep_buffer": {"HybridEPBuffer": _HYBRID, "indices_to_map": _HYBRID},
    # The compiled halves of deep_ep, from which some callers import directly; _C is V2's.
    "deep_ep._C": {"Config": _EVENTS, "EventHandle": _EVENTS, "topk_idx_t": _EVENTS},
    "deep_ep_cpp": {"Config": _EVENTS, "EventHandle": _EVENTS, "topk_idx_t": _EVENTS},
    "hybrid_ep_cpp": {"HybridEpConfigInstance": _CONFIG, "UINT8": _CONFIG, "UINT16": _CONFIG},
}
_PACKAGES = {name.rpartition(".")[0] for name in SERVED} - {""}
_ROOTS = tuple(name for name in SERVED if "." not in name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and fills the modules of SERVED, so that they have the specs that importlib.util.find_spec reads."""

    def __init__(self) -> None:
        self.hidden: dict[str, ModuleType] = {}  # modules of a real deep_ep that were imported before

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in SERVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="hybrid_ep", is_package=fullname in _PACKAGES)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, f"hybrid_ep under the name {spec.name}; see hybrid_ep.compat.")

    def exec_module(self, module: ModuleType) -> None:
        contents: dict[str, Any] = module.__dict__
        for name, source in SERVED[module.__name__].items():
            contents[name] = getattr(importlib.import_module(f"hybrid_ep.{source}"), name)
        contents["__all__"] = list(SERVED[module.__name__])
        contents["__hybrid_ep__"] = True
        contents["__version__"] = f"{hybrid_ep.__version__}+hybrid_ep"


_installed: _Finder | None = None


def installed() -> bool:
    """Whether `import deep_ep` gives hybrid_ep now."""
    return getattr(sys.modules.get("deep_ep"), "__hybrid_ep__", False)


def _is_served(name: str) -> bool:
    return name.split(".")[0] in _ROOTS


def _refuse_a_real_one() -> None:
    for root in _ROOTS:
        real = sys.modules.get(root)
        if real is None and importlib.util.find_spec(root) is None:
            continue
        where = getattr(real, "__file__", None) or "on the import path"
        raise RuntimeError(
            f"a real {root} is there ({where}); uninstall it, or hide it with install_as_deep_ep(force=True)"
        )


def install_as_deep_ep(force: bool = False) -> ModuleType:
    """Makes `import deep_ep` and its submodules mean the modules of SERVED. Idempotent; returns deep_ep.

    Call it before anything imports deep_ep. Raises RuntimeError when a real deep_ep is imported or
    importable, unless force=True; modules that imported its classes before keep them."""
    global _installed
    if installed():
        return sys.modules["deep_ep"]
    _take_away()
    if not force:
        _refuse_a_real_one()
    finder = _Finder()
    finder.hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_served(name)}
    sys.meta_path.insert(0, finder)
    _installed = finder
    module = importlib.import_module("deep_ep")
    for name in SERVED:  # as deep_ep does: `import deep_ep` is enough to reach deep_ep.utils
        importlib.import_module(name)
    return module


def uninstall() -> None:
    """Takes it back; what deep_ep was before, if anything, is there again. Idempotent."""
    _take_away()


def _take_away() -> None:
    global _installed
    if _installed is None:
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _installed]
    for name in [name for name in sys.modules if _is_served(name)]:
        del sys.modules[name]
    sys.modules.update(_installed.hidden)
    _installed = None
