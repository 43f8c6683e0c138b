"""The oracle is right: against loops that spell the definition out, across world shapes, and it notices
errors."""

from __future__ import annotations

import inspect

import pytest
import torch
from examples import WRONG, Example, check, examples, expected, same
from hypothesis import given, settings

from hybrid_ep import reference
from hybrid_ep.reference import ReferenceBuffer, World


def check_reference_buffer(ctx, ex: Example, wrong: str | None = None):
    """On every rank: ReferenceBuffer over gloo against the pure functions."""
    if ctx.rank >= ex.world.num_ranks:
        return
    buffer = ReferenceBuffer(
        ctx.group(ex.world.num_ranks),
        ex.hidden,
        64,
        ex.num_local_experts,
        num_of_hybrid_ep_ranks_per_nvlink_domain=ex.num_local_ranks,
    )
    want = expected(ex)
    check(buffer, ctx.rank, ex, WRONG[wrong](ex, want) if wrong else want)


@settings(max_examples=30)
@given(ex=examples(2, 2, max_tokens=6))
def test_rows_follow_the_definition(ex):
    """Row by row in plain loops: source rank, token; expert, source rank, token; zeros as padding."""
    want, world = expected(ex), ex.world
    routes = want.plan.routes
    for rank in range(world.num_ranks):
        first = rank * world.num_local_experts
        mine = range(first, first + world.num_local_experts)
        dense = [
            (s, t) for s in range(world.num_ranks) for t in range(ex.tokens[s]) if any(routes[s][t, e] for e in mine)
        ]
        assert dense == list(
            zip(
                want.dispatched and want.plan.ranks[rank].source.tolist(),
                want.plan.ranks[rank].token.tolist(),
                strict=True,
            )
        )
        row = 0
        rows, weights, scales = want.permuted[rank]
        for e in mine:
            first_row = row
            for s, t in dense:
                if routes[s][t, e]:
                    same("row", rows[row], want.inputs[s].hidden[t])
                    if scales is not None:
                        same("scale", scales[row], want.inputs[s].scale[t])
                    if weights is not None:
                        assert weights[row] == want.weights[s][t, e]
                    row += 1
            while row % (ex.pad_multiple or 1) or (ex.pad_empty_experts and row == first_row):
                assert not rows[row].view(torch.uint8).any() and (weights is None or weights[row] == 0)
                row += 1
        assert row == rows.shape[0]


@settings(max_examples=30)
@given(ex=examples(2, 2, max_tokens=6))
def test_sums_follow_the_definition(ex):
    """One token at a time, one fp32 addition at a time, in the documented order."""
    want, world, dtype = expected(ex), ex.world, ex.sum_dtype

    def rounded(x, sends):
        return x if ex.fp32_partials and sends else x.to(dtype).float()

    for s in range(world.num_ranks):
        own = s // world.num_local_ranks
        for t in range(ex.tokens[s]):
            total = None
            for node in [own] + [n for n in range(world.num_nodes) if n != own]:
                node_sum = None
                for rank in world.ranks_of_node(node):
                    plan = want.plan.ranks[rank]
                    hit = ((plan.source == s) & (plan.token == t)).nonzero()
                    if not hit.numel():
                        continue
                    partial = None
                    for slot in plan.dense_to_expert[int(hit)].tolist():
                        if slot >= 0:
                            x = want.returned[rank][slot].float()
                            partial = x if partial is None else partial + x
                    partial = rounded(torch.zeros(ex.hidden) if partial is None else partial, True)
                    node_sum = partial if node_sum is None else node_sum + partial
                if node_sum is not None:
                    node_sum = node_sum if node == own else rounded(node_sum, True)
                    total = node_sum if total is None else total + node_sum
            got = want.combined[s][0][t]
            same(f"token {t} of rank {s}", got, (torch.zeros(ex.hidden) if total is None else total).to(dtype))


