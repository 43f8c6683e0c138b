"""Bench peer: Megatron-Core's alltoall token dispatcher, its six methods in the order MoELayer calls them.

Needs megatron-core; on a machine without a GPU it runs on gloo through megatron_patches.cpu. The dispatcher
is Megatron's own class, unmodified, driven with the same routing map and probabilities as everybody else.
`hybrid-ep bench --peers` finds it by the entry point group hybrid_ep.bench_peers; it is no part of hybrid_ep, which
never imports Megatron.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybrid_ep.cli.bench.implementations import Case, Dispatched, Implementation, Setting

if TYPE_CHECKING:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

_REPOSITORY = Path(__file__).resolve().parents[1]


class MegatronAllToAll(Implementation):
    """MoEAlltoAllTokenDispatcher, expert tensor parallel size 1, no token dropping, no fused permutation."""

    name = "megatron-alltoall"
    wire = "per-expert"

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        if setting.quantised:
            return f"it sends rows as they are, not {setting.dtype}"
        if not setting.permute:
            return "its output is always expert-major; drop --no-permute"
        if not importlib.util.find_spec("megatron") or not importlib.util.find_spec("megatron.core"):
            return "megatron-core is not installed; pip install megatron-core"
        return None

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about optional packages that this path does not use
            self.dispatcher = _make_dispatcher(case)

    def dispatch(self) -> Dispatched:
        with torch.no_grad():
            return self._dispatch(self.case.x, self.case.probs)

    def combine(self, dispatched: Dispatched, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._combine(rows)

    def step(self) -> None:
        """Forward and backward by Megatron's own autograd."""
        hidden = self.case.x.detach().requires_grad_()
        probs = self.case.probs.detach().requires_grad_()
        done = self._dispatch(hidden, probs)
        output = self._combine(done.rows)
        assert done.weights is not None  # this dispatcher moves them with the rows
        torch.autograd.backward([output, done.weights], [output.detach(), done.weights.detach()])

    def _dispatch(self, hidden: torch.Tensor, probs: torch.Tensor) -> Dispatched:
        dispatcher = self.dispatcher
        rows, weights = dispatcher.dispatch_preprocess(hidden, self.case.routing_map, probs)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, _, weights = dispatcher.dispatch_postprocess(rows, weights)
        return Dispatched(rows, weights, None)  # the dispatcher itself keeps what combine needs

    def _combine(self, rows: torch.Tensor) -> torch.Tensor:
        dispatcher = self.dispatcher
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))


def _make_dispatcher(case: Case) -> MoEAlltoAllTokenDispatcher:
    """Megatron's dispatcher on the case's group; collective (it creates one group per rank)."""
    with _no_compiler():
        if not torch.cuda.is_available():
            _install_cpu_support()
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = case.group
    groups.expt_tp, _ = dist.new_subgroups(group_size=1, group=case.group)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=1,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.topk,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=case.num_ranks,
    )
    first = case.rank * case.num_local_experts
    experts = list(range(first, first + case.num_local_experts))
    return MoEAlltoAllTokenDispatcher(len(experts), experts, config=config, pg_collection=groups)


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """Megatron decorates functions with torch.compile as it is imported, which loads the whole compiler. The
    alltoall path calls none of them, so while Megatron is imported the decorator does nothing."""
    original = torch.compile
    idle = lambda function=None, **_: function if function is not None else (lambda inner: inner)  # noqa: E731
    setattr(torch, "compile", idle)  # noqa: B010 - of another type than what it replaces
    try:
        yield
    finally:
        setattr(torch, "compile", original)  # noqa: B010


def _install_cpu_support() -> None:
    if importlib.util.find_spec("megatron_patches") is None:
        sys.path.insert(0, str(_REPOSITORY))
    from megatron_patches import cpu

    cpu.install()


PEERS = [MegatronAllToAll]
