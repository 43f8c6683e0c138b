"""What this library's compiled code takes to add a row and to finish a sum, in clocks of an SM.

From the machine code of the kernels' loops over rows, latencies included, by `scripts/cubin_check.py --write-table`,
which complains when a library that is built needs more. Nobody has measured it on a GPU."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

ARCHITECTURES = {"hopper": "sm_90a", "blackwell": "sm_100"}  # whose code a GPU generation runs


@dataclass(frozen=True)
class SumLoop:
    """Clocks of a kernel ("combine"): `row`, one tile of one row that is added; `tile`, from a tile's
    last row over its rounding and store to the next tile's first."""

    row: float
    tile: float

    @property
    def finish(self) -> float:
        """What a tile of a sum takes beside its rows."""
        return self.tile - self.row


@functools.cache
def _table() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    text = resources.files("hybrid_ep.perf").joinpath("data").joinpath("sum_loops.json").read_text()
    table: dict[str, dict[str, dict[str, dict[str, float]]]] = json.loads(text)
    return table


def sum_loop(generation: str, kernel: str, dtype: str = "bf16") -> SumLoop:
    """Of a GPU generation (`Gpu.generation`), for rows of `dtype` (bf16, fp16 or fp32) that are not scaled: what each
    of a block's two reduce groups takes while both add. A scheduler has a warp of either; they wait at the same time,
    but issue one after the other. KeyError for what the table does not have."""
    costs = _table()[ARCHITECTURES[generation]][kernel][dtype]
    return SumLoop(*(max(costs[part], 2 * costs[f"{part}_issued"]) for part in ("row", "tile")))
