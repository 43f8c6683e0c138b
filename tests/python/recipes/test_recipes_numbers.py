"""The table of docs/recipes.md, number by number: a cell is what the recipe hands to Megatron; none is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes import CLUSTER_RECIPES, megatron_arguments

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text().partition("## Number by number")[2]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
NAMES = [name.strip("`") for name in ROWS[0][2:]]
CELLS = [(row[1], name, said) for row in ROWS[1:] for name, said in zip(NAMES, row[2:], strict=True)]


def flags_of(name):
    return megatron_arguments.megatron_arguments(CLUSTER_RECIPES[name]("b200_8x400g"))


@pytest.mark.parametrize("flag, name, said", CELLS)
def test_a_cell_is_the_recipe_s_flag(flag, name, said):
    flag, plus, more = flag.replace("`", "").partition(" + ")
    flags = flags_of(name)
    if said == "-":
        assert flag not in flags
        return
    found = flags[flags.index(flag) + 1]
    assert str(int(found) + int(more)) == said if plus else found == said


def test_every_model_and_every_number_of_the_model_is_there():
    assert set(NAMES) == set(CLUSTER_RECIPES)
    named = {flag.replace("`", "").split()[0] for flag, *_ in CELLS}
    of_the_run = {
        "--seq-length",
        "--attention-dropout",
        "--hidden-dropout",
        "--mtp-loss-scaling-factor",
        "--max-position-embeddings",
        "--moe-router-dtype",
        "--moe-layer-freq",
    }
    for name in NAMES:
        flags = flags_of(name)
        numbers = {f for f, after in zip(flags, flags[1:], strict=False) if re.fullmatch(r"[\d.e-]+", after)}
        until = flags.index("--moe-token-dispatcher-type")
        assert {f for f in numbers if flags.index(f) < until} <= named | of_the_run
