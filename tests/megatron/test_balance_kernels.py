"""Exact balancing whose clones the ranks' kernels push: the bits of off and of torch's push, on gloo ranks."""

from types import SimpleNamespace

import parity_world
import pytest
import torch
from test_dispatcher import Program

from megatron_patches import balance_kernels


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "push_programs"), num_ranks, arguments, timeout_s=150)


@pytest.mark.parametrize(
    "ep, spare_slots, grouped", [pytest.param(4, 2, False, marks=pytest.mark.version_free), (2, 1, False), (4, 2, True)]
)
def test_any_plan_gives_the_bits_of_off_and_of_torch(ep, spare_slots, grouped):
    run("bit_equality", ep, ep, spare_slots, grouped)


@pytest.mark.version_free
def test_sums_that_round_have_the_bits_of_torch():
    run("rounding", 4, 4)


@pytest.mark.version_free
def test_broken_pushes_are_noticed():
    assert run("mutants", 4, 4)[0] == []


@pytest.mark.parametrize("grouped", [pytest.param(False, marks=pytest.mark.version_free), True])
def test_clones_lie_on_the_nodes_that_were_asked_for(grouped):
    run("reaches", 4, 4, grouped)


@pytest.mark.version_free
def test_who_pushes_is_chosen_and_said():
    run("choices", 2, 2)


@pytest.mark.parametrize(
    ("wanted", "nodes", "within", "device", "order", "graph", "by_torch"),
    [
        ("auto", 2, False, "cuda:1", 100, "none", True),
        ("auto", 2, False, "cuda:1", 200, "none", False),
        ("auto", 2, True, "cuda:1", 100, "none", False),
        ("auto", 1, False, "cuda:1", 100, "none", False),
        ("kernels", 2, False, "cuda:1", 100, "none", False),
        ("auto", 2, False, "cpu", 0, "none", False),
        ("auto", 2, False, "cuda:1", 100, "full_iteration", False),  # which torch's way cannot serve
    ],
)
def test_torch_pushes_to_any_node_where_gpus_order_rdma_for_themselves(
    monkeypatch, wanted, nodes, within, device, order, graph, by_torch
):
    known = {"devices": [{"rdma_order": 200}, {"rdma_order": order}]}
    monkeypatch.setattr(balance_kernels.devices, "load", lambda: known)
    owner = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
    manager = SimpleNamespace(
        planner=SimpleNamespace(options=SimpleNamespace(num_nodes=nodes, within_node=within)),
        config=SimpleNamespace(cuda_graph_impl=graph, cuda_graph_modules=[]),
        weights=SimpleNamespace(owners=[owner], shapes=[(8, 8)]),
    )
    why = balance_kernels._why_torch(manager, wanted)
    assert (why is not None) == by_torch
    assert why is None or "any of the group's 2 nodes" in why


@pytest.mark.version_free
def test_a_rank_killed_while_weights_are_pushed_ends_the_wait_of_the_others():
    with pytest.raises(parity_world.WorldError) as failed:
        run("killed_in_a_push", 2, 2)
    text = str(failed.value)
    assert "exit code -9" in text and "DeadlineError" in text and "from rank 1" in text, text
