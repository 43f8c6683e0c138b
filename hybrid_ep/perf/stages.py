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
    """All, from the first, which has the layers without experts, to the last: `chunks`, counted."""
    found = []
    for rank in chunks(num_layers, moe_layers, mtp, pp, virtual_pp, layout):
        letters = "".join(rank)
        moe, dense, more = (letters.count(x) for x in "tdm")
        found.append(Stage(moe + more, dense, more, more + letters.count("L")))
    return tuple(found)


@lru_cache(maxsize=1024)
def chunks(
    num_layers: int, moe_layers: int, mtp: int, pp: int, virtual_pp: int, layout: str
) -> tuple[tuple[str, ...], ...]:
    """For every pipeline rank its model chunks, each as letters E (embedding), d (layer without experts), t (with),
    m (multi-token prediction), L (loss). layout: as Megatron's --pipeline-model-parallel-layout has it, whose t are
    both kinds of layers; "": Megatron's equal split where it accepts one, else `_uneven`. ValueError for a layout that
    is not of this model or not of pp x virtual_pp chunks."""
    if not layout and not splits(num_layers, pp * virtual_pp):
        return _uneven(num_layers, moe_layers, mtp, pp, virtual_pp)
    parts = _parsed(layout) if layout else _equal(num_layers, mtp, pp * virtual_pp)
    if len(parts) != pp * virtual_pp or "".join(parts) != "E" + "t" * num_layers + "m" * mtp + "L":
        raise ValueError(
            f"layout={layout!r} must have {pp} x {virtual_pp} chunks with {num_layers} layers t, {mtp} of multi-token "
            "prediction m and one loss L, the embedding E first"
        )
    dense, found = num_layers - moe_layers, []
    for part in parts:
        found.append(part.replace("t", "d", dense))
        dense -= found[-1].count("d")
    return tuple(tuple(found[rank::pp]) for rank in range(pp))


def splits(num_layers: int, num_chunks: int) -> bool:
    """Whether Megatron splits so many layers into so many equal chunks without a layout: alone, or with embedding and
    loss counted as a layer each."""
    return num_layers % num_chunks == 0 or (num_layers + 2) % num_chunks == 0


def equal_layout(num_layers: int, mtp: int, num_chunks: int) -> str:
    """Megatron's layout of so many chunks, embedding, loss and multi-token prediction counted as a layer each; where
    the last has layers beside these, one of them is in the first, for the embedding multiplies nothing: so are Megatron
    Bridge's of DeepSeek-V3. "" where Megatron's own split does the same. ValueError where they do not divide."""
    if num_chunks == 1 or not mtp:
        if not splits(num_layers, num_chunks):
            raise ValueError(
                f"{num_layers} layers, or {num_layers + 2} with both ends, are not {num_chunks} equal chunks"
            )
        return ""
    letters = "E" + "t" * num_layers + "m" * mtp + "L"
    if len(letters) % num_chunks:
        raise ValueError(f"{len(letters)} layers, ends included, are not {num_chunks} equal chunks")
    size = len(letters) // num_chunks
    parts = [letters[i : i + size] for i in range(0, len(letters), size)]
    if parts[-1].startswith("t"):
        parts[0], parts[-1] = f"{parts[0]}t", parts[-1][1:]
    return "|".join(parts)


def _parsed(layout: str) -> list[str]:
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout)
    return re.sub(r"([tm])\*(\d+)", lambda m: m[1] * int(m[2]), text).split("|")


def _equal(num_layers: int, mtp: int, num_chunks: int) -> list[str]:
    padded = num_layers % num_chunks != 0
    letters = "t" * num_layers if not padded else "E" + "t" * num_layers + "L"
    size = len(letters) // num_chunks
    parts = [letters[i : i + size] for i in range(0, len(letters), size)]
    parts[0] = "E" + parts[0].removeprefix("E")
    parts[-1] = parts[-1].removesuffix("L") + "m" * mtp + "L"
    return parts


def _uneven(num_layers: int, moe_layers: int, mtp: int, pp: int, virtual_pp: int) -> tuple[tuple[str, ...], ...]:
    """Where layers do not divide: Megatron's split into pp stages if it has one; else as many as are needed for all but
    the last stage, which has what is left. So Megatron Bridge's layouts of DeepSeek-V3 have one of 61 layers in the
    last of 16 stages, beside multi-token prediction and two passes of the output layer. Megatron itself refuses it."""
    counts = [-(-num_layers // pp)] * pp
    if splits(num_layers, pp):
        counts = [part.count("t") for part in _equal(num_layers, mtp, pp)]
    elif over := counts[0] * pp - num_layers:
        counts[-1] = max(0, counts[-1] - over)
        for rank in range(sum(counts) - num_layers):  # more stages than layers fill
            counts[rank] -= 1
    letters, found = "d" * (num_layers - moe_layers) + "t" * moe_layers, []
    for count in counts:
        mine, letters, size = letters[:count], letters[count:], -(-count // virtual_pp)
        found.append([mine[i * size : (i + 1) * size] for i in range(virtual_pp)])
    found[0][0] = "E" + found[0][0]
    found[-1][-1] += "m" * mtp + "L"
    return tuple(map(tuple, found))
