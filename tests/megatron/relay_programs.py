"""What the ranks do in tests of clones on other nodes: the worlds of whole numbers of balance_programs."""

import os
import signal

import numpy as np
from balance_programs import equal, missed_of, random_plan, train, wait_for_clones_of_the_last_rank
from push_programs import crossing, planned
from rank_programs import EXPERTS, initialize

import megatron_patches
from megatron_patches import balance_push, balance_relay
from megatron_patches.balance_relay import Rails


def apply(width, straight=False, **options):
    """straight: small experts, as these are, go straight; else along the rails, as large ones."""
    balance_push.RAILS_FROM_BYTES = 1 << 62 if straight else 0
    chosen = {"balance": "exact", "balance_epsilon": 0.0, "spare_slots": 2, **options}
    megatron_patches.apply(ranks_per_node=width, balance_clones="anywhere", balance_push="torch", **chosen)


def bit_equality(ep, width, grouped, straight):
    """Off, and clones anywhere: the same bits of everything, whatever the plan."""
    groups = initialize(ep)
    megatron_patches.apply(ranks_per_node=width, grouped_gemm=grouped)
    off, _ = train(groups, ep)
    apply(width, straight, grouped_gemm=grouped)
    with planned() as seen:
        for seed, main_grad in ((1, True), (2, False)):
            forced, _ = train(groups, ep, lambda manager, seed=seed: random_plan(seed, manager), main_grad)
            assert equal(forced, off), seed
    assert crossing(seen, width)[1] > 0
    again, _ = train(groups, ep, lambda manager: random_plan(2, manager))
    assert equal(again, forced), "a replay of the same plans differs"
    recomputed, _ = train(groups, ep, recompute=True)
    assert equal(recomputed, off), "recomputation"
    apply(width, straight, balance="both", grouped_gemm=grouped)
    owners = [np.random.default_rng(layer).permutation(EXPERTS) for layer in range(2)]
    both, _ = train(groups, ep, lambda manager: random_plan(5, manager), owners=owners)
    assert equal(both, off), "clones of experts that live elsewhere"
    megatron_patches.revert()
    return True


def mutants(ep, width):
    """Broken relays that the comparison must notice; returns those it missed."""
    groups = initialize(ep)
    megatron_patches.apply(ranks_per_node=width)
    off, _ = train(groups, ep)
    apply(width)
    push, collect = Rails.push, Rails.collect

    def other_weight(self, rounds, sizes, weight, slot):
        return push(self, rounds, sizes, lambda expert, n: weight(expert, n) + 1, slot)

    def twice(self, rounds, sizes, gradient, add):
        return collect(self, rounds, sizes, gradient, lambda *one: (add(*one), add(*one)))

    def nothing(self, rounds, sizes, gradient, add):
        return collect(self, rounds, sizes, gradient, lambda *_: None)

    def first_clone_alone(parts):
        return parts[0]

    missed = missed_of(
        groups,
        ep,
        off,
        ("another weight", Rails, "push", other_weight),
        ("doubled", Rails, "collect", twice),
        ("no gradients", Rails, "collect", nothing),
        ("a clone left out", balance_relay, "_in_order", first_clone_alone),
    )
    megatron_patches.revert()
    return missed


def killed_in_a_relay(ep, width, step):
    """The last rank dies before a step of its relays; the others wait for it."""
    groups, inner = initialize(ep), Rails.push
    apply(width, spare_slots=1, timeout_s=4.0)

    def push(self, *arguments, **named):
        for number, one in enumerate(inner(self, *arguments, **named)):
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            yield one

    if groups.ep.rank() == ep - 1:
        Rails.push = push
    wait_for_clones_of_the_last_rank(groups, ep)
    raise AssertionError("nobody noticed")
