"""Rows of a scaling table from run folders: config.yaml says how many ranks, metrics.jsonl how fast they were."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from hybrid_ep.balance.plan_file import said_of_yaml
from hybrid_ep.cli import outputs
from hybrid_ep.cli.report.scaling import Row

_LEAST_STEPS = 3


def read(folders: list[str], skip: int) -> tuple[list[Row], str]:
    """(a row of every folder, the device that they ran on). skip: first steps that do not count; the rest gives the
    median. ValueError names the folder and what it lacks, or what differs between folders."""
    found = [(_config(Path(folder)), Path(folder)) for folder in folders]
    first, where = found[0]
    for config, path in found[1:]:
        mine, theirs = _must_agree(config), _must_agree(first)
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"{path}: {name} is {mine.get(name)!r}, of {where} {theirs.get(name)!r}; a table "
                    "compares runs of one model on one kind of device"
                )
    return [_row(config, path, skip) for config, path in found], first["runtime"]["device"]


def _must_agree(config: dict[str, Any]) -> dict[str, Any]:
    return {**{f"model.{k}": v for k, v in config["model"].items()}, "runtime.device": config["runtime"]["device"]}


def _config(folder: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError:
        raise ValueError("run folders hold YAML: pip install pyyaml") from None
    try:
        text = (folder / "config.yaml").read_text()
        config = yaml.safe_load(text)
        config["parallel"]["num_ranks"], config["parallel"]["ranks_per_node"]
        config["runtime"]["device"], config["model"].items()
    except OSError as error:
        raise ValueError(f"{folder}: no run folder ({error.strerror}: config.yaml); give runs/NAME") from None
    except yaml.YAMLError as error:
        said = said_of_yaml(error, text)
        raise ValueError(
            f"{folder / 'config.yaml'}: not valid YAML ({said}); give a run that launch has made"
        ) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: its config.yaml is none of a run ({type(error).__name__}: {error})") from None
    return config


def _row(config: dict[str, Any], folder: Path, skip: int) -> Row:
    steps = _steps(folder)[skip:]
    if len(steps) < _LEAST_STEPS:
        raise ValueError(
            f"{folder}: has {outputs.count(len(steps), 'step')} after the {skip} that --skip leaves out, fewer than "
            f"{_LEAST_STEPS}; train longer or give a smaller --skip"
        )
    ranks, local = config["parallel"]["num_ranks"], config["parallel"]["ranks_per_node"]
    memory = [s["memory_bytes"] for s in steps if "memory_bytes" in s]
    tokens = statistics.median(s["tokens_per_s"] * s["step_s"] for s in steps)
    return Row(
        folder.name,
        -(-ranks // local),
        ranks,
        tokens,
        statistics.median(s["step_s"] for s in steps),
        max(memory) if memory else None,
    )


def _steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are steps; a last one cut short by a crash is left out."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError as error:
        raise ValueError(f"{folder}: no metrics.jsonl ({error.strerror}); give a run that has begun") from None
    found = [json.loads(line) for line in text.split("\n")[:-1]]
    return [record for record in found if "step_s" in record]
