"""Where a rank's tokens go, as the arguments of a dispatch say it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hybrid_ep import _core
from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.runtime import routing_maps, validation
from hybrid_ep.runtime.tensors import aligned


class Routing(NamedTuple):
    """Where this rank's tokens go: topk_idx int64 [T, K] or routing_map bool [T, E], with weights fp32 or
    None."""

    num_experts: int
    topk_idx: torch.Tensor | None
    routing_map: torch.Tensor | None
    weights: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        given = self.routing_map if self.topk_idx is None else self.topk_idx
        assert given is not None  # one of them is
        return given.shape[0]

    def aligned(self) -> Routing:
        """With tensors that the core can read."""
        return Routing(self.num_experts, *(None if x is None else aligned(x) for x in self[1:]))

    def is_as_given(self, given: Given) -> bool:
        """Whether these are the caller's own tensors, none of them converted."""
        if self.topk_idx is None:
            return self.routing_map is given.routing_map and self.weights is given.probs
        return self.topk_idx is given.topk_idx and self.weights is given.topk_weights

    def request(
        self, header: _core.CallHeader, memory: torch.Tensor, count: bool, num_blocks: int, looked_at: bool
    ) -> _core.PlaceRequest:
        """What the exchange kernel is to place in that memory; count: wait for the counts. Of aligned tensors;
        looked_at: by signature(), in this call."""
        idx = self.topk_idx
        topk_in = 0 if idx is None else idx.shape[1]
        return _core.PlaceRequest.of(
            header, idx, self.routing_map, self.weights, memory, topk_in, count, num_blocks, looked_at
        )


class Given(NamedTuple):
    """The routing arguments of a verb, as its caller gave them; see HybridEPBuffer.dispatch."""

    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_of_experts: int | None
    probs: torch.Tensor | None
    routing_map: torch.Tensor | None


def routing_of_known(given: Given, num_experts: int, look: bool) -> Routing:
    """The same of a call whose like was checked before: only its choices may be wrong."""
    topk_idx, topk_weights, _, probs, routing_map = given
    if routing_map is not None:
        return Routing(num_experts, None, routing_map, probs)
    if look:
        assert topk_idx is not None  # or a map
        validation.choices(topk_idx, num_experts)
    return Routing(num_experts, topk_idx, None, topk_weights)


def routing_of_call(
    x: torch.Tensor, given: Given, *, config: HybridEpConfigInstance, num_ranks: int, look: bool = True
) -> Routing:
    """What they mean for a dispatch of x [T, H], checked.

    config: says how many experts a rank has where the arguments do not. look: also check the values of topk_idx, which
    waits for a GPU. ValueError for what does not fit together, naming the argument."""
    topk_idx, topk_weights, num_of_experts = given.topk_idx, given.topk_weights, given.num_of_experts
    probs, routing_map = given.probs, given.routing_map
    if num_of_experts is not None:
        num_of_experts = validation.experts_of_group("num_of_experts", num_of_experts, num_ranks)
    rows = x.shape[0]
    if topk_idx is not None and routing_map is None:
        num_experts = num_of_experts or config.num_of_experts_per_rank * num_ranks
        idx = validation.topk(topk_idx, rows, num_experts, look)
        if probs is not None:
            if topk_weights is not None:
                raise ValueError("topk_weights and probs are both given; give the weights in one of them")
            probs = validation.weights("probs", probs, (rows, num_experts))
            return Routing(num_experts, None, routing_maps.from_topk(idx, None, num_experts)[0], probs)
        if topk_weights is not None:
            topk_weights = validation.weights("topk_weights", topk_weights, tuple(idx.shape))
        return Routing(num_experts, idx, None, topk_weights)
    if routing_map is None:
        raise ValueError("topk_idx, routing_map and handle are all None; give one of them to say where tokens go")
    if topk_weights is not None:
        raise ValueError(
            "topk_weights is given, but topk_idx does not count beside a routing_map, which takes "
            "its weights as probs [T, E]"
        )
    route = validation.routing_map(routing_map, rows, num_of_experts, num_ranks)
    if probs is not None:
        probs = validation.weights("probs", probs, tuple(route.shape))
    return Routing(route.shape[1], None, route, probs)