def test_exact_sums_do_not_depend_on_the_world_shape():
    ex = Example(1, 4, 3, (9, 0, 5, 20), 4, exact=True, dtype="fp16", seed=3)
    results = []
    for world in (World(1, 4, 3), World(2, 2, 3), World(4, 1, 3)):
        want = expected(ex)
        plan = reference.plan_world(world, want.plan.routes)
        results.append(reference.combine_world(plan, want.returned, want.returned_probs))
    for other in results[1:]:
        for (x, p), (y, q) in zip(results[0], other, strict=True):
            same("tokens", x, y)
            same("probs", p, q)


def test_dispatch_then_combine_multiplies_by_the_number_of_experts():
    ex = Example(2, 2, 2, (7, 3, 0, 5), 3, exact=True, skew="half_dropped")
    want = expected(ex)
    back = reference.combine_world(want.plan, [p[0] for p in want.permuted], [p[1] for p in want.permuted])
    for s, (x, probs) in enumerate(back):
        assert torch.equal(x.float(), want.inputs[s].hidden.float() * want.plan.routes[s].sum(1, keepdim=True))
        same("probs", probs, want.weights[s])


def test_duplicates_are_merged_and_their_weights_added():
    route, weights = reference.densify(
        World(1, 2, 2), torch.tensor([[3, 1, 3, -1]]), torch.tensor([[0.5, 1.0, 0.25, 9.0]])
    )
    assert route.tolist() == [[False, True, False, True]] and weights.tolist() == [[0.0, 1.0, 0.0, 0.75]]


def test_a_budget_starves_the_last_experts_first():
    routes = [torch.ones(5, 2, dtype=torch.bool)]
    plan = reference.plan_world(World(1, 1, 2), routes, 4, [12]).ranks[0]
    assert plan.tokens_per_expert.tolist() == [5, 4] and plan.padded_tokens_per_expert.tolist() == [8, 4]
    assert plan.overflow and plan.num_dropped == 1
    plan = reference.plan_world(World(1, 1, 2), routes, 4, [16]).ranks[0]
    assert plan.tokens_per_expert.tolist() == [5, 5] and not plan.overflow


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (2, 3)])
def test_reference_buffer_over_gloo(world, shape):
    num_ranks = shape[0] * shape[1]
    for seed, dtype in ((1, "bf16"), (2, "fp8")):
        ex = Example(
            *shape,
            2,
            tuple((5 * r + 3) % 11 for r in range(num_ranks)),
            3,
            32,
            dtype,
            scale_columns=2,
            pad_multiple=4,
            seed=seed,
            budget=8 if dtype == "fp8" else None,
        )
        world.run(check_reference_buffer, ex)


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_the_comparison_notices(world, wrong):
    ex = Example(2, 2, 2, (6, 9, 12, 3), 3, scale_columns=1, pad_multiple=8, seed=5)
    answers = world.run(check_reference_buffer, ex, wrong, return_errors=True)
    assert any(a and a["type"] == "AssertionError" for a in answers), f"nobody noticed: {wrong}"


def test_weights_that_come_back_from_some_ranks_only_are_refused():
    world = reference.World(1, 2, 1)
    plan = reference.plan_world(world, [torch.ones(2, 2, dtype=torch.bool)] * 2)
    rows = [torch.ones(4, 8)] * 2
    with pytest.raises(ValueError, match="weights come from 1 of 2 ranks"):
        reference.combine_world(plan, rows, [None, torch.ones(4)])
    both = reference.combine_world(plan, rows, [torch.ones(4), torch.ones(4)])
    assert all(torch.equal(probs, torch.ones(2, 2)) for _, probs in both)


@pytest.mark.parametrize("kind", [ReferenceBuffer, World])
def test_what_the_api_page_shows_of_the_reference_has_a_docstring(kind):
    public = [name for name, member in vars(kind).items() if inspect.isfunction(member) and not name.startswith("_")]
    assert len(public) > 2 and not [name for name in public if not getattr(kind, name).__doc__]
