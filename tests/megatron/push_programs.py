"""What the ranks do in tests of clones that the kernels push: the worlds of whole numbers of balance_programs."""

import contextlib
import io
import os
import signal
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from balance_programs import (
    Layers,
    batch,
    empty_plan,
    equal,
    like_ddp,
    missed_of,
    random_plan,
    train,
    wait_for_clones_of_the_last_rank,
)
from rank_programs import EXPERTS, initialize

import megatron_patches
from hybrid_ep.balance import MicrobatchPlan
from hybrid_ep.spares import SpareSlots
from megatron_patches import balance_arriving, balance_kernels, balance_push
from megatron_patches.balance import ExactManager


def apply(push, **options):
    megatron_patches.apply(balance="exact", balance_push=push, balance_epsilon=0.0, **options)


def bit_equality(ep, spare_slots, grouped):
    """Off, torch's push and the kernels': the same bits of everything, whatever the plan."""
    groups = initialize(ep)
    megatron_patches.apply(grouped_gemm=grouped)
    off, _ = train(groups, ep)
    apply("kernels", spare_slots=spare_slots, grouped_gemm=grouped)
    empty, copies = train(groups, ep, empty_plan)
    assert equal(empty, off) and copies == 0
    planned, copies = train(groups, ep)
    assert equal(planned, off) and copies > 0
    assert len(balance_kernels._slots) == 1 and not balance_push._slots, "layers share one set of slots, the kernels'"
    for seed, main_grad in ((1, True), (2, False)):
        forced, copies = train(groups, ep, lambda manager, seed=seed: random_plan(seed, manager), main_grad)
        assert copies > 0 and equal(forced, off), seed
    again, _ = train(groups, ep, lambda manager: random_plan(2, manager))
    assert equal(again, forced), "a replay of the same plans differs"
    apply("torch", spare_slots=spare_slots, grouped_gemm=grouped)
    by_torch, _ = train(groups, ep, lambda manager: random_plan(2, manager))
    assert equal(by_torch, forced) and balance_push._slots
    apply("kernels", spare_slots=spare_slots, grouped_gemm=grouped)
    recomputed, _ = train(groups, ep, recompute=True)
    assert equal(recomputed, off), "recomputation"
    megatron_patches.apply(balance="both", spare_slots=spare_slots, grouped_gemm=grouped, balance_push="kernels")
    owners = [np.random.default_rng(layer).permutation(EXPERTS) for layer in range(2)]
    both, _ = train(groups, ep, lambda manager: random_plan(5, manager), owners=owners)
    assert equal(both, off), "clones of experts that live elsewhere"
    megatron_patches.revert()
    return True


