"""Every Python example of the README and the docs runs, with the names that its text leaves to the reader."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from hybrid_ep.testing import VirtualWorld

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)


def python_blocks():
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text())):
            name = f"{page.relative_to(ROOT)}#{number}"
            yield pytest.param(name, match[1], id=name)


def run_alone(code: str) -> None:
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def run_on_eight_ranks(code: str) -> None:
    """The README's: a group, tokens and experts are the reader's. Sizes are a laptop's."""
    small = code.replace("7168", "64").replace("4096", "16")
    assert small != code

    def rank_main(rank, group):
        x = torch.full((16, 64), float(rank + 1))
        topk_idx = torch.arange(16 * 2).reshape(16, 2) % 64
        given = {
            "group": group,
            "x": x,
            "topk_idx": topk_idx,
            "topk_weights": torch.full((16, 2), 0.5),
            "experts": lambda rows, counts, probs: rows * probs[:, None],
        }
        exec(compile(small, "example", "exec"), given)
        assert torch.equal(given["out"], x)  # weights that sum to one, experts that change nothing else
        assert int(given["tokens_per_expert"].sum()) == given["rows"].shape[0]

    VirtualWorld(1, 8).run(rank_main)


def run_with_megatron(code: str) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    run_alone(code)


RUNNERS = {"README.md#0": run_on_eight_ranks, "docs/megatron.md#0": run_with_megatron}


@pytest.mark.parametrize("name, code", list(python_blocks()))
def test_example(name, code):
    RUNNERS.get(name, run_alone)(code)


def test_runners_name_examples_that_exist():
    assert set(RUNNERS) <= {param.values[0] for param in python_blocks()}
