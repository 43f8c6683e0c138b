"""Placement files in TensorRT-LLM's YAML: num_slots, initial_global_assignments {layer: [expert of each slot]},
layer_updates_per_iter (0: the placement is static). Consecutive slots belong to one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def save(path: str | Path, phy2log: np.ndarray, layers: tuple[int, ...], layer_updates_per_iter: int = 0) -> None:
    """phy2log integers [L, slots]. Plain flow lists, so that no YAML package is needed to write."""
    lines = [f"num_slots: {phy2log.shape[1]}", "initial_global_assignments:"]
    lines += [f"  {layer}: [{', '.join(map(str, row))}]" for layer, row in zip(layers, phy2log.tolist(), strict=True)]
    lines += [f"layer_updates_per_iter: {layer_updates_per_iter}"]
    Path(path).write_text("\n".join(lines) + "\n")


def load(path: str | Path) -> tuple[np.ndarray, tuple[int, ...]]:
    """(phy2log int64 [L, slots], layers). ValueError names what the file lacks; needs PyYAML."""
    try:
        import yaml
    except ImportError:
        raise ValueError("reading a placement file needs PyYAML: pip install pyyaml") from None
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        content = yaml.safe_load(Path(path).read_text())
        assigned = dict(sorted(content["initial_global_assignments"].items()))
        phy2log = np.array(list(assigned.values()), dtype=np.int64)
    except (yaml.YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a placement file ({type(error).__name__}: {error})") from None
    if phy2log.ndim != 2 or phy2log.shape[1] != content.get("num_slots"):
        raise ValueError(f"{path}: every layer must list num_slots={content.get('num_slots')} experts")
    return phy2log, tuple(int(layer) for layer in assigned)
