"""HybridEPBuffer with the members that deep_ep's has and ours does not need."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_ep import buffer, env
from hybrid_ep.runtime import options, routing_maps
from hybrid_ep.runtime.bootstrap import GroupView


class Runtime:
    """What callers ask of deep_ep's compiled object, of a buffer that is alive."""

    def __init__(self, owner: buffer.HybridEPBuffer):
        self._owner = owner

    def is_available(self) -> bool:
        return self._owner.is_usable

    def get_num_rdma_ranks(self) -> int:
        """Nodes."""
        return self._owner.num_of_nodes

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        return self._owner.node_rank

    def get_root_rdma_rank(self, global_: bool) -> int:
        """The rank of this rank's rail on the first node: in the group (True), or among the nodes."""
        return self._owner.local_rank if global_ else 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"runtime.{name} is of deep_ep's compiled half, which is not there; use the methods of the buffer itself"
        )


class HybridEPBuffer(buffer.HybridEPBuffer):
    """hybrid_ep.HybridEPBuffer; empty_jit_cache and runtime are there for callers of deep_ep's, whose tensors are GPUs'
    where torch sees one: some give a group of gloo, of which hybrid_ep's own takes the host's executor."""

    @staticmethod
    def _asked_executor(executor: Any, view: GroupView) -> Any:
        named = executor is not None or env.get("HYBRID_EP_EXECUTOR") is not None
        if not named and not view.virtual and torch.cuda.is_available():
            return "cuda"
        return options.asked_executor(executor, view)

    @property
    def runtime(self) -> Runtime:
        return Runtime(self)

    _barriers = 0

    def barrier(self) -> None:
        """Returns when every rank of the group has come, and what its device held before is done. BootstrapError names
        ranks that have not come by the deadline."""
        session = self._open_session()
        if session.options.device.type == "cuda":
            torch.cuda.synchronize(session.options.device)
        self._barriers += 1
        session.meet.exchange(f"compat.barrier/{self._barriers}", None)

    def empty_jit_cache(self) -> None:
        """Nothing to do: no kernel is compiled at run time."""


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(routing_map bool [T, E], probs fp32 [T, E] or None) of topk_idx [T, K], -1 dropped, and topk_weights [T, K] or
    None, on their device."""
    if topk_idx.shape[0] != num_of_tokens:
        raise ValueError(f"num_of_tokens={num_of_tokens} but topk_idx has {topk_idx.shape[0]} rows; they must agree")
    return routing_maps.from_topk(topk_idx, topk_weights, num_of_experts)
