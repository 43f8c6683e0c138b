"""What of a model each pipeline stage holds: a step goes at the pace of the slowest, and the output layers, which no
other has, make the last one slow although it has fewer layers."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Stage(NamedTuple):
    """moe: layers with experts, those of multi-token prediction (mtp) among them; dense: without. heads: passes of the
    output layer, which each layer of multi-token prediction makes one of."""

    moe: int
    dense: int = 0
    mtp: int = 0
    heads: int = 0

    @property
    def layers(self) -> int:
        return self.moe + self.dense


ONE_LAYER = Stage(1)


@lru_cache(maxsize=1024)
def stages(num_layers: int, moe_layers: int, mtp: int, pp: int, virtual_pp: int, layout: str) -> tuple[Stage, ...]:
    """All, from the first, which has the layers without experts, to the last. layout: as Megatron's
    --pipeline-model-parallel-layout has it; "": `_split`. ValueError for one that is not of this model or not of
    pp x virtual_pp chunks."""
    chunks = _chunks(layout) if layout else _split(num_layers, mtp, pp, virtual_pp)
    letters = "".join(chunks)
    wanted = {"t": num_layers, "m": mtp, "L": 1}
    if len(chunks) != pp * (virtual_pp if layout else 1) or {x: letters.count(x) for x in wanted} != wanted:
        raise ValueError(
            f"layout={layout!r} must have {pp} x {virtual_pp} chunks with {num_layers} layers t, {mtp} of multi-token "
            "prediction m and one loss L"
        )
    found, layers = [Stage(0)] * pp, 0
    for index, chunk in enumerate(chunks):
        count, more = chunk.count("t"), chunk.count("m")
        dense = min(count, max(0, num_layers - moe_layers - layers))
        layers += count
        one = (count - dense + more, dense, more, more + chunk.count("L"))
        found[index % pp] = Stage(*(a + b for a, b in zip(found[index % pp], one, strict=True)))
    return tuple(found)


def _chunks(layout: str) -> list[str]:
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout)
    return re.sub(r"([tm])\*(\d+)", lambda m: m[1] * int(m[2]), text).split("|")


def _split(num_layers: int, mtp: int, pp: int, virtual_pp: int) -> list[str]:
    """The layers of each stage where no layout is given: equal parts; where layers do not divide, Megatron's split with
    embedding and loss counted as a layer each; where that does not either, as many as are needed for all but the last
    stage, which has what is left. So Megatron Bridge's layouts of DeepSeek-V3 have one of 61 layers in the last of 16
    stages, beside multi-token prediction and two passes of the output layer."""
    counts = [-(-num_layers // pp)] * pp
    if num_layers % (pp * virtual_pp) and (num_layers + 2) % (pp * virtual_pp) == 0:
        counts = [(num_layers + 2) // pp - (rank in (0, pp - 1)) - (pp == 1) for rank in range(pp)]
    elif over := counts[0] * pp - num_layers:
        counts[-1] = max(0, counts[-1] - over)
        for rank in range(sum(counts) - num_layers):  # more stages than layers fill
            counts[rank] -= 1
    parts = ["t" * count for count in counts]
    return [*parts[:-1], parts[-1] + "m" * mtp + "L"]
