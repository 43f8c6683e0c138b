"""Whatever a training script does around its calls, results are those without it, bit for bit, on real processes."""

from __future__ import annotations

import habit_operations as operations
import pytest
import torch
from examples import check
from habits import HABITS, Habit

from hybrid_ep import HybridEPBuffer


def results(ctx, habit: Habit) -> dict:
    """Collective, on ranks 0 to 3."""
    problem = operations.problem(ctx.rank)
    return habit.run(lambda: operations.run(ctx.group(4), problem, habit.form, habit.gradients, habit.reference))


def compare(ctx, name: str) -> list[str]:
    if "without habits" not in ctx.kept:
        ctx.kept["without habits"] = results(ctx, Habit())
    habit = HABITS[name]
    return operations.differences(results(ctx, habit), ctx.kept["without habits"], habit.gradients, habit.reference)


@pytest.mark.parametrize("name", sorted(HABITS))
def test_habits_change_no_bit(world, name):
    answers = world.run(compare, name, ranks=range(4), timeout_s=150)
    assert not any(answers), "\n".join(f"rank {rank}: {text}" for rank, said in enumerate(answers) for text in said)


def check_examples(ctx) -> None:
    for example in (operations.BY_TOPK, operations.BY_MAP, operations.FP8):
        with HybridEPBuffer(ctx.group(4), 16, 1, 2, timeout_s=50, num_of_hybrid_ep_ranks_per_nvlink_domain=2) as buffer:
            check(buffer, ctx.rank, example)


def test_what_habits_are_compared_with_is_the_reference(world):
    world.run(check_examples, ranks=range(4))


def spoilt(ctx) -> list[str]:
    problem = operations.problem(ctx.rank)
    want = operations.run(ctx.group(4), problem, lambda name, x: x)
    late = operations.run(ctx.group(4), problem, lambda name, x: x.roll(1, 0) if name == "probs" else x)
    return [
        operations.differences(late, want, True, True),
        operations.differences(
            {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in want.items()}, want, True, True
        ),
    ]


def test_the_comparison_notices(world):
    for other_values, other_device in world.run(spoilt, ranks=range(4)):
        assert len(other_device) > 40 and all("meta" in text for text in other_device)
        assert {text.split(":")[1].strip() for text in other_values} >= {"permuted", "reference"}
