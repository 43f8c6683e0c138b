"""Placement files in TensorRT-LLM's YAML: num_slots, initial_global_assignments {layer: [expert of each slot]},
layer_updates_per_iter (0: the placement is static). Consecutive slots belong to one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_REMEDY = "hybrid-ep balance plan writes them"


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
        text = Path(path).read_text()
        content = yaml.safe_load(text)
        if not isinstance(content, dict) or not isinstance(content.get("initial_global_assignments"), dict):
            raise KeyError("initial_global_assignments")
        assigned = dict(sorted(content["initial_global_assignments"].items()))
        phy2log = np.array(list(assigned.values()), dtype=np.int64)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not a placement file ({said_of_yaml(error, text)}); {_REMEDY}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a placement file (no text); {_REMEDY}") from None
    except KeyError as error:
        raise ValueError(f"{path}: not a placement file (no {error.args[0]}); {_REMEDY}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a placement file ({error}); {_REMEDY}") from None
    if phy2log.ndim != 2 or phy2log.shape[1] != content.get("num_slots"):
        raise ValueError(f"{path}: every layer must list num_slots={content.get('num_slots')} experts")
    return phy2log, tuple(int(layer) for layer in assigned)


def said_of_yaml(error: Exception, text: str) -> str:
    """A PyYAML error over `text` in one line: what is wrong, at which line and column."""
    mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    line, column = (mark.line, mark.column) if mark is not None else (None, None)
    if mark is None and isinstance(position, int):  # of a character that YAML does not have
        before = text[:position]
        line, column = before.count("\n"), position - before.rfind("\n") - 1
    place = "" if line is None or column is None else f", line {line + 1}, column {column + 1}"
    return " ".join(what.split()) + place
