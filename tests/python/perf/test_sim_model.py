"""The performance model: row counts against brute force, bounds that hold, and what must never get slower."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.block_split import local_blocks
from hybrid_ep.perf import flow, model, route_time, routing
from hybrid_ep.perf.costs import RowCosts
from hybrid_ep.perf.flow import Chain, Hop
from hybrid_ep.perf.implementations import HYBRID_EP, PUBLISHED, UNPERMUTED
from hybrid_ep.perf.shape import Shape

H100 = clusters.get("h100_8x400g")


def brute_force(choices, shape):
    """Rows counted token by token and rank by rank, with sets."""
    ranks, local = shape.ranks, shape.ranks_per_node
    count = {name: np.zeros(ranks) for name in ("out", "in", "copies", "own", "received", "pairs")}
    for rank, token in itertools.product(range(ranks), range(choices.shape[1])):
        homes = [int(e) // shape.local_experts for e in choices[rank, token] if e >= 0]
        for home in homes:
            count["pairs"][home] += 1
        for home in set(homes):
            forwarder = home // local * local + rank % local
            count["received"][home] += 1
            count["copies"][forwarder] += 1
            count["own"][forwarder] += forwarder == home
        for node in {home // local for home in homes} - {rank // local}:
            count["out"][rank] += 1
            count["in"][node * local + rank % local] += 1
    return count


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(0, 10_000), st.data())
def test_counts_equal_brute_force(nodes, local, experts_per_rank, tokens, seed, data):
    ranks = nodes * local
    experts = ranks * experts_per_rank
    topk = data.draw(st.integers(1, experts))
    shape = Shape(ranks, local, tokens, 8, topk, experts)
    rng = np.random.default_rng(seed)
    choices = np.stack([[rng.permutation(experts)[:topk] for _ in range(tokens)] for _ in range(ranks)])
    choices[rng.random(choices.shape) < 0.2] = -1
    want, got = brute_force(choices, shape), routing.count(choices, shape)
    assert got.rail_out == want["out"].max() and got.rail_in == want["in"].max()
    assert got.copies == want["copies"].max() and got.received == want["received"].max()
    assert got.node_out == (want["copies"] - want["own"]).max()
    assert got.node_in == (want["received"] - want["own"]).max()
    assert got.pairs == want["pairs"].max()
    assert got.ranks_per_token == pytest.approx(want["received"].sum() / (ranks * tokens))


@pytest.mark.parametrize(
    "shape", [Shape(8, 8, 3000, 8, 8, 64), Shape(16, 4, 2000, 8, 4, 32), Shape(6, 2, 2500, 8, 3, 18)]
)
def test_closed_form_is_the_mean_of_drawn_routing(shape):
    rng = np.random.default_rng(5)
    choices = rng.random((shape.ranks, shape.tokens, shape.experts)).argpartition(shape.topk)[..., : shape.topk]
    drawn, closed = routing.count(choices, shape), routing.uniform(shape)
    assert drawn.ranks_per_token == pytest.approx(closed.ranks_per_token, rel=0.005)
    assert drawn.nodes_per_token == pytest.approx(closed.nodes_per_token, rel=0.005)
    # of the busiest rank: a little above the mean, never below
    assert closed.received * 0.999 <= drawn.received <= closed.received * 1.06
    assert closed.rail_out * 0.999 <= drawn.rail_out <= closed.rail_out * 1.06


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_group_limited_closed_form_is_the_mean_of_drawn_routing(nodes):
    shape = Shape(nodes * 2, 2, 1, 8, 8, 64)
    rng = np.random.default_rng(2)
    groups, held, hits = 8, 8, []
    for _ in range(4000):
        open_groups = rng.permutation(groups)[:4]
        experts = rng.permutation(np.concatenate([np.arange(g * held, (g + 1) * held) for g in open_groups]))[:8]
        hits.append((len(set(experts // (64 // nodes))), len(set(experts // (64 // (nodes * 2))))))
    want_nodes, want_ranks = np.mean(hits, axis=0)
    got = routing.uniform(shape, groups=8, group_limit=4)
    assert got.nodes_per_token == pytest.approx(want_nodes, rel=0.02)
    assert got.ranks_per_token == pytest.approx(want_ranks, rel=0.02)


@pytest.mark.parametrize(
    "groups, limit, said",
    [
        (3, 2, "groups=3 must divide the 256 experts"),
        (8, 9, "group_limit=9 must be an integer from 1 to 8"),
        (8, 0, "group_limit=0 must be an integer from 1 to 8"),
        (0, 1, "groups=0 must be an integer from 1 to 256"),
        (0, 0, "groups=0 must be"),
        (8.0, 4, "groups=8.0 must be"),
        (256, 2, "group_limit=2 leaves a token 2 experts, fewer than topk=8"),
    ],
)
def test_groups_that_no_router_has_are_named(groups, limit, said):
    with pytest.raises(ValueError, match=said):
        routing.uniform(Shape(16, 8, 128, 7168, 8, 256), groups, limit)


def test_groups_that_nodes_cut_unevenly_are_named():
    with pytest.raises(ValueError, match="groups=4 must .* a multiple of the 3 nodes and the 6 ranks"):
        routing.uniform(Shape(6, 2, 8, 8, 2, 24), 4, 2)


@pytest.mark.parametrize("choices", [np.zeros((4, 0, 2), dtype=np.int64), np.full((4, 3, 2), -1)])
def test_routing_without_a_choice_has_no_imbalance(choices):
    found = routing.count(choices, Shape(4, 4, 8, 8, 2, 8))
    assert found.imbalance == 0 and found.pairs == 0


def test_distinct_at_its_ends():
    assert routing.distinct(1, 64, 8) == 1
    assert routing.distinct(64, 64, 8) == pytest.approx(8)
    assert routing.distinct(4, 64, 64) == 4


def test_zipf_is_reproducible_distinct_and_skewed():
    shape = Shape(8, 8, 500, 8, 4, 32)
    a, b = routing.zipf(shape, 1.2, 3), routing.zipf(shape, 1.2, 3)
    assert (a == b).all()
    assert all(len(set(row)) == 4 for row in a.reshape(-1, 4))
    assert routing.count(a, shape).imbalance > routing.count(routing.zipf(shape, 0.0, 3), shape).imbalance + 0.3


def test_load_files(tmp_path):
    shape = Shape(4, 4, 400, 8, 2, 8)
    (tmp_path / "load.txt").write_text("100\n0\n1\n1\n1\n1\n1\n1\n")
    skewed = routing.traffic_of(f"file:{tmp_path / 'load.txt'}", shape)
    assert skewed.imbalance > 0.5
    np.save(tmp_path / "choices.npy", np.zeros((4, 10, 1), dtype=np.int64))
    assert routing.traffic_of(f"file:{tmp_path / 'choices.npy'}", shape).pairs == 4 * 400


@pytest.mark.parametrize(
    "text, word",
    [
        ("zipf", "needs an exponent"),
        ("zipf:x", "exponent"),
        ("zipf:-1", "exponent"),
        ("file:/nowhere", "does not exist"),
        ("hot", "uniform, zipf"),
    ],
)
def test_bad_routing(text, word):
    with pytest.raises(ValueError, match=word):
        routing.parse(text, Shape(4, 4, 8, 8, 2, 8))


@pytest.mark.parametrize(
    "change, word",
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks_per_node": 3}, "divide"),
        ({"topk": 99}, "topk"),
        ({"experts": 9}, "experts=9"),
        ({"hidden": 12}, "hidden=12"),
        ({"tokens": 1.5}, "tokens"),
    ],
)
def test_bad_shapes(change, word):
    with pytest.raises(ValueError, match=word):
        Shape(**{"ranks": 8, "ranks_per_node": 8, "tokens": 8, "hidden": 64, "topk": 2, "experts": 16, **change})


def test_two_servers_in_a_row_overlap_chunk_by_chunk():
    chains = [Chain(str(i), [Hop(("a", 0), "r", 2.0), Hop(("b", 0), "r", 3.0, latency=1.0)]) for i in range(4)]
    assert flow.run(chains).end == 2 + 4 * 3 + 1  # fill, the bottleneck, drain


def test_a_streaming_hop_ends_no_earlier_than_its_source():
    chains = [Chain("0", [Hop(("a", 0), "r", 10.0, True, 1.0), Hop(("b", 0), "r", 2.0)])]
    assert flow.run(chains).end == 11.0


def test_roles_share_a_server():
    hops = {role: [Hop(("a", 0), role, 1.0)] for role in ("x", "y")}
    chains = [Chain(f"{role}{i}", hops[role]) for role in ("x", "y") for i in range(3)]
    order = [s.role for s in flow.run(chains).spans]
    assert order == ["x", "y"] * 3


def test_a_gate_opens_with_its_last_chain_and_a_missing_one_is_an_error():
    first = [Chain(f"g{i}", [Hop(("a", i), "r", float(i + 1))], gate=("g",)) for i in range(3)]
    late = Chain("late", [Hop(("b", 0), "r", 1.0)], after=[("g",)])
    assert flow.run([*first, late]).end == 4.0
    loop = [
        Chain("p", [Hop(("a", 0), "r", 1.0)], gate=("p",), after=[("q",)]),
        Chain("q", [Hop(("a", 0), "r", 1.0)], gate=("q",), after=[("p",)]),
    ]
    with pytest.raises(ValueError, match="never open"):
        flow.run(loop)


def test_a_chain_waits_for_all_its_gates_and_opens_one_before_its_end():
    early = Chain("e", [Hop(("a", 0), "r", 2.0), Hop(("c", 0), "r", 9.0)], gate=("e",), gate_at=0)
    last = Chain("l", [Hop(("b", 0), "r", 5.0)], gate=("l",))
    both = Chain("both", [Hop(("d", 0), "r", 1.0)], after=[("e",), ("l",), ("nobody's",)])
    one = Chain("one", [Hop(("f", 0), "r", 1.0)], after=[("e",)])
    begins = {s.label: s.start for s in flow.run([early, last, both, one]).spans}
    assert begins["one"] == 2.0 and begins["both"] == 5.0


def _shape(nodes, local, log_tokens, hidden, topk, per_rank):
    experts = nodes * local * per_rank
    return Shape(nodes * local, local, 2**log_tokens, 128 * hidden, min(topk, experts), experts)


SHAPES = st.builds(
    _shape,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([2, 4, 8]),
    st.integers(5, 12),
    st.integers(4, 64),
    st.integers(1, 8),
    st.integers(1, 8),
)


@settings(max_examples=40, deadline=None)
@given(
    SHAPES,
    st.sampled_from(["dispatch", "combine"]),
    st.sampled_from([2, 8, 24]),
    st.sampled_from([HYBRID_EP, PUBLISHED]),
)
def test_no_bound_is_beaten_and_all_rows_are_served(shape, op, num_sms, impl):
    got = model.predict(op, shape, H100, num_sms=num_sms, impl=impl)
    assert got.kernel_us >= max(got.bounds.values()) * (1 - 1e-9)
    t = routing.uniform(shape)
    bytes_on_link = impl.link_row_bytes(shape, "bf16", op)
    nvlink_us = t.nvlink_rows * bytes_on_link / (H100.gpu.nvlink_rate * 1e3)
    assert got.bounds["NVLink"] == pytest.approx(nvlink_us, rel=1e-6)
    if shape.nodes > 1:
        packets = math.ceil(bytes_on_link / 4096)
        nic_us = t.rail_out * (bytes_on_link + 30 * packets) / (H100.nic.rate * 1e3)
        assert got.bounds["NIC"] == pytest.approx(max(nic_us, t.rail_out * impl.per_row_messages / 330), rel=1e-6)
    assert got.physical["nvlink"] <= got.logical["nvlink"]
    assert got.physical["rail"] <= got.logical["rail"]


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.sampled_from(["dispatch", "combine"]))
def test_more_work_never_takes_less_time(shape, op):
    base = model.predict(op, shape, H100, num_sms=8).kernel_us
    assert model.predict(op, shape.with_(tokens=shape.tokens * 2), H100, num_sms=8).kernel_us >= base
    # the lanes that hand rows on take as long for short ones
    assert model.predict(op, shape.with_(hidden=shape.hidden * 2), H100, num_sms=8).kernel_us >= base
    # how chunks fall on blocks may cost an SM count a little of its gain, never a tenth
    assert model.predict(op, shape, H100, num_sms=16).kernel_us < base * 1.1


def test_local_work_by_its_rows():
    """Copy engines of a node with few SMs: rows of the scatter, and of the way to the caller's tensors by its kind."""
    shape = Shape(8, 8, 4096, 7168, 8, 256)
    t, cost = routing.uniform(shape), RowCosts.of(H100, shape, HYBRID_EP, "dispatch", "bf16")
    scatter = (t.copies * cost.store + shape.tokens * cost.load) / 4

    def busy(impl=HYBRID_EP, landed=False, **options):
        return model.predict("dispatch", shape, H100, num_sms=4, impl=impl, landed=landed, **options)

    for impl, rows_out in ((HYBRID_EP, t.pairs), (UNPERMUTED, t.received)):
        # blocks that feed links do both, one after the other; blocks beside them read and write at the same time
        both = (t.received * cost.load + rows_out * cost.store) / 4
        assert busy(impl, permute_sms=0).bounds["SM"] == pytest.approx(scatter + both, rel=1e-2)
        few = max(t.received * cost.load, rows_out * cost.store) / 2
        assert busy(impl, permute_sms=2).bounds["SM"] == pytest.approx(max(scatter, few), rel=2e-2)
    # a row that landed in its first place is read where it has another, and written there
    copied = model.local_rows(shape, t, HYBRID_EP, "dispatch", landed=True)
    assert copied.stores == pytest.approx(t.pairs - t.received) and 0 < copied.loads < copied.stores
    assert model.local_rows(shape, t, UNPERMUTED, "dispatch", landed=True) == (0.0, 0.0)
    assert busy(landed=True, permute_sms=4).kernel_us < busy(permute_sms=4).kernel_us


