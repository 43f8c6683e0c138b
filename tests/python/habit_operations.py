"""What training scripts do with hybrid_ep, in one short run: every verb, both routings, gradients, experts, plans.

Inputs are made beforehand (problem), so that nothing but the library sees the habits of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from examples import Example, Inputs, make_inputs, same

from hybrid_ep import HybridEPBuffer, balance, functional
from hybrid_ep.moe import grouped_mm, inverse_map, unpermute, weighted_swiglu
from hybrid_ep.payload import quantize
from hybrid_ep.reference import ReferenceBuffer

BY_TOPK = Example(2, 2, 2, (6, 9, 0, 5), 2, hidden=32, pad_multiple=4, seed=7)
BY_MAP = Example(2, 2, 2, (5, 0, 7, 6), 3, hidden=48, routing="map", skew="half_dropped", seed=8)
FP8 = Example(2, 2, 2, (6, 3, 8, 5), 2, hidden=64, dtype="fp8", scale_columns=3, pad_multiple=16, seed=9)
NUM_RANKS, NUM_EXPERTS = 4, BY_TOPK.world.num_experts
Form = Callable[[str, torch.Tensor], torch.Tensor]
Results = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Problem:
    """One rank's inputs."""

    by_topk: Inputs
    by_map: Inputs
    fp8: Inputs
    up: torch.Tensor  # [local experts, hidden, 2 * 16], bf16
    down: torch.Tensor  # [local experts, 16, hidden]
    rows: torch.Tensor  # fp32, far apart in size: a sum in a narrower dtype shows
    row_weights: torch.Tensor
    token_of_row: torch.Tensor
    wide: torch.Tensor  # bf16 [T, 128], to be quantised
    load: torch.Tensor  # int64 [ranks, experts]


def problem(rank: int) -> Problem:
    g = torch.Generator().manual_seed(100 + rank)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return Problem(
        *(make_inputs(example, rank) for example in (BY_TOPK, BY_MAP, FP8)),
        up=(randn(2, 32, 32) / 6).bfloat16(),
        down=(randn(2, 16, 32) / 4).bfloat16(),
        rows=randn(12, 8) * 2.0 ** torch.arange(-6, 6)[:, None],
        row_weights=torch.rand(12, generator=g),
        token_of_row=torch.tensor([0, 3, 1, -1, 1, 2, 0, 0, 4, -1, 3, 2]),
        wide=randn(5, 128).bfloat16(),
        load=torch.randint(0, 500, (NUM_RANKS, NUM_EXPERTS), generator=torch.Generator().manual_seed(5)),
    )


