"""Megatron-Core's own deepep and hybridep backends over deep_ep as hybrid_ep serves it, on CPU tensors.

Each rank is a thread with copies of Megatron's two modules of its own, for they keep their buffer in a global."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from callers import check_layer, dense, experts_of_groups, layer_inputs

from hybrid_ep import compat
from hybrid_ep.testing import VirtualWorld

MOE = "megatron.core.transformer.moe"
TOKENS, LOCAL, TOPK, HIDDEN = (6, 1, 0, 9), 2, 3, 16


def _copy(name: str, as_name: str):
    spec = importlib.util.spec_from_file_location(as_name, importlib.util.find_spec(name).origin)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backends(monkeypatch):
    """Of each of four ranks, seen as two nodes: (fused_a2a, token_dispatcher)."""
    pytest.importorskip(f"{MOE}.token_dispatcher", reason="Megatron-Core is not installed")
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", "2")
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "60")
    real = sys.modules[f"{MOE}.fused_a2a"]
    compat.install_as_deep_ep()
    copies = []
    for rank in range(4):
        fused = _copy(f"{MOE}.fused_a2a", f"fused_a2a_of_rank{rank}")
        assert fused.HAVE_DEEP_EP and fused.HAVE_HYBRIDEP
        sys.modules[f"{MOE}.fused_a2a"] = fused
        copies.append((fused, _copy(f"{MOE}.token_dispatcher", f"token_dispatcher_of_rank{rank}")))
    yield copies
    sys.modules[f"{MOE}.fused_a2a"] = real
    compat.uninstall()


def _config():
    from megatron.core.transformer.transformer_config import TransformerConfig

    # A capacity factor masks choices of probability 0; at this one it drops nothing else.
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=4 * LOCAL,
        moe_router_topk=TOPK,
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=True,
        expert_model_parallel_size=4,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        moe_expert_capacity_factor=8.0,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_deepep_backend(backends, asynchronous):
    """The manager's five steps, as MoEFlexTokenDispatcher calls them."""
    config = _config()

    def work(rank, group):
        _, dispatcher = backends[rank]
        manager = dispatcher._DeepepManager(group, LOCAL, TOPK, 4 * LOCAL, config)

        def layer(x, idx, weights):
            manager.setup_metadata(*dense(idx, weights, 4 * LOCAL))
            rows = manager.dispatch(x, asynchronous, asynchronous)
            rows, probs = manager.get_permuted_hidden_states_by_experts(rows)
            rows = experts_of_groups(rows * probs[:, None], manager.get_number_of_tokens_per_expert(), rank * LOCAL)
            return manager.combine(manager.get_restored_hidden_states_by_experts(rows), asynchronous, asynchronous)

        for step in range(2):
            check_layer(layer, *layer_inputs(10 * step + rank, TOKENS[rank - step], 4 * LOCAL, TOPK, HIDDEN))

    VirtualWorld(2, 2).run(work)


def test_hybridep_functions(backends):
    """fused_a2a's pair of autograd functions, with and without a static number of rows."""

    def work(rank, group):
        fused, _ = backends[rank]
        for static in (None, 120):

            def layer(x, idx, weights, static=static):
                route, probs = dense(idx, weights, 4 * LOCAL)
                rows, row_probs, _, counts, handle = fused.hybrid_ep_dispatch(
                    x, route, probs, group, LOCAL, num_permuted_tokens=static, pad_multiple=4
                )
                rows = experts_of_groups(rows * row_probs[:, None], counts, rank * LOCAL)
                return fused.hybrid_ep_combine(rows, handle, num_permuted_tokens=len(rows), pad_multiple=4)

            check_layer(layer, *layer_inputs(rank, TOKENS[rank], 4 * LOCAL, TOPK, HIDDEN))

    VirtualWorld(2, 2).run(work)