@pytest.mark.parametrize("op", model.OPS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_local_work_of_blocks_apart_overlaps_the_links(op, nodes):
    """With blocks enough it costs what is left of it when the links are through: a tail, not a phase."""
    shape = Shape(8 * nodes, 8, 4096, 7168, 8, 256)

    def kernel(permute_sms):
        return model.predict(op, shape, H100, num_sms=16, permute_sms=permute_sms, landed=False)

    alone, apart = kernel(0), kernel(100)
    local = apart.timeline.busy["engine", 16]  # of the first block behind those that feed links
    links = max(us for (kind, block), us in apart.timeline.busy.items() if kind == "engine" and block < 16)
    assert local > 40 and apart.kernel_us < 0.95 * alone.kernel_us
    if nodes == 1:  # a rail fills and drains
        bound = max(links, *(apart.bounds[name] for name in ("NVLink", "SM roles")))
        assert apart.kernel_us < bound + 0.75 * local + 60
    told = model.predict(op, shape, H100, num_sms=16, landed=False)
    assert told.kernel_us == kernel(local_blocks(op, 16, 132)).kernel_us


def test_routing_is_charged_once_to_a_dispatch_of_ours():
    shape = Shape(8, 8, 4096, 7168, 8, 256)
    first = model.predict("dispatch", shape, H100, num_sms=8)
    again = model.predict("dispatch", shape, H100, num_sms=8, cached=True)
    launch = H100.gpu.launch_us.value
    assert first.kernel_us == again.kernel_us
    assert first.api_us - again.api_us == pytest.approx(route_time.exchange_us(shape, H100) + launch)
    for case, least, most in ((shape, 15, 40), (Shape(64, 8, 4096, 7168, 8, 256), 30, 70)):
        assert least < route_time.exchange_us(case, H100) < most
    assert route_time.own_us(shape, H100) < route_time.exchange_us(shape, H100)
    assert route_time.exchange_us(shape.with_(tokens=16 * 4096), H100) > 4 * route_time.exchange_us(shape, H100)
    theirs = model.predict("dispatch", shape, H100, num_sms=8, impl=PUBLISHED)
    assert theirs.api_us == model.predict("dispatch", shape, H100, num_sms=8, impl=PUBLISHED, cached=True).api_us


@pytest.mark.parametrize("permute_sms", [-1, 129])
def test_local_blocks_that_the_gpu_has_not_are_refused(permute_sms):
    with pytest.raises(ValueError, match=f"permute_sms={permute_sms} must be in 0 .. 128"):
        model.predict("dispatch", Shape(8, 8, 64, 64, 2, 16), H100, num_sms=4, permute_sms=permute_sms)


def test_faster_hardware_is_faster_where_it_binds():
    shape = Shape(64, 8, 4096, 7168, 8, 256)
    slow = model.predict("dispatch", shape, clusters.get("b200_8x400g"), num_sms=24)
    fast = model.predict("dispatch", shape, clusters.get("b300_8x800g"), num_sms=24)
    assert slow.binds == "NIC" and fast.kernel_us < slow.kernel_us * 0.65


@pytest.mark.parametrize(
    "options, word",
    [
        ({"num_sms": 0}, "num_sms=0"),
        ({"num_sms": 999}, "num_sms=999"),
        ({"num_sms": 8, "chunk": 0}, "chunk=0"),
        ({"num_sms": 8, "dtype": "int3"}, "dtype"),
    ],
)
def test_bad_predictions(options, word):
    with pytest.raises(ValueError, match=word):
        model.predict("dispatch", Shape(8, 8, 64, 64, 2, 16), H100, **options)


def test_a_node_larger_than_the_domain_is_refused():
    with pytest.raises(ValueError, match="NVLink domains of 8"):
        model.predict("dispatch", Shape(16, 16, 64, 64, 2, 16), H100, num_sms=8)