def run(group, p: Problem, form: Form, gradients: bool = True, reference: bool = True) -> dict[str, Any]:
    """Every result by name. Collective: a group of four ranks, 2 x 2. gradients: autograd can run. reference: so
    can the reference buffer, which is made of torch's collectives."""
    found: dict[str, Any] = {}
    with HybridEPBuffer(group, 16, 1, 2, timeout_s=50, num_of_hybrid_ep_ranks_per_nvlink_domain=2) as buffer:
        for part in (dense, permuted, scaled, static):
            found |= {f"{part.__name__}: {name}": value for name, value in part(buffer, p, form)}
        found |= {f"layer: {name}": value for name, value in layer(buffer, p, form, gradients)}
    found |= {f"unpermute: {name}": value for name, value in unpermuted(p, form, gradients)}
    found |= {f"plan: {name}": value for name, value in plans(p)}
    if reference:
        oracle = ReferenceBuffer(group, 16, 1, 2, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
        found |= {f"reference: {name}": value for name, value in permuted(oracle, p, form)}
    return found


def differences(found: dict[str, Any], want: dict[str, Any], gradients: bool, reference: bool) -> list[str]:
    """Where results differ from those without the habit, in one bit, in dtype, in shape or in device."""
    said = []
    for name, value in want.items():
        if not gradients and "gradient" in name or not reference and name.startswith("reference"):
            continue
        try:
            got = found[name]
            assert not isinstance(got, torch.Tensor) or got.device.type == "cpu", f"{name}: on {got.device}"
            same(name, got.detach() if isinstance(got, torch.Tensor) else got, value)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _routing(inputs: Inputs, form: Form) -> dict[str, torch.Tensor]:
    return {name: form(name, value) for name, value in inputs.routing().items() if value is not None}


def _tensors(handle: tuple) -> Results:
    yield from ((f"handle {i}", value) for i, value in enumerate(handle) if isinstance(value, torch.Tensor))


def dense(buffer, p: Problem, form: Form) -> Results:
    hidden = form("hidden", p.by_topk.hidden)
    rows, weights, _, handle = buffer.dispatch(hidden, num_of_experts=NUM_EXPERTS, **_routing(p.by_topk, form))
    yield from (("rows", rows), ("weights", weights), *_tensors(handle))
    out, probs = buffer.combine(form("rows", rows), form("weights", weights), handle)
    yield from (("combined", out), ("combined probs", probs))


def permuted(buffer, p: Problem, form: Form) -> Results:
    hidden = form("hidden", p.by_map.hidden)
    rows, weights, _, padded, handle = buffer.dispatch_with_permute(
        hidden=hidden, pad_multiple=8, **_routing(p.by_map, form)
    )
    yield from (("rows", rows), ("weights", weights), ("padded", padded))
    back = form("rows", rows)
    for name, options in {
        "probs": {"probs": form("weights", weights)},
        "weighted": {"weighted": True},
        "fp32_partials": {"fp32_partials": True},
    }.items():
        out, probs = buffer.combine_with_unpermute(hidden=back, handle=handle, **options)
        yield from ((f"combined, {name}", out), (f"combined probs, {name}", probs))
    again = buffer.dispatch_with_permute(hidden=hidden, handle=handle, probs=form("probs", p.by_map.probs))
    yield from (("again", again[0]), ("again weights", again[1]))


def scaled(buffer, p: Problem, form: Form) -> Results:
    rows, weights, scales, padded, handle = buffer.dispatch_with_permute(
        hidden=form("hidden", p.fp8.hidden),
        scaling_factor=form("scale", p.fp8.scale),
        pad_multiple=16,
        num_of_experts=NUM_EXPERTS,
        use_fp8=True,
        **_routing(p.fp8, form),
    )
    yield from (("rows", rows), ("weights", weights), ("scales", scales), ("padded", padded), *_tensors(handle))


def static(buffer, p: Problem, form: Form) -> Results:
    rows, *_, handle = buffer.dispatch_with_permute(
        hidden=form("hidden", p.by_topk.hidden),
        num_of_experts=NUM_EXPERTS,
        pad_multiple=4,
        num_permuted_tokens=8,
        non_blocking=True,
        **_routing(p.by_topk, form),
    )
    yield from (("rows", rows), ("overflow", handle[10]))


def layer(buffer, p: Problem, form: Form, gradients: bool) -> Results:
    """A MoE layer, forward and backward, once in bf16 and once with tokens quantised on the way."""
    for dtype in ("bf16", "mxfp8"):
        x = p.by_topk.hidden.detach().clone().requires_grad_(gradients)
        w = p.by_topk.topk_weights.detach().clone().requires_grad_(gradients)
        up, down = (m.detach().clone().requires_grad_(gradients) for m in (p.up, p.down))
        rows, weights, _, padded, handle = functional.dispatch_with_permute(
            buffer,
            x,
            topk_idx=form("topk_idx", p.by_topk.topk_idx),
            topk_weights=w,
            num_of_experts=NUM_EXPERTS,
            pad_multiple=4,
            dispatch_dtype=dtype,
        )
        ends = padded.cumsum(0).to(torch.int32)
        h = weighted_swiglu(grouped_mm(rows, up, ends, backend="loop"), weights)
        out, _ = functional.combine_with_unpermute(buffer, grouped_mm(h, down, ends, backend="loop"), handle)
        yield f"{dtype} out", out
        if gradients:
            out.backward(form("gradient", out.detach()))
            yield from (
                (f"{dtype} gradient of {name}", t.grad)
                for name, t in {"x": x, "weights": w, "up": up, "down": down}.items()
            )


def unpermuted(p: Problem, form: Form, gradients: bool) -> Results:
    rows = p.rows.detach().clone().requires_grad_(gradients)
    back = inverse_map(form("token_of_row", p.token_of_row), 5, 3)
    out = unpermute(rows, back, form("weights", p.row_weights))
    yield from (("map", back), ("sum", out))
    if gradients:
        out.backward(form("gradient", out.detach()))
        yield "gradient", rows.grad
    for name in ("fp8", "mxfp8", "nvfp4"):
        fmt = quantize.format_of(name, 128)
        payload, scales = quantize.quantize(form("wide", p.wide), fmt)
        yield from (
            (f"{name} payload", payload),
            (f"{name} scales", scales),
            (name, quantize.dequantize(payload, scales, fmt, torch.bfloat16)),
        )


def plans(p: Problem) -> Results:
    """The arrays of both planners."""
    small = balance.plan_microbatch(p.load, spare_slots=1)
    slow = balance.plan_placement(p.load.sum(0)[None], NUM_EXPERTS + NUM_RANKS, NUM_RANKS)
    for name, plan in {"microbatch": small, "placement": slow}.items():
        yield from (
            (f"{name} {key}", torch.from_numpy(value.copy()))
            for key, value in sorted(vars(plan).items())
            if isinstance(value, np.ndarray)
        )
