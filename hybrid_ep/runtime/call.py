"""What a routed dispatch wants, and what it tells the other ranks of that."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from hybrid_ep import _core
from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.runtime import validation
from hybrid_ep.runtime.routing import Routing
from hybrid_ep.runtime.tensors import element_code


class Call(NamedTuple):
    """What a routed dispatch wants, beyond its routing."""

    hidden: torch.Tensor
    scale: torch.Tensor | None
    permute: bool
    non_blocking: bool = False
    pad_multiple: int = 1
    budget: int | None = None  # permuted rows of this rank
    pad_empty_experts: bool = False
    use_fp8: bool | None = None  # what the caller said of hidden

    @classmethod
    def permuted(
        cls,
        hidden: torch.Tensor,
        scale: torch.Tensor | None,
        *,
        num_permuted_tokens: Any,
        pad_multiple: Any,
        non_blocking: Any,
        pad_empty_experts: Any,
        routed: bool,
        use_fp8: Any = None,
    ) -> Call:
        """Of arguments of dispatch_with_permute, checked; routed: it brings routing, and no handle."""
        if type(non_blocking) is not bool or type(pad_empty_experts) is not bool:
            validation.flag("non_blocking", non_blocking)
            validation.flag("pad_empty_experts", pad_empty_experts)
        budget = num_permuted_tokens
        if budget is not None and (type(budget) is not int or not 0 <= budget <= validation.MOST):
            budget = validation.integer("num_permuted_tokens", budget, 0, most=validation.MOST)
        pad = 1
        if pad_multiple is not None:
            pad = validation.integer("pad_multiple", pad_multiple, 0, most=validation.MOST_PADDING) or 1
        if non_blocking and routed and (budget is None or budget % pad):
            if budget is None:
                raise ValueError(
                    "num_permuted_tokens=None with non_blocking=True, where nobody learns how many rows there are; "
                    "give the static number of rows, or non_blocking=False"
                )
            raise ValueError(
                f"num_permuted_tokens={num_permuted_tokens!r} must be a multiple of pad_multiple={pad} "
                "when non_blocking=True; it is the static number of rows"
            )
        return cls(hidden, scale, True, non_blocking, pad, budget, pad_empty_experts, use_fp8)

    def header(
        self, routing: Routing, template: HybridEpConfigInstance, num_tokens: int, topk: int
    ) -> _core.CallHeader:
        """What all other ranks are told; num_tokens, topk: of this exchange."""
        width, dtype = (0, 0) if self.scale is None else (self.scale.shape[1], element_code(self.scale))
        return _header(
            num_tokens=num_tokens,
            topk=topk,
            budget=self.budget,
            want_tokens=template.max_num_of_tokens_per_rank,
            want_hidden=template.hidden_dim,
            num_experts=routing.num_experts,
            hidden=self.hidden.shape[1],
            scale_width=width,
            pad_multiple=self.pad_multiple,
            chunk_dispatch=template.chunk("dispatch"),
            chunk_combine=template.chunk("combine"),
            dtype=element_code(self.hidden),
            scale_dtype=dtype,
            permute=self.permute,
            non_blocking=self.non_blocking,
            routing_map=routing.topk_idx is None,
            weights=routing.weights is not None,
            pad_empty_experts=self.pad_empty_experts,
        )


# Calls of one shape say the same again, and a header is made of seventeen words by name.
_header = functools.lru_cache(maxsize=256)(_core.CallHeader)
