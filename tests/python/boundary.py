"""What the tests of the boundary share: a world of one process, calls that use every argument of the core, and an
engine that looks at the views on their way in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_ep import _core
from hybrid_ep.testing import VirtualWorld

HIDDEN, TOKENS, TOPK, EXPERTS = 32, 7, 3, 8  # experts of the group
TENSORS = {
    "place": ("topk_idx", "routing_map", "weights", "memory"),
    "dispatch": ("x", "scale", "weights", "out_x", "out_scale", "out_weights"),
    "combine": ("x", "weights", "out_x", "out_weights"),
}  # in the requests of the engine's verbs


@dataclass(frozen=True)
class Given:
    """A rank's tensors of one routed call. Values that no rounding touches."""

    hidden: torch.Tensor
    scale: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    route: torch.Tensor
    probs: torch.Tensor


def given(
    rank: int, tokens: int = TOKENS, hidden: int = HIDDEN, topk: int = TOPK, dtype=torch.bfloat16, seed: int = 0
) -> Given:
    """dtype and device are named in full: these tests change the defaults."""
    g = torch.Generator(device="cpu").manual_seed(seed * 100 + rank)
    integers = dict(generator=g, dtype=torch.int64, device="cpu")
    idx = torch.rand(tokens, EXPERTS, generator=g, dtype=torch.float32, device="cpu").argsort(1)[:, :topk].contiguous()
    route = torch.zeros(tokens, EXPERTS, dtype=torch.bool, device="cpu").scatter_(1, idx, True)
    weights = torch.randint(1, 9, (tokens, topk), **integers).float() / 8
    probs = torch.zeros(tokens, EXPERTS, dtype=torch.float32, device="cpu").scatter_(1, idx, weights)
    return Given(
        torch.randint(-8, 9, (tokens, hidden), **integers).to(dtype),
        torch.randint(1, 9, (tokens, 3), **integers).float(),
        idx,
        weights,
        route,
        probs,
    )


def all_verbs(buffer: Any, mine: Given, beside: bool | None = None) -> list[torch.Tensor]:
    """Every tensor that dispatch and combine return, of calls that use every argument of the core between them. beside:
    whether they are made as where kernels run beside the host (None: as they are)."""
    if beside is not None:
        buffer._session.runs_beside = beside
    out: list[Any] = []
    rows, weights, scales, handle = buffer.dispatch(mine.hidden, mine.scale, mine.idx, mine.weights)
    out += [rows, weights, scales, *handle[:5]]
    out += buffer.combine(rows, weights, handle)
    out += buffer.dispatch(mine.hidden, topk_idx=mine.idx, topk_weights=2 * mine.weights, handle=handle)[:2]
    out += buffer.dispatch(mine.hidden, probs=mine.probs, handle=handle)[:2]
    by_map = dict(hidden=mine.hidden, routing_map=mine.route, probs=mine.probs, pad_multiple=4)
    rows, weights, _, padded, handle = buffer.dispatch_with_permute(**by_map)
    out += [rows, weights, padded, *handle[:8], handle[10]]
    out += buffer.combine_with_unpermute(hidden=rows, probs=weights, handle=handle)
    out += buffer.combine_with_unpermute(hidden=rows, handle=handle, weighted=True, fp32_partials=True)
    budget = 4 * buffer.group_size * TOKENS * TOPK
    rows, weights, _, padded, handle = buffer.dispatch_with_permute(
        **by_map, num_permuted_tokens=budget, non_blocking=True
    )
    kept = int(padded.sum())
    out += [rows[:kept], weights[:kept], padded, handle[10]]
    needed = handle[9].plan.num_permuted_rows  # no row more, so that a byte less is too few
    out += buffer.combine_with_unpermute(hidden=rows[:needed], probs=weights[:needed], handle=handle)
    return [x for x in out if isinstance(x, torch.Tensor)]


def tensors_of(verb: str, request: Any) -> dict[str, Any]:
    """The views in a request, by argument; None for what was not given."""
    return {name: getattr(request, name) for name in TENSORS[verb]}


def with_tensors(request: Any, views: dict[str, Any]) -> Any:
    """The request, with these views in it."""
    for name, v in views.items():
        setattr(request, name, v)
    return request


class Watched:
    """An engine whose requests' tensors pass through look(verb, call, {argument: view}), which returns those to use;
    call(**views) makes the same call with others."""

    def __init__(self, engine: Any, look: Callable[[str, Callable, dict[str, Any]], dict[str, Any]]) -> None:
        self._engine, self._look = engine, look

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if name not in TENSORS:
            return value

        def watched(*plan_and_request: Any) -> Any:
            *plan, request = plan_and_request

            def call(**views: Any) -> Any:
                return value(*plan, with_tensors(request, views))

            return call(**self._look(name, call, tensors_of(name, request)))

        return watched


def watched_run(nodes: int, locals_: int, look: Callable, call: Callable = all_verbs, **of_given: Any) -> list[Any]:
    """[call(buffer, given)] of every rank of a world whose engines are watched."""
    world = VirtualWorld(nodes, locals_)
    buffers = world.buffers(HIDDEN, 4 * TOKENS, EXPERTS // world.size, timeout_s=60)

    def of_rank(rank: int, _: Any) -> Any:
        session = buffers[rank]._session
        opened = session._open
        session.engine = Watched(session.engine, look)

        def reopen(wanted: dict[str, int]) -> None:  # growth makes another engine
            opened(wanted)
            session.engine = Watched(session.engine, look)

        session._open = reopen
        return call(buffers[rank], given(rank, **of_given))

    try:
        return world.run(of_rank)
    finally:
        for buffer in buffers:
            buffer.destroy()


def views(arguments: dict[str, Any]) -> dict[str, _core.TensorView]:
    return {name: value for name, value in arguments.items() if isinstance(value, _core.TensorView)}


def changed(v: _core.TensorView, **changes: Any) -> _core.TensorView:
    now = dict(address=v.address, num_bytes=v.num_bytes, element=v.element, device=v.device, tensor=v.tensor)
    return _core.TensorView(**now | changes)
