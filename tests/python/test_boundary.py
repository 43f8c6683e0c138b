"""Nothing that crosses into the core can make it touch memory that was not given: for every tensor of every binding,
one byte too few, another element type or another kind of device is a ValueError that names it, and nothing was sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from boundary import EXPERTS, HIDDEN, TOKENS, all_verbs, changed, given, views, watched_run
from hypothesis import given as examples
from hypothesis import strategies as st

from hybrid_ep import _core
from hybrid_ep.balance import plan_microbatch, plan_placement
from hybrid_ep.runtime.tensors import view
from hybrid_ep.testing import VirtualWorld

CODES = _core.TensorView.elements
PAYLOAD = {"x", "scale"}  # of any element type; what comes out must have the same
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2)]


def damaged(name: str, v: _core.TensorView):
    """(what is wrong, the view that has it)."""
    if v.num_bytes:
        yield "a byte less", changed(v, num_bytes=v.num_bytes - 1)
        yield "no bytes", changed(v, num_bytes=0)
    yield "another device", changed(v, device="cuda" if v.device == "cpu" else "cpu")
    if name not in PAYLOAD:
        yield "another type", changed(v, element=CODES["int16"])


def refusal(call, arguments) -> str:
    """What the ValueError says, "" for none."""
    try:
        call(**arguments)
    except ValueError as error:
        return str(error)
    return ""


class Refuses:
    """Before every call of the core, the same call with each of its tensors spoilt in turn."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def __call__(self, verb, call, arguments):
        for name, v in views(arguments).items():
            self.seen.add((verb, name))
            for what, bad in damaged(name, v):
                assert refusal(call, arguments | {name: bad}).startswith(f"{name}: "), (verb, name, what)
        return arguments


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.device == b.device and a.shape == b.shape
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("beside", [False, True], ids=["host waits", "kernels run beside"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tensor_of_every_verb_is_held_to_its_size(shape, beside):
    looks = Refuses()
    got = watched_run(*shape, looks, lambda b, mine: all_verbs(b, mine, beside))
    unwatched = watched_run(*shape, lambda *a: a[2], lambda b, mine: all_verbs(b, mine, beside))
    for mine, plain in zip(got, unwatched, strict=True):
        same(mine, plain)
    assert looks.seen >= {("place", n) for n in ("topk_idx", "routing_map", "weights", "memory")}
    assert looks.seen >= {("combine", n) for n in ("x", "weights", "out_x", "out_weights")}
    assert looks.seen >= {("dispatch", n) for n in ("x", "scale", "weights", "out_x", "out_scale", "out_weights")}


@examples(
    tokens=st.integers(0, 9),
    topk=st.integers(1, EXPERTS),
    hidden=st.sampled_from([8, 16, 40]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    shape=st.sampled_from(SHAPES),
    beside=st.booleans(),
)
def test_any_call_states_its_sizes_to_the_byte(tokens, topk, hidden, dtype, shape, beside):
    watched_run(
        *shape,
        Refuses(),
        lambda b, mine: all_verbs(b, mine, beside),
        tokens=tokens,
        topk=topk,
        hidden=hidden,
        dtype=dtype,
    )


@pytest.fixture(scope="module")
def plan():
    """A compiled plan of two nodes that its dispatch completed, seen from rank 0; its world stays open."""
    world = VirtualWorld(2, 1)
    buffers = world.buffers(HIDDEN, TOKENS, EXPERTS // 2, timeout_s=60)
    mine = [given(rank) for rank in range(2)]
    handles = world.run(
        lambda rank, _: buffers[rank].dispatch(
            mine[rank].hidden, topk_idx=mine[rank].idx, topk_weights=mine[rank].weights
        )[3]
    )
    yield handles[0][6].plan
    for buffer in buffers:
        buffer.destroy()


def of_plan(plan):
    """method: its tensors by argument."""
    mine, pairs = given(0), plan.pair_expert
    ordered = torch.zeros(TOKENS, plan.weight_stride, dtype=torch.float32)
    dense = torch.zeros(TOKENS, EXPERTS, dtype=torch.float32)
    rows, local = plan.num_recv_rows, plan.num_local_experts
    rail = sum(plan.core.num_rail_tokens(n) for n in range(2))
    flags = {"rail_to_node": rail, "node_to_rail": TOKENS, "local_routing": rows * local}
    numbers = {"sparse_to_dense": rail, "permuted_rows": rows * local, "source_ends": 2}
    return {
        "maps": {
            "memory": plan.memory.block,
            **{n: torch.empty(c, dtype=torch.bool) for n, c in flags.items()},
            **{n: torch.empty(c, dtype=torch.int32) for n, c in numbers.items()},
        },
        "weights_from_dense": {"pair_expert": pairs, "probs": dense, "out": ordered},
        "weights_to_dense": {"pair_expert": pairs, "weights": ordered, "out": dense},
        "weights_from_topk": {"pair_expert": pairs, "topk_idx": mine.idx, "topk_weights": mine.weights, "out": ordered},
    }


def test_plans_hold_the_tensors_of_every_method_to_their_size(plan):
    methods = {name for name in dir(plan.core) if name.startswith(("weights_", "maps"))}
    assert methods == set(of_plan(plan)), "a method that this test does not know"
    for method, tensors in of_plan(plan).items():
        call, good = getattr(plan.core, method), {name: view(name, x) for name, x in tensors.items()}
        rest = {"topk": tensors["topk_idx"].shape[1]} if "topk_idx" in tensors else {}
        call(**good, **rest)
        for name, v in good.items():
            for _, bad in damaged(name, v):
                with pytest.raises(ValueError, match=rf"^{name}: "):
                    call(**good | {name: bad}, **rest)
            if name in ("permuted_rows", "source_ends"):  # of permuted rows only
                call(**good | {name: None}, **rest)
                continue
            with pytest.raises(ValueError, match=rf"^{name}: "):
                call(**good | {name: None}, **rest)


def test_memory_of_a_placed_plan_is_held_to_its_size():
    """What the first dispatch learns goes where Placed.plan is told."""
    placed = []

    def keep(verb, call, arguments):
        if verb == "place":
            placed.append(call(**arguments))
        return arguments

    watched_run(1, 1, keep, lambda b, mine: all_verbs(b, mine, True))
    made = next(p for p in placed if p.complete is None)
    total = made.learned.total
    whole = torch.empty(total + 256, dtype=torch.uint8)
    block = whole[-whole.data_ptr() % 128 :][:total].view(torch.int64)
    for _, bad in damaged("memory", view("memory", block)):
        with pytest.raises(ValueError, match="^memory: "):
            made.plan(bad)
    with pytest.raises(ValueError, match="^memory: .*128"):
        made.plan(view("memory", whole[-whole.data_ptr() % 128 + 16 :][:total].view(torch.int64)))
    assert made.plan(view("memory", block)).num_tokens == TOKENS


def test_a_plan_has_room_for_every_expert_that_topk_idx_may_name():
    """The kernel counts a map's pairs; those of topk_idx it takes on trust, and their memory is of the topk said."""
    [buffer], idx = VirtualWorld(1, 1).buffers(HIDDEN, TOKENS, EXPERTS), given(0).idx
    header = _core.CallHeader(num_tokens=TOKENS, topk=1, num_experts=EXPERTS, hidden=HIDDEN)
    room = torch.empty(1 << 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="its topk is 1, but topk_idx may choose"):
        buffer._session.engine.place(
            _core.PlaceRequest(
                header, topk_idx=idx, topk_in=idx.shape[1], count=True, memory=room[-room.data_ptr() % 128 // 8 :]
            )
        )
    buffer.destroy()


def test_a_budget_that_no_row_number_reaches_is_refused():
    """One more than the budget is what its word holds, and 0 is no budget."""
    assert _core.CallHeader(num_tokens=1, topk=1, num_experts=1, budget=2**31 - 1).budget == 2**31 - 1
    for budget in (2**31, 2**32 - 1, 2**40):
        with pytest.raises(ValueError, match=rf"^budget: {budget} permuted rows .*give None for no limit"):
            _core.CallHeader(num_tokens=1, topk=1, num_experts=1, budget=budget)


def test_a_view_of_nothing_has_no_bytes():
    with pytest.raises(ValueError, match="address: is null, with 4 bytes"):
        _core.TensorView(0, 4, 0, "cpu")
    assert _core.TensorView(0, 0, 0, "cpu").num_bytes == 0
    with pytest.raises(ValueError, match="device: memory of a 'meta'"):
        _core.TensorView(64, 4, 0, "meta")
    for code in (-1, 99):
        with pytest.raises(ValueError, match="element"):
            _core.TensorView(64, 4, code, "cpu")


def test_a_view_keeps_its_tensor_alive():
    x = torch.arange(4, dtype=torch.float32)
    v, expected = view("x", x), x.tolist()
    assert v.tensor is x
    del x
    assert v.tensor.tolist() == expected


# ---- the planners of the balancer: numpy arrays


def arrays_of_planners():
    """name: (call, its arrays by argument)."""
    counts = np.arange(2 * 8, dtype=np.int64).reshape(2, 8)
    made = plan_microbatch(counts)
    shape, load = made.options.shape(2, 8), counts[:1].copy()
    planner = _core.MicrobatchPlanner(shape)
    layers = dict(num_layers=1, num_experts=8, num_slots=10, num_groups=2, num_nodes=1, num_ranks=2)
    current = np.ascontiguousarray(plan_placement(load, 10, 2).phy2log, dtype=np.int32)
    return {
        "plan": (planner.plan, {"counts": counts, "owner": made.owner}),
        "share_of_source": (
            lambda **a: _core.share_of_source(shape=shape, source=0, **a),
            {"counts": counts, "owner": made.owner, "slot_expert": made.slot_expert, "slot_tokens": made.slot_tokens},
        ),
        "plan_of_rank": (
            lambda **a: planner.plan_of_rank(rank=0, **a),
            {"counts": counts, "owner": made.owner, "columns": np.arange(8, dtype=np.int64) + np.arange(8) // 4},
        ),
        "part_of_rank": (
            lambda **a: _core.part_of_rank(shape=shape, rank=0, **a),
            {
                "counts": counts,
                "owner": made.owner,
                "columns": np.arange(8, dtype=np.int64) + np.arange(8) // 4,
                "slot_expert": made.slot_expert,
                "slot_tokens": made.slot_tokens,
            },
        ),
        "place_layers": (
            lambda **a: _core.place_layers(**a, **layers),
            {"load": load, "single": load.astype(np.float32), "group": load[:, :2].astype(np.float32)},
        ),
        "improve_layers": (
            lambda **a: _core.improve_layers(**a, **layers, target_ppm=0, max_moves=4),
            {"load": load, "current": current, "fresh": current},
        ),
    }


@pytest.mark.parametrize(
    "name", ["plan", "plan_of_rank", "part_of_rank", "share_of_source", "place_layers", "improve_layers"]
)
def test_planners_hold_their_arrays_to_size_and_type(name):
    call, arrays = arrays_of_planners()[name]
    call(**arrays)
    for argument, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        wide = np.repeat(array, 2, axis=-1)[..., ::2]
        assert not wide.flags.c_contiguous
        other = np.float64 if array.dtype == np.float32 else np.float32
        for bad in (flat[:-1].reshape(1, -1), array.astype(other), array.astype(np.int16), wide):
            with pytest.raises(ValueError, match=rf"^{argument}: "):
                call(**arrays | {argument: bad})
    call(**arrays)


def test_planners_refuse_ranks_and_experts_that_do_not_exist():
    call, arrays = arrays_of_planners()["share_of_source"]
    with pytest.raises(ValueError, match="^owner: "):
        call(**arrays | {"owner": np.full_like(arrays["owner"], 2)})
    with pytest.raises(ValueError, match="^slot_expert: "):
        call(**arrays | {"slot_expert": np.full_like(arrays["slot_expert"], 8)})


def test_the_simulator_holds_its_routing_to_size():
    spec = {"num_nodes": 1, "num_local_ranks": 2, "num_experts": 4, "tokens": 2, "topk": 2}
    known = _core.sim_defaults()
    spec = {name: value for name, value in spec.items() if name in known}
    for bad in ([[0, 1]], [[0, 1, 2], [0]], [[99] * 4, [99] * 4]):
        with pytest.raises(ValueError, match="topk_idx"):
            _core.simulate(spec, topk_idx=bad)


def test_maps_are_made_of_the_plans_own_memory(plan):
    """That is the proof that the host can read it; as large a tensor on the CPU is none."""
    good = {name: view(name, x) for name, x in of_plan(plan)["maps"].items()}
    with pytest.raises(ValueError, match="memory: is not what the plan was placed in"):
        plan.core.maps(**good | {"memory": view("memory", plan.memory.block.clone())})
