"""CUDA graphs of Megatron's that end before dispatch: the training without them, bit for bit; others are refused."""

import importlib.metadata
from types import SimpleNamespace

import pytest
from test_balance_slow import run as run_program

from megatron_patches import balance, graphs, settings

MEGATRON_MINOR = int(importlib.metadata.version("megatron-core").split(".")[1])
replayed = pytest.mark.skipif(
    MEGATRON_MINOR < 19, reason="Megatron before 0.19 captures and replays by other functions"
)


def run(name, num_ranks, *arguments):
    return run_program(name, num_ranks, *arguments, module="graph_programs")


TRAVELLING = {"move": "weights", "grouped_gemm": True, "ranks_per_node": 1}


@replayed
@pytest.mark.parametrize(
    "wanted",
    [{}, {"balance": "exact"}, {"balance": "both", "grouped_gemm": True, "balance_push": "kernels"}, TRAVELLING],
    ids=["off", "exact", "both", "weights"],
)
def test_layers_graphed_up_to_dispatch_train_the_same_bits(wanted):
    run("same_training", 2, 2, 1, wanted, ["preprocess", "router", "attention"])


@replayed
def test_with_static_rows_and_micro_batches_in_flight():
    wanted = {"balance": "exact", "grouped_gemm": True, "static_rows": "drop"}
    run("same_training", 4, 2, 2, wanted, ["preprocess"])


@replayed
def test_a_map_that_a_replay_does_not_bring_is_noticed():
    assert run("broken", 2, 2) == [True, True]


class Member:
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"cuda_graph_impl": None},
        {"cuda_graph_impl": "none", "enable_cuda_graph": False},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [Member("attn")]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [Member("moe_router"), Member("attn")]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router,moe_preprocess"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mlp", "mamba"]},
        {"external_cuda_graph": True, "cuda_graph_scope": "attn"},
        {"cuda_graph_impl": "local", "cuda_graph_modules": [Member("moe_router")]},
    ],
)
def test_graphs_that_end_before_dispatch(given):
    assert graphs.with_dispatch(SimpleNamespace(**given)) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_cuda_graph": True}, "--cuda-graph-impl local"),
        ({"external_cuda_graph": True, "cuda_graph_scope": "full"}, "--cuda-graph-impl transformer_engine"),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "--cuda-graph-impl full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "--cuda-graph-scope full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": [Member("attn")]}, "local with --cuda-graph-modules attn"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [Member("moe"), Member("attn")]},
            "--cuda-graph-modules attn moe",
        ),
    ],
)
def test_graphs_with_a_dispatch_are_named(given, said):
    assert said in graphs.with_dispatch(SimpleNamespace(**given))


@pytest.mark.parametrize("of", [graphs.with_router, graphs.with_dispatch])
def test_graphs_of_attention_alone_hold_neither(of):
    assert of(SimpleNamespace(cuda_graph_impl="transformer_engine", cuda_graph_scope=["attn", "mlp"])) is None
    assert of(SimpleNamespace()) is None


@replayed
def test_what_looks_at_routing_is_refused_with_a_graphed_router(tmp_path):
    said = run("watchers", 1, str(tmp_path))[0]
    for one, flag in zip(said, ("--hybrid-ep-load-stats", "--hybrid-ep-router-guard warn"), strict=True):
        assert one.startswith(f"{flag} does not work with --cuda-graph-impl transformer_engine"), said
        assert "with --cuda-graph-modules attn moe_preprocess moe_router" in one, said


def said_of_whole_iterations(**changed):
    """What is said of a way to balance in a graph of whole iterations; None where it works."""
    asked = {"balance": "exact", "static_rows": "drop", "grouped_gemm": True}
    wanted = settings.Settings.of(**{**asked, **changed})
    config = SimpleNamespace(cuda_graph_impl="full_iteration", cuda_graph_modules=[])
    how = wanted.balance.clones, wanted.experts.grouped, balance.asks_no_host(wanted)
    return balance.check_supported(config, 1, wanted.balance.mode, *how)


@pytest.mark.parametrize("changed", [{}, {"grouped_gemm_backend": "triton", "balance_push": "kernels"}])
def test_whole_iterations_are_for_what_asks_nothing_of_the_host(changed):
    assert said_of_whole_iterations(**changed) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"balance": "both"},
        {"static_rows": "grow"},
        {"static_rows": None},
        {"balance_push": "torch"},
        {"grouped_gemm": False},
        {"grouped_gemm_backend": "torch"},
    ],
)
def test_whole_iterations_and_what_asks_the_host(changed):
    with pytest.raises(ValueError, match="--cuda-graph-impl full_iteration") as refused:
        said_of_whole_iterations(**changed)
    assert "--hybrid-ep-static-rows drop" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, False),
        ({"enable_cuda_graph": True}, False),
        ({}, False),
    ],
)
def test_graphs_of_whole_iterations_are_known(given, whole):
    assert graphs.of_iterations(SimpleNamespace(**given)) is whole
