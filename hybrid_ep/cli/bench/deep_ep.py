"""DeepEP's three buffers as peers, driven through their public Python interfaces, where deep_ep is importable.

V1's Buffer and V2's ElasticBuffer deliver received rows, once per rank, so they take part with --no-permute;
HybridEPBuffer (the hybrid-ep branch) also permutes. They need GPUs. Written to the interfaces of deep_ep 1.2 (V1,
hybrid-ep 94a9f8f) and dd758ca (V2); what was run so far is a module that records the calls."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hybrid_ep.cli.bench.implementations import BufferImplementation, Case, Dispatched, Implementation, Setting

_SCALE_BLOCK = {"fp8": 128}  # DeepEP's fp8 rows have an fp32 scale for every 128 values
_V1_RANKS_OF_A_NODE = 8


def deep_ep(attribute: str) -> tuple[ModuleType | None, str | None]:
    """(the deep_ep that has `attribute`, None) or (None, why there is none)."""
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        return None, f"deep_ep is not importable ({error}); install DeepEP"
    if getattr(module, "__hybrid_ep__", False):
        return None, "deep_ep is hybrid_ep under that name here; uninstall() the alias to compare with DeepEP"
    if not hasattr(module, attribute):
        return None, f"deep_ep {getattr(module, '__version__', '')} has no {attribute}; install a DeepEP that has it"
    return module, None


class DeepEpImplementation(Implementation):
    """What the three have in common: when they can take part."""

    attribute: str
    wire = "hierarchical"

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        _, reason = deep_ep(cls.attribute)
        if reason:
            return reason
        if setting.executor != "cuda":
            return "DeepEP moves CUDA tensors; use --backend cuda"
        if setting.quantised and setting.dtype not in _SCALE_BLOCK:
            return f"DeepEP sends bf16 or fp8 rows, not {setting.dtype}"
        return None if setting.quantised or setting.dtype == "bf16" else f"DeepEP has no {setting.dtype} rows"

    @property
    def module(self) -> Any:
        return importlib.import_module("deep_ep")


class _ReceivedRows(DeepEpImplementation):
    """V1 and V2: rows as received, in an order that is theirs."""

    ordered = False

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        reason = super().unavailable(setting)
        return reason or (
            "it delivers received rows, not expert-major ones; use --no-permute" if setting.permute else None
        )

    @property
    def _x(self) -> Any:
        return self.case.x if self.case.scales is None else (self.case.x, self.case.scales)

    @staticmethod
    def _rows(received: Any, state: Any) -> Dispatched:
        rows, scales = received if isinstance(received, tuple) else (received, None)
        return Dispatched(rows, None, state, scales)


class DeepEpV1(_ReceivedRows):
    """deep_ep.Buffer: layout, dispatch with that layout, combine."""

    name = "deep_ep-v1"
    attribute = "Buffer"

    @classmethod
    def unavailable(cls, setting: Setting) -> str | None:
        reason = super().unavailable(setting)
        if reason is None and setting.num_ranks > _V1_RANKS_OF_A_NODE and setting.num_ranks % _V1_RANKS_OF_A_NODE:
            return f"V1 takes nodes of {_V1_RANKS_OF_A_NODE} ranks, not {setting.num_ranks} ranks"
        return reason

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        buffer = self.module.Buffer
        if case.num_sms:
            buffer.set_num_sms(case.num_sms)
        self._dispatch_config = buffer.get_dispatch_config(case.num_ranks)
        self._combine_config = buffer.get_combine_config(case.num_ranks)
        row = case.hidden * 2
        nvl, rdma = (
            max(
                getattr(c, f"get_{kind}_buffer_size_hint")(row, case.num_ranks)
                for c in (self._dispatch_config, self._combine_config)
            )
            for kind in ("nvl", "rdma")
        )
        self._bytes = nvl + rdma
        self.buffer = buffer(case.group, nvl, rdma)

    def dispatch(self) -> Dispatched:
        case = self.case
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(case.topk_idx, case.num_experts)
        received, _, _, _, handle, _ = self.buffer.dispatch(
            self._x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=case.topk_idx,
            topk_weights=case.topk_weights,
            config=self._dispatch_config,
        )
        return self._rows(received, handle)

    def combine(self, dispatched: Dispatched, rows: Any) -> Any:
        return self.buffer.combine(rows, dispatched.state, config=self._combine_config)[0]

    def step(self) -> None:
        """The backward of dispatch is a combine and that of combine a dispatch with the handle."""
        done = self.dispatch()
        gradient = self.combine(done, self.expert_output(done))
        back = self.buffer.dispatch(gradient, handle=done.state, config=self._dispatch_config)[0]
        self.combine(done, back)

    def buffer_bytes(self) -> int:
        return self._bytes


class DeepEpV2(_ReceivedRows):
    """deep_ep.ElasticBuffer: one buffer and handle for both ways."""

    name = "deep_ep-v2"
    attribute = "ElasticBuffer"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.buffer = self.module.ElasticBuffer(
            case.group,
            num_max_tokens_per_rank=max(case.max_tokens, 1),
            hidden=case.hidden,
            num_topk=case.topk,
            use_fp8_dispatch=case.scales is not None,
        )

    def dispatch(self) -> Dispatched:
        case = self.case
        received, _, _, handle, _ = self.buffer.dispatch(
            self._x,
            topk_idx=case.topk_idx,
            topk_weights=case.topk_weights,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=max(case.max_tokens, 1),
            num_sms=case.num_sms,
        )
        return self._rows(received, handle)

    def combine(self, dispatched: Dispatched, rows: Any) -> Any:
        return self.buffer.combine(rows, dispatched.state, num_sms=self.case.num_sms)[0]

    def step(self) -> None:
        done = self.dispatch()
        gradient = self.combine(done, self.expert_output(done))
        back = self.buffer.dispatch(gradient, handle=done.state, num_sms=self.case.num_sms)[0]
        self.combine(done, back)

    def close(self) -> None:
        if (destroy := getattr(self.buffer, "destroy", None)) is not None:
            destroy()


class DeepEpHybrid(DeepEpImplementation, BufferImplementation):
    """deep_ep.HybridEPBuffer, the interface that ours has too. It takes the same number of tokens on every rank."""

    name = "deep_ep-hybrid"
    attribute = "HybridEPBuffer"

    def make_buffer(self) -> Any:
        sms = (
            {}
            if not self.case.num_sms
            else {"num_sms_dispatch_api": self.case.num_sms, "num_sms_combine_api": self.case.num_sms}
        )
        return self.module.HybridEPBuffer(
            group=self.case.group,
            hidden_dim=self.case.hidden,
            max_num_of_tokens_per_rank=max(self.case.max_tokens, 1),
            num_local_experts=self.case.num_local_experts,
            use_fp8=self.case.scales is not None,
            **sms,
        )


ADAPTERS: tuple[type[Implementation], ...] = (DeepEpV1, DeepEpV2, DeepEpHybrid)
