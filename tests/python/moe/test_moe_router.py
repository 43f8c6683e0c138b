"""Router guards: a gate that cannot route is caught before the first step; with the tie-break it trains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_ep.moe import RouterError, RouterGuard, check_gates, routing_statistics, tie_break

EXPERTS, HIDDEN, TOPK, RANKS = 64, 32, 8, 8


def gate():
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0))


def test_a_good_gate_passes():
    check_gates({"layer 1": gate(), "layer 2": gate().bfloat16() + 0, "one expert": torch.zeros(1, HIDDEN)})


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda w: w.zero_(), "all weights equal.*all tokens go to the same experts"),
        (lambda w: w.fill_(0.5), "all weights equal"),
        (lambda w: w.fill_(float("nan")), "not finite"),
        (lambda w: w[3, 3].fill_(float("inf")), "not finite"),
        (lambda w: w[7].copy_(w[2]), "1 rows equal"),
        (lambda w: w.copy_(w[:1].expand_as(w).clone()), "63 rows equal"),
    ],
)
def test_a_gate_that_cannot_route_is_named_before_the_first_step(spoil, said):
    bad = gate()
    spoil(bad)
    with pytest.raises(RouterError, match=f"decoder.3.router.*{said}") as error:
        check_gates({"decoder.2.router": gate(), "decoder.3.router": bad})
    assert "decoder.2" not in str(error.value)


def test_gates_that_are_no_gates():
    with pytest.raises(RouterError, match="meta"):
        check_gates({"r": torch.empty(4, 4, device="meta")})
    with pytest.raises(RouterError, match="num_experts, hidden"):
        check_gates({"r": torch.zeros(4)})


def test_with_ties_taken_care_of_gates_must_be_finite_and_no_more():
    check_gates({"zeros": torch.zeros(4, 8), "twins": gate()[:1].expand(4, HIDDEN)}, distinct=False)
    for value in (float("nan"), float("inf")):
        with pytest.raises(RouterError, match="layer 3 holds values that are not finite"):
            check_gates({"layer 3": torch.full((4, 8), value)}, distinct=False)


def test_statistics_add_up_over_ranks_and_count_ties():
    torch.manual_seed(1)
    parts = [torch.randn(16, EXPERTS), torch.zeros(10, EXPERTS), torch.full((2, EXPERTS), float("nan"))]
    summed = sum(routing_statistics(p, TOPK) for p in parts)
    tokens, ties, lost = summed[:3].tolist()
    assert (tokens, ties, lost) == (28.0, 10.0, 2.0) and summed[3:].sum() == 28 * TOPK
    load = torch.zeros(EXPERTS)
    for row in parts[0].topk(TOPK).indices.flatten().tolist():
        load[row] += 1
    assert torch.equal(routing_statistics(parts[0], TOPK)[3:], load)
    assert routing_statistics(torch.zeros(3, 4), 4)[1] == 0  # all chosen: no boundary to tie at
    with pytest.raises(ValueError, match="topk=9"):
        routing_statistics(torch.zeros(3, 4), 9)


def test_statistics_count_the_choices_they_are_given():
    chosen = torch.tensor([[3, 1], [3, 0]])
    assert routing_statistics(torch.zeros(2, 4), 2, chosen).tolist() == [2, 2, 0, 1, 1, 0, 2]
    with pytest.raises(ValueError, match=r"chosen \(2, 2\) must be \[2, 3\]"):
        routing_statistics(torch.zeros(2, 4), 3, chosen)


def test_guard_acts_after_its_patience_and_forgets_on_a_good_step(caplog):
    bad, good = routing_statistics(torch.zeros(9, EXPERTS), TOPK), routing_statistics(torch.randn(99, EXPERTS), TOPK)
    guard = RouterGuard(patience=2)
    assert guard.step(bad)["tie_fraction"] == 1.0
    assert guard.step(good)["tie_fraction"] == 0.0
    guard.step(bad)
    with pytest.raises(RouterError, match=r"layer 4: tie_fraction 1 > 0.5 in 2 steps"):
        guard.step(bad, "layer 4")
    warns = RouterGuard(max_tie_fraction=None, max_load_ratio=4.0, patience=1, action="warn")
    with caplog.at_level("WARNING", "hybrid_ep.moe"):
        for _ in range(3):
            assert warns.step(bad)["load_ratio"] == EXPERTS / TOPK
    assert len(caplog.records) == 1 and "load_ratio 8 > 4" in caplog.text
    for name, values in (
        ("action", ["abort", None]),
        ("patience", [0, 2.5, None]),
        ("max_tie_fraction", [2.0, float("nan"), "x"]),
        ("max_load_ratio", [0.5, float("nan"), "x"]),
    ):
        for wrong in values:
            with pytest.raises(ValueError, match=f"{name}={wrong!r} must"):
                RouterGuard(**{name: wrong})


@pytest.mark.parametrize(
    "summed, said",
    [
        (torch.zeros(3), r"summed \(3,\) .* must be \[3 \+ num_experts\] finite numbers"),
        (torch.zeros(0), r"summed \(0,\)"),
        (torch.zeros(2, 5), r"summed \(2, 5\)"),
        (torch.tensor(1.0), r"summed \(\)"),
        (torch.tensor([4.0, float("nan"), 0, 2, 2]), r"summed \(5,\) \[4.0, nan"),
        (torch.tensor([4.0, 0, 0, -2, 2]), r"finite numbers of at least 0"),
        (None, "summed is NoneType None; give a tensor"),
    ],
)
def test_a_guard_judges_statistics_alone(summed, said):
    with pytest.raises(ValueError, match=said):
        RouterGuard().step(summed)


def ratios(scores):
    load = routing_statistics(scores, TOPK)[3:]
    ranks = load.view(RANKS, -1).sum(1)
    return float(load.max() / load.mean()), float(ranks.max() / ranks.mean())


@pytest.mark.parametrize("value", [0.0, 1 / 256, 1e3, -1e3, float("inf")])
def test_tie_break_spreads_ties_of_any_size(value):
    ties = torch.full((4096, EXPERTS), value)
    assert ratios(ties)[0] == EXPERTS / TOPK
    expert, rank = ratios(tie_break(ties))
    assert expert < 1.25 and rank < 1.1


def test_tie_break_lets_equals_share_the_last_place_evenly():
    scores = torch.zeros(8192, 16)
    scores[:, 5], scores[:, [2, 11]] = 2.0, 1.0
    chosen = tie_break(scores).topk(2).indices
    assert (chosen[:, 0] == 5).all() and set(chosen[:, 1].tolist()) == {2, 11}
    assert 0.47 < (chosen[:, 1] == 2).float().mean() < 0.53


def neighbours(shape, generator):
    """Softmax scores as close as fp32 has them, around 1/256."""
    steps = torch.randint(0, 6, shape, generator=generator, dtype=torch.int32)
    return (torch.full(shape, 1 / 256).view(torch.int32) + steps).view(torch.float32)


KINDS = {
    "logits": lambda shape, g: torch.randn(shape, generator=g),
    "logits of 1e3": lambda shape, g: torch.randn(shape, generator=g) * 1e3,
    "flat softmax": lambda shape, g: (torch.randn(shape, generator=g) * 1e-6).softmax(1),
    "neighbours": neighbours,
    "few values": lambda shape, g: torch.randint(-2, 3, shape, generator=g).float() / 16,
    "specials": lambda shape, g: torch.tensor([0.0, -0.0, 1.0, float("inf"), -float("inf")])[
        torch.randint(0, 5, shape, generator=g)
    ],
}


@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(0, 9),
    st.sampled_from([2, 8, 64, 256]),
    st.integers(0, 2**31),
    st.data(),
)
def test_tie_break_never_changes_a_choice_among_unequal_scores(kind, dtype, num_tokens, num_experts, seed, data):
    scores = KINDS[kind]((num_tokens, num_experts), torch.Generator().manual_seed(seed)).to(dtype)
    if dtype == torch.float64 and kind == "logits":
        scores = 1 + scores * 2.0**-40  # what fp32 could not tell apart
    topk = data.draw(st.integers(1, num_experts))
    places = tie_break(scores, seed)
    assert torch.equal(places.sort(1).values, torch.arange(num_experts).expand(num_tokens, -1)), "no two are equal"
    assert torch.equal(scores.gather(1, places.argsort(1)), scores.sort(1).values), "unequal scores keep their order"
    chosen, best = places.topk(topk).indices, scores.topk(topk)
    assert torch.equal(scores.gather(1, chosen), best.values), "the best values, whoever has them"
    ordered = scores.sort(1, descending=True).values
    decided = ordered[:, topk - 1] > ordered[:, topk] if topk < num_experts else torch.ones(num_tokens).bool()
    assert torch.equal(chosen.sort(1).values[decided], best.indices.sort(1).values[decided])
    assert torch.equal(places, tie_break(scores.clone(), seed)), "deterministic"


def test_tie_break_takes_scores_and_its_order_is_for_good():
    for wrong in (torch.zeros(4), torch.zeros(2, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"must be floating \[T, num_experts\]"):
            tie_break(wrong)
    # Checkpoints resume and replicas agree across releases: these numbers must not change.
    assert tie_break(torch.zeros(2, 8), 7).tolist() == [[2, 0, 3, 6, 4, 1, 7, 5], [4, 2, 6, 3, 0, 7, 5, 1]]
    nan = torch.tensor([[1.0, float("nan"), 2.0]])
    assert tie_break(nan).tolist() == [[0, 2, 1]]


def test_tie_break_depends_on_the_global_token_alone():
    zeros = torch.zeros(12, EXPERTS)
    whole = tie_break(zeros)
    assert torch.equal(torch.cat([tie_break(zeros[:5]), tie_break(zeros[5:], 5)]), whole)
    assert torch.equal(tie_break(zeros[5:], torch.tensor(5)), whole[5:])
    assert not torch.equal(whole[0], whole[1])


def train(with_tie_break: bool, steps: int = 60):
    """A layer of four small experts whose gate starts at zero learns four different maps: (loss, experts used)."""
    torch.manual_seed(0)
    gate, experts = torch.zeros(4, 8, requires_grad=True), (torch.randn(4, 8, 8) * 0.3).requires_grad_()
    maps, optimizer = torch.randn(4, 8, 8), torch.optim.Adam([gate, experts], lr=0.05)
    for _ in range(steps):
        kind = torch.randint(0, 4, (256,))
        x = torch.randn(256, 8) * 0.3
        x[torch.arange(256), kind] += 3.0
        scores = x @ gate.t()
        chosen = (tie_break(scores) if with_tie_break else scores).topk(1).indices[:, 0]
        prob = scores.softmax(1).gather(1, chosen[:, None])
        out = torch.einsum("ti,tij->tj", x, experts[chosen]) * prob
        loss = (out - torch.einsum("ti,tij->tj", x, maps[kind])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if not with_tie_break:
            return loss.item(), chosen.unique().numel()
        optimizer.step()
    return loss.item(), chosen.unique().numel()


def test_a_zero_router_is_caught_and_with_the_tie_break_it_trains():
    with pytest.raises(RouterError):
        check_gates({"router": torch.zeros(4, 8)})
    first, used = train(False)
    assert used == 1  # what the error speaks of: every token at one expert
    last, used = train(True)
    assert used > 1 and last < 0.3 * first
