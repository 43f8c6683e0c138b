"""`python -m recipes` lists the recipes: name and first line of what each says of itself."""

from __future__ import annotations

from typing import Any

from . import CLUSTER_RECIPES, RECIPES
from .hardware import HARDWARE


def list_recipes(cluster: bool = False) -> str:
    """One line a recipe that trains on this machine; with `cluster` those of GPU clusters too, first."""
    shown = {**(CLUSTER_RECIPES if cluster else {}), **RECIPES}
    width = max(map(len, shown))
    return "\n".join(
        f"{name:<{width}}  {'GPUs' if name in CLUSTER_RECIPES else 'CPU '}  {_first_line(make)}"
        if cluster
        else f"{name:<{width}}  {_first_line(make)}"
        for name, make in shown.items()
    )


def described() -> list[dict[str, Any]]:
    """Every recipe for programs: name, where it runs, its first line, of a GPU recipe the GPUs of each cluster."""
    found: list[dict[str, Any]] = []
    for name, make in CLUSTER_RECIPES.items():
        gpus = {cluster: make(cluster).num_gpus for cluster in HARDWARE}
        found.append({"name": name, "runs_on": "GPUs", "says": _first_line(make), "gpus": gpus})
    return found + [
        {"name": name, "runs_on": "CPU", "says": _first_line(small), "gpus": None} for name, small in RECIPES.items()
    ]


def _first_line(make: object) -> str:
    return (make.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    print(list_recipes(cluster=True))
