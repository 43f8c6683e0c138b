"""Bad input of the balancer's public functions: a ValueError that names the argument, what it is, and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_ep import balance
from hybrid_ep.balance import MicrobatchOptions, owners, window

LOAD = np.arange(32, dtype=np.float64).reshape(2, 16)
CURRENT = balance.plan_placement(LOAD, 20, 4).phy2log
COUNTS = np.full((4, 8), 10)
FAR = 2**32


def changed(array, at, value):
    array = array.astype(object)
    array[at] = value
    return array.tolist()


def placed(**change):
    return balance.plan_placement(**({"load": LOAD, "num_slots": 20, "num_ranks": 4} | change))


def front(**change):
    return balance.placement_front(**({"load": LOAD, "num_slots": 20, "num_ranks": 4, "current": CURRENT} | change))


def eplb(**change):
    call = dict(weight=LOAD, num_replicas=20, num_groups=4, num_nodes=2, num_gpus=4)
    return balance.rebalance_experts(**(call | change))


def cloned(**change):
    return balance.plan_microbatch(**({"counts": COUNTS} | change))


TWINS = changed(CURRENT, (1, 0), int(CURRENT[1, 1]))
# call, its change, what is said
PLACEMENTS = [
    ({"current": CURRENT + FAR}, r"^current\[0, 0\] is \d{10}: give the expert of every slot"),
    ({"current": changed(CURRENT, (1, 7), -1)}, r"^current\[1, 7\] is -1: give .* from 0 to 15$"),
    ({"current": changed(CURRENT, (1, 7), 16)}, r"^current\[1, 7\] is 16: give .* from 0 to 15$"),
    ({"current": CURRENT + 0.7}, r"^current is float64 \(2, 20\): give integers of shape \(2, 20\)"),
    ({"current": CURRENT > 3}, r"^current is bool"),
    ({"current": CURRENT[:, :19]}, r"^current is int64 \(2, 19\): give integers of shape \(2, 20\)"),
    ({"current": TWINS}, r"^current\[1\] is \d+: rank 0 has that expert already; give .* \(layer 1\)$"),
    (
        {"current": np.arange(40).reshape(2, 20) % 10},
        r"^current: lacks expert 10; give every expert a slot \(layer 0\)",
    ),
    ({"num_slots": 20.0}, "^num_slots is 20.0: give an integer from 1"),
    ({"num_slots": 2**33}, "^num_slots is 8589934592: give an integer from 1"),
    ({"num_slots": 22}, "^num_slots: 22 must be a multiple of num_ranks"),
    ({"num_ranks": 0}, "^num_ranks is 0: give an integer from 1"),
    ({"num_ranks": True}, "^num_ranks is True: give an integer"),
    ({"num_nodes": 0}, "^num_nodes is 0: give an integer from 1"),
    ({"num_groups": -4}, "^num_groups is -4: give an integer from 0"),
    ({"load": changed(LOAD, (1, 3), -1.0)}, r"^load\[1, 3\] is -1.0: give finite numbers >= 0"),
    ({"load": [[1.0, 2.0], [3.0]]}, "^load is list .*: give numbers"),
    ({"load": LOAD > 2}, "^load is bool"),
    ({"load": torch.ones(2, 16, dtype=torch.complex64)}, "^load is complex64"),
]
OPTIONS = [
    ({"target": np.nan}, "^target is nan: give a fraction from 0 to 1"),
    ({"target": 1.5}, "^target is 1.5: give a fraction"),
    ({"target": True}, "^target is True: give a fraction"),
    ({"target": "0.1"}, "^target is '0.1': give a fraction"),
    ({"max_moves": 2.5}, "^max_moves is 2.5: give an integer from 0 .*, a number of slots, or None"),
    ({"max_moves": -1}, "^max_moves is -1: give an integer"),
    ({"move_cost": np.nan}, "^move_cost is nan: give what a changed slot costs"),
    ({"move_cost": -1}, "^move_cost is -1: give"),
    ({"move_cost": np.inf}, "^move_cost is inf: give"),
    ({"horizon": -1}, "^horizon is -1: give an integer from 0 .*, micro-batches"),
    ({"horizon": 1.5}, "^horizon is 1.5: give"),
]
EPLB = [
    ({"num_nodes": 0}, "^num_nodes is 0: give an integer from 1"),
    ({"num_groups": -1}, "^num_groups is -1: give an integer from 0"),
    ({"num_replicas": 20.0}, "^num_replicas is 20.0: give an integer"),
    ({"num_replicas": 21}, "^num_replicas: 21 must be a multiple of num_gpus"),
    ({"num_gpus": 3}, "^num_nodes: 2 must divide num_gpus"),
    ({"num_gpus": 2**31}, "^num_gpus is 2147483648: give an integer"),
    ({"weight": -LOAD}, r"^weight\[0, 1\] is -1.0: give finite numbers"),
    ({"weight": LOAD[0]}, r"^weight is float64 \(16,\): give numbers \[layers, experts\]"),
]
CLONES = [
    ({"counts": changed(COUNTS, (2, 5), -1)}, r"^counts\[2, 5\] is -1: give tokens"),
    ({"counts": np.array(changed(COUNTS, (2, 5), -1))}, r"^counts\[2, 5\] is -1: give tokens, 0 or more"),
    ({"counts": np.array(changed(COUNTS, (3, 7), 2**40))}, r"^counts\[3, 7\] is 1099511627776: give tokens"),
    ({"counts": np.full((4, 8), 2**38)}, "^counts has 1099511627776 tokens or more in all: give tokens"),
    ({"counts": np.full((4, 8), 2**64 - 1, np.uint64)}, r"^counts\[0, 0\] is 18446744073709551615: give tokens"),
    ({"counts": COUNTS / 2}, r"^counts is float64 \(4, 8\): give integers"),
    ({"counts": COUNTS > 2}, r"^counts is bool \(4, 8\): give integers"),
    ({"counts": COUNTS[0]}, r"^counts has shape \(8,\): give \[ranks, experts\]"),
    ({"counts": [[1, 2], [3]]}, "^counts is list .*: give integers"),
    ({"owner": [0, 0, 1, 1, 2, 2, 3, FAR + 1]}, r"^owner\[7\] is 4294967297: give the rank of each of the 8 experts"),
    ({"owner": [0, 0, 1, 1, 2, 2, 3, -1]}, r"^owner\[7\] is -1: give the rank of each of the 8 experts"),
    ({"owner": [0, 0, 1, 1, 2, 2, 3, 1.7]}, r"^owner is float64 \(8,\): give integers"),
    (
        {"owner": np.array([0, 0, 1, 1, 2, 2, 3, 4], np.int32)},
        r"^owner\[7\] is 4: give the rank of each expert, 0 to 3",
    ),
    ({"spare_slots": 1.0}, "^spare_slots is 1.0: give an integer from 0 to 4096"),
    ({"spare_slots": 2**29}, "^spare_slots is 536870912: give an integer from 0 to 4096"),
    ({"spare_slots": True}, "^spare_slots is True: give an integer"),
    ({"num_nodes": 0}, "^num_nodes is 0: give an integer"),
    ({"search_nodes": 1e12}, "^search_nodes is 1000000000000.0: give an integer .*, nodes of the search, or None"),
    ({"search_nodes": 10**12}, "^search_nodes is 1000000000000: give an integer from 0 to 2147483647"),
    ({"min_chunk": 1.5}, "^min_chunk is 1.5: give an integer"),
    ({"tile": 2**41}, "^tile is 2199023255552: give an integer from 1 to"),
    ({"instance_cost": "3"}, "^instance_cost is '3': give an integer"),
    ({"fan_out": 1.5}, "^fan_out is 1.5: give an integer from 1 .*, the most clones a rank pushes, or None"),
    ({"epsilon": np.nan}, "^epsilon is nan: give a fraction from 0 to 1"),
    ({"epsilon": False}, "^epsilon is False: give a fraction"),
    ({"skip_below": None}, "^skip_below is None: give a fraction"),
    ({"within_node": 1}, "^within_node is 1: give True or False"),
]
BAD = [
    *((placed, c, said) for c, said in PLACEMENTS),
    *((front, c, said) for c, said in PLACEMENTS if c != {"num_slots": 22}),  # of which there is no placement in force
    # Without a placement in force they decide nothing, and are as wrong.
    *((placed, c | now, said) for c, said in OPTIONS for now in ({}, {"current": CURRENT})),
    *((eplb, c, said) for c, said in EPLB),
    *((cloned, c, said) for c, said in CLONES),
    *((MicrobatchOptions, c, said) for c, said in CLONES if not {"counts", "owner"} & set(c)),
]


@pytest.mark.parametrize(
    "call, change, said",
    BAD,
    ids=[f"{call.__name__}-{'-'.join(change)}-{i}" for i, (call, change, _) in enumerate(BAD)],
)
def test_bad_input_is_named(call, change, said):
    with pytest.raises(ValueError, match=said):
        call(**change)


@pytest.mark.parametrize("judge", ["tokens_of_ranks", "imbalance"])
def test_a_placement_judges_loads_of_its_own_shape(judge):
    plan = placed()
    assert (getattr(plan, judge)(torch.tensor(LOAD)) == getattr(plan, judge)()).all()
    for load, said in [
        (np.full((2, 16), np.nan), r"^load\[0, 0\] is nan: give finite numbers"),
        (changed(LOAD, (1, 2), -3.0), r"^load\[1, 2\] is -3.0: give finite numbers"),
        (LOAD[:, :8], r"^load is float64 \(2, 8\): give \(2, 16\), the layers and experts of this placement"),
        (LOAD[0], r"^load is float64 \(16,\): give numbers"),
    ]:
        with pytest.raises(ValueError, match=said):
            getattr(plan, judge)(load)


def test_layers_of_counts_are_named():
    planner = balance.MicrobatchPlanner(4, 8)
    bad = np.stack([COUNTS, COUNTS])
    bad[1, 2, 5] = -1
    with pytest.raises(ValueError, match=r"^counts\[2, 5\] is -1: give tokens, .* \(layer 1\)$"):
        planner.plan_layers(bad)
    with pytest.raises(ValueError, match=r"^counts\[1, 2, 5\] is -1: give tokens"):
        planner.plan_layers(bad.astype(np.int32))
    for given in (COUNTS, 3):
        with pytest.raises(ValueError, match="^counts is int64 .*: give integers of shape"):
            planner.plan_layers(given)


def test_ranks_are_integers():
    plan, columns = cloned(), np.arange(8) * 3 // 2
    planner = balance.MicrobatchPlanner(4, 8)
    for rank in (1.0, True, -1, 4, 2**40):
        with pytest.raises(ValueError, match="^source is .*: give an integer from 0 to 3"):
            plan.share_of_source(rank)
        for call in (lambda r: plan.part_of_rank(r, columns), lambda r: planner.plan_of_rank(COUNTS, r, columns)):
            with pytest.raises(ValueError, match="^rank is .*: give an integer from 0 to 3"):
                call(rank)
    for ranks, experts, name in ((4.0, 8, "num_ranks"), (4, 2**33, "num_experts"), (0, 8, "num_ranks")):
        with pytest.raises(ValueError, match=f"^{name} is .*: give an integer"):
            balance.MicrobatchPlanner(ranks, experts)


def test_owners_and_windows():
    given = owners.Owners(8, 4)
    for bad, said in [
        ([0, 1, 2, 3, 4, 5, 6, 7.0], "^expert_of_slot is float64"),
        ([0, 1, 2, 3, 4, 5, 6, 8], r"^expert_of_slot\[7\] is 8: give every expert exactly one slot"),
        ([0, 1, 2, 3, 4, 5, 6, 6], "^expert_of_slot is .*: give every expert exactly one slot"),
    ]:
        with pytest.raises(ValueError, match=said):
            given.assign(bad)
    assert given.is_identity
    given.assign(torch.arange(8).flip(0))
    assert given.slot_of == tuple(range(7, -1, -1))
    for bad, said in [((8, 0), "num_ranks is 0"), ((8.0, 2), "num_experts is 8.0")]:
        with pytest.raises(ValueError, match=said):
            owners.Owners(*bad)
    for bad, said in [((2.0, 8), "num_layers is 2.0"), ((2, 0), "num_experts is 0"), ((2, 8, np.nan), "decay is nan")]:
        with pytest.raises(ValueError, match=said):
            window.LoadWindow(*bad)


@pytest.mark.parametrize(
    "load, said",
    [
        ([1, -1], r"^load\[1\] is -1"),
        ([np.inf], r"^load\[0\] is inf"),
        ([[1]], r"^load is int64 \(1, 1\): give a vector"),
        (["a"], "^load is <U1"),
    ],
)
def test_an_imbalance_is_of_good_loads(load, said):
    with pytest.raises(ValueError, match=said):
        balance.imbalance_ratio(load)


@pytest.mark.parametrize(
    "unit", [1e308, 1.0, 3e38, 1e-308, 5e-324, np.float32(3e38), np.float16(6e4), np.float16(1e-7)]
)
def test_an_imbalance_is_of_loads_of_any_size(unit):
    for load, wanted in (([1, 1, 1, 1], 0.0), ([1, 0, 0, 0], 3.0), ([1, 1, 0], 0.5), ([0, 0], 0.0), ([], 0.0)):
        given = np.array([x * unit for x in load], dtype=np.asarray(unit).dtype)
        assert balance.imbalance_ratio(given) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8], ids=str)
def test_tensors_of_any_type_are_planned_as_their_numbers(dtype):
    load = torch.tensor(LOAD, dtype=torch.float32).to(dtype)
    if dtype in FLOATS[:4]:
        load.requires_grad_()
    as_doubles = load.detach().double().numpy()
    assert (placed(load=load).phy2log == placed(load=as_doubles).phy2log).all()
    assert (eplb(weight=load)[0] == eplb(weight=as_doubles)[0]).all()
    assert (placed().imbalance(load) == placed().imbalance(as_doubles)).all()
    assert balance.imbalance_ratio(load[1]) == balance.imbalance_ratio(as_doubles[1])
    current = torch.tensor(CURRENT)
    ours, theirs = (front(load=x, current=y) for x, y in ((load, current), (as_doubles, CURRENT)))
    for points, expected in zip(ours, theirs, strict=True):
        assert [p.moved for p in points] == [p.moved for p in expected]


def test_a_plan_of_clones_takes_tensors_and_integers_of_any_type():
    expected = cloned(owner=[0, 1, 2, 3] * 2, spare_slots=2, search_nodes=1000)
    for dtype in (torch.int16, torch.uint8, torch.int64):
        plan = cloned(
            counts=torch.tensor(COUNTS, dtype=dtype),
            owner=torch.tensor([0, 1, 2, 3] * 2, dtype=dtype),
            spare_slots=np.int32(2),
            search_nodes=torch.tensor(1000),
        )
        assert (plan.slot_expert == expected.slot_expert).all() and (plan.counts == COUNTS).all()
        assert plan.options == expected.options


def test_a_skip_above_what_any_rank_has_clones_nothing():
    counts = np.zeros((4, 8), np.int64)
    counts[0, 0] = 2**40 - 1  # times parts per million, more than 64 bits
    assert cloned(counts=counts, skip_below=1e6).is_empty
    assert cloned(counts=counts, skip_below=3.0).is_empty  # all of it on one rank is 3 above the mean
    assert not cloned(counts=counts, skip_below=2.99).is_empty