def hot_plan(manager):
    """All other ranks hold a clone of the last rank's last expert."""

    def plan(counts):
        counts = np.ascontiguousarray(counts, dtype=np.int64)
        slots = np.full((len(counts), manager.planner.options.spare_slots), -1, np.int32)
        slots[:-1, 0] = EXPERTS - 1
        tokens = np.where(slots >= 0, counts.sum(axis=0)[-1] // len(counts), 0)
        return MicrobatchPlan(slots, tokens, counts, manager.owners.rank_of, manager.planner.options)

    return plan


def rounding(ep):
    """Numbers that round: torch's path and the kernels' give the same bits in main_grad all the same."""
    groups, seen = initialize(ep), []
    for push in ("torch", "kernels"):
        apply(push, spare_slots=2, grouped_gemm=True)
        layers = Layers(groups, ep)
        like_ddp(layers.parameters(), [])
        for parameter in layers.parameters():
            parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter.main_grad.normal_(generator=torch.Generator().manual_seed(1))
        for dispatcher, _ in layers.pairs:
            dispatcher._comm_manager.plan_with = hot_plan(dispatcher._comm_manager)
        hidden, maps, probs = batch(3, groups.ep.rank())
        out = layers.forward((hidden * 0.3).requires_grad_(), maps, probs * 0.7)
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        seen.append([parameter.main_grad.clone() for parameter in layers.parameters()])
    assert equal(*seen)
    megatron_patches.revert()
    return True


def mutants(ep):
    """Broken pushes that the comparison must notice; returns those it missed."""
    groups = initialize(ep)
    megatron_patches.apply()
    off, _ = train(groups, ep)
    apply("kernels", spare_slots=2)
    collect, push = SpareSlots.start_collect, SpareSlots.push

    def twice(self, *arguments):
        collect(self, *arguments)
        self.wait_collect()
        collect(self, *arguments)

    def wrong_slot(self, plan, *rest):
        for stack in self.gradients:
            stack.copy_(stack.flip(0).clone())
        collect(self, plan, *rest)

    def nothing(self, plan, *rest):
        collect(self, torch.full_like(plan, -1), *rest)

    def wrong_expert(self, plan, weights, *rest):
        push(self, plan, weights[1:] + weights[:1], *rest)

    def said_to_be_there(self):
        self.clones.backward_bank.use.holder = self

    missed = missed_of(
        groups,
        ep,
        off,
        ("doubled", SpareSlots, "start_collect", twice),
        ("wrong slot", SpareSlots, "start_collect", wrong_slot),
        ("no gradients", SpareSlots, "start_collect", nothing),
        ("wrong expert", SpareSlots, "push", wrong_expert),
        ("not sent again", balance_arriving.Arriving, "_send_early", said_to_be_there),
    )
    megatron_patches.revert()
    return missed


@contextlib.contextmanager
def planned():
    """(manager, plan) of every dispatch on this rank."""
    seen, inner = [], ExactManager.dispatch

    def dispatch(self, *arguments):
        rows = inner(self, *arguments)
        seen.append((self, self.last_plan))
        return rows

    ExactManager.dispatch = dispatch
    try:
        yield seen
    finally:
        ExactManager.dispatch = inner


def crossing(seen, per_node):
    """Clones in these plans, and those of them on another node than their owner's."""
    ranks = np.concatenate([np.argwhere(plan.slot_expert >= 0)[:, 0] for _, plan in seen])
    owners = np.concatenate([plan.owner[plan.slot_expert[plan.slot_expert >= 0]] for _, plan in seen])
    return len(ranks), int((ranks // per_node != owners // per_node).sum())


def reaches(ep, grouped):
    """Two nodes: clones lie where they may, the bits are those of off, and rank 0 says once what auto comes to."""
    groups, said = initialize(ep), io.StringIO()
    common = {"ranks_per_node": ep // 2, "grouped_gemm": grouped}
    megatron_patches.apply(**common)
    off, _ = train(groups, ep)
    found, owners = [], [np.random.default_rng(layer).permutation(EXPERTS) for layer in range(2)]
    for reach, options in (
        ("auto", {}),
        ("node", {"balance_push": "torch"}),
        ("node", {"balance_push": "kernels"}),
        ("node", {"balance": "both"}),
        ("anywhere", {}),
        ("anywhere", {"balance_push": "torch"}),
        ("auto", {"static_rows": "grow"}),
    ):
        asked = {"balance": "exact", "balance_epsilon": 0.0, "spare_slots": 2, **common, **options}
        megatron_patches.apply(**asked, balance_clones=reach)
        with planned() as seen, contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ranks bring different numbers of tokens, which static rows warn of
            got, _ = train(groups, ep, owners=owners if options.get("balance") == "both" else None)
        assert equal(got, off), (reach, options)
        assert {manager.planner.options.within_node for manager, _ in seen} == {within(reach, options)}
        by_kernels = options.get("balance_push") != "torch"
        assert (bool(balance_kernels._slots), bool(balance_push._slots)) == (by_kernels, not by_kernels), (
            reach,
            options,
        )
        if by_kernels:
            forced, copies = train(groups, ep, lambda manager: random_plan(3, manager))
            assert copies > 0 and equal(forced, off), "forced plans"
        found.append((reach, options, *crossing(seen, ep // 2)))
        megatron_patches.revert()
    for reach, options, clones, far in found:
        assert clones > 0 and (far == 0) == within(reach, options), found
    lines = [line for line in said.getvalue().splitlines() if line.startswith("hybrid_ep: clones ")]
    assert len(lines) == (2 if groups.ep.rank() == 0 else 0), lines
    return True


def within(reach, options):
    return reach == "node" or (reach == "auto" and "static_rows" not in options)


def choices(ep):
    """Who pushes, and what is said of it."""
    groups = initialize(ep)
    apply("auto")
    assert isinstance(Layers(groups, ep).pairs[0][0]._comm_manager.clones, balance_kernels.KernelCloneExperts)
    assert any("SpareSlots" in line for line in balance_kernels.describe())
    for push, reach, stay in (("kernels", "anywhere", False), ("auto", "anywhere", False), ("auto", "node", True)):
        apply(push, ranks_per_node=1, balance_clones=reach)
        clones = Layers(groups, ep).pairs[0][0]._comm_manager.clones
        assert isinstance(clones, balance_kernels.KernelCloneExperts)
        assert (clones.spares.memory_report().regions["spare_channel_rings"] == 0) == stay, reach
        assert not any("pushed by" in what for _, what in balance_kernels._said)
    with mock.patch.object(balance_kernels, "why_not", return_value="their matrices are odd"):
        apply("auto")
        assert type(Layers(groups, ep).pairs[0][0]._comm_manager.clones) is balance_push.CloneExperts
        odd = "weights of clones are pushed by torch.distributed, not by kernels: their matrices are odd"
        assert odd in {what for _, what in balance_kernels._said}
        apply("kernels")
        with pytest.raises(ValueError, match="--hybrid-ep-balance-push kernels: their matrices are odd; give torch"):
            Layers(groups, ep)
    megatron_patches.revert()
    assert not balance_kernels._slots
    return True


def killed_in_a_push(ep):
    """The last rank dispatches its tokens, then dies before its weights are out; the others wait for them."""
    groups = initialize(ep)
    apply("kernels", spare_slots=1, timeout_s=4.0)
    if groups.ep.rank() == ep - 1:
        SpareSlots.push = lambda self, *_: os.kill(os.getpid(), signal.SIGKILL)
    wait_for_clones_of_the_last_rank(groups, ep)
    raise AssertionError("nobody noticed")
