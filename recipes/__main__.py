"""`python -m recipes` lists the recipes: name and first line of what each says of itself."""

from __future__ import annotations

from . import CLUSTER_RECIPES, RECIPES


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


def _first_line(make: object) -> str:
    return (make.__doc__ or "").splitlines()[0]


if __name__ == "__main__":
    print(list_recipes(cluster=True))
