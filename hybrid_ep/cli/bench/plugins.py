"""Which implementations a run measures: those that come along, DeepEP's, and plug-ins from files and modules."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import traceback
from pathlib import Path

from hybrid_ep.cli import UsageError
from hybrid_ep.cli.bench.built_in import BUILT_IN
from hybrid_ep.cli.bench.deep_ep import ADAPTERS
from hybrid_ep.cli.bench.implementations import Implementation

_OWN = ("recipes.bench_peer_megatron",)  # not imported before somebody asks for peers


def choose(impl: tuple[str, ...] | None, peers: bool, specs: list[str]) -> list[type[Implementation]]:
    """The implementations that --impl, --peers and --peer name, base first. UsageError for an unknown name."""
    known = {kind.name: kind for kind in (*BUILT_IN, *ADAPTERS)}
    explicit = [kind for spec in specs for kind in load_plugin(spec)]
    found = [kind for spec in find_plugins() for kind in load_plugin(spec)] if peers or impl else []
    for kind in [*found, *explicit]:
        known[kind.name] = kind
    if impl:
        unknown = [name for name in impl if name not in known]
        if unknown:
            raise UsageError(f"--impl {','.join(unknown)}: not known; known are {', '.join(known)}")
        return [known[name] for name in dict.fromkeys([*impl, *(kind.name for kind in explicit)])]
    if peers:
        return list(known.values())
    return [known["hybrid_ep"], *explicit]


def load_plugin(spec: str) -> list[type[Implementation]]:
    """The `PEERS` of a plug-in given as FILE.py or as a module name; UsageError if it is not one."""
    try:
        if spec.endswith(".py"):
            location = importlib.util.spec_from_file_location(f"hybrid_ep_bench_peer_{Path(spec).stem}", spec)
            if location is None or location.loader is None:
                raise ImportError("no loader knows such a file")
            module = importlib.util.module_from_spec(location)
            location.loader.exec_module(module)
        else:
            module = importlib.import_module(spec)
    except (ImportError, FileNotFoundError) as error:
        raise UsageError(f"--peer {spec}: cannot be loaded ({error}); give FILE.py or a module") from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"--peer {spec}: cannot be loaded, {place.filename}:{place.lineno} raises {type(error).__name__}: {error}; "
            "mend it"
        ) from error
    peers = getattr(module, "PEERS", None)
    if not isinstance(peers, list) or not all(isinstance(p, type) and issubclass(p, Implementation) for p in peers):
        raise UsageError(f"--peer {spec}: needs a list PEERS of Implementation subclasses")
    return peers


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not, or is somebody else's
        return False


def find_plugins() -> list[str]:
    """Modules that installed packages declare as peers: entry points of the group hybrid_ep.bench_peers. In a source
    tree, where nothing may be installed, the project's own by name."""
    declared = [entry.value for entry in importlib.metadata.entry_points(group="hybrid_ep.bench_peers")]
    here = [module for module in _OWN if _is_here(module)]
    return list(dict.fromkeys([*declared, *here]))
