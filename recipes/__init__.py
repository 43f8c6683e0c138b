"""Recipes: Python functions that return complete training configurations, found by name.

To add one, write a function that returns a `RunConfig` and list it in `RECIPES`.
"""

from __future__ import annotations

from collections.abc import Callable

from recipes.config import RunConfig
from recipes.tiny_cpu import tiny_cpu, tiny_cpu_smoke

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "tiny_cpu": tiny_cpu,
    "tiny_cpu_smoke": tiny_cpu_smoke,
}


def get_recipe(name: str) -> RunConfig:
    """The configuration of recipe `name`; ValueError lists the known names."""
    if name not in RECIPES:
        raise ValueError(f"recipe={name!r}: unknown; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]()
