"""What no sum of ordinary numbers shows: infinities, NaNs, signed zeros, subnormals and ties are added and rounded
alike on the machine that users run (whole tiles at a time) and on those that check (vec8s; 32 lanes are a GPU's)."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep.testing import VirtualWorld

HIDDEN, TOKENS, EXPERTS = 4096, 24, 8  # two tiles a row


def patterns(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[TOKENS, HIDDEN] of random bits: every kind of number of the dtype."""
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    limits = torch.iinfo(bits)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(limits.min, limits.max + 1, (TOKENS, HIDDEN), generator=generator).to(bits).view(dtype)
    x[:, ::512] = -0.0  # a sum of negative zeros alone is negative
    return x


def combined(
    executor: str,
    dtype: torch.dtype,
    weighted: bool,
    fp32_partials: bool,
    tokens=TOKENS,
    experts=EXPERTS,
    k=4,
    in_place=False,
) -> list[torch.Tensor]:
    """Bits of every rank's result; experts change nothing, so sums are of one to k copies of a row. in_place: combine
    reads the rows where they lie."""
    world = VirtualWorld(2, 2)
    buffers = world.buffers(HIDDEN, tokens, experts // 4, executor=executor, timeout_s=60)

    def work(rank, group):
        x = patterns(dtype, rank)[:tokens]
        topk = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank + 9)).topk(k, 1).indices
        topk[::3, 1:] = -1  # sums of a single row
        weights = torch.rand(tokens, k, generator=torch.Generator().manual_seed(rank))
        rows, _, _, _, handle = buffers[rank].dispatch_with_permute(
            hidden=x, topk_idx=topk, topk_weights=weights, num_of_experts=experts
        )
        rows = rows.roll(1, 0)  # other rows' numbers, so that sums are of unlike ones
        if in_place:
            buffers[rank].combine_with_unpermute(
                hidden=rows, handle=handle, fp32_partials=fp32_partials
            )  # it has grown
            rows = buffers[rank].empty(len(rows), HIDDEN, dtype).copy_(rows)
        before = buffers[rank].traffic()["partial_rows"]
        out, _ = buffers[rank].combine_with_unpermute(
            hidden=rows, handle=handle, weighted=weighted, fp32_partials=fp32_partials
        )
        formed = buffers[rank].traffic()["partial_rows"] - before
        read = in_place and not weighted and (dtype == torch.float32 or not fp32_partials)
        assert (formed == 0) == (read and executor == "host"), formed
        return out.view(torch.int16 if dtype.itemsize == 2 else torch.int32)

    return world.run(work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted, fp32_partials", [(False, False), (True, False), (False, True)])
def test_all_bit_patterns_sum_alike(dtype, weighted, fp32_partials):
    fast = combined("host", dtype, weighted, fp32_partials)
    same_sums(fast, combined("host", dtype, weighted, fp32_partials, in_place=True), dtype)
    for executor in ("host_checked", "host_checked_lanes32"):
        for in_place in (False, True):
            same_sums(fast, combined(executor, dtype, weighted, fp32_partials, in_place=in_place), dtype)


def test_sums_of_many_rows_are_alike():
    """Of more rows of a rank than the host's executor adds at once (16), so that sums go on from strip to strip."""
    many = {"tokens": 6, "experts": 4 * 37, "k": 4 * 37}
    fast = combined("host", torch.bfloat16, False, False, **many)
    for executor, in_place in (("host", True), ("host_checked", False), ("host_checked", True)):
        other = combined(executor, torch.bfloat16, False, False, **many, in_place=in_place)
        same_sums(fast, other, torch.bfloat16)


def same_sums(fast: list, checked: list, dtype: torch.dtype) -> None:
    """Bit for bit, NaNs too: all of them are the one that a GPU's conversion gives."""
    the_nan = 0x7FFF if dtype.itemsize == 2 else 0x7FFFFFFF
    for rank, (got, want) in enumerate(zip(fast, checked, strict=True)):
        assert torch.equal(got, want), rank
        assert (want[want.view(dtype).isnan()] == the_nan).all(), rank
        assert (want[:, ::512] == torch.tensor(-0.0, dtype=dtype).view(want.dtype)).all(), rank
    assert any(want.view(dtype).isnan().any() and want.view(dtype).isinf().any() for want in checked)
