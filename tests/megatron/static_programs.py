"""What the ranks of the tests of static rows do: the layers of `balance_programs`, as many tokens on every rank."""

import contextlib
import traceback
import warnings
from pathlib import Path

import balance_programs
import pytest
import torch
from balance_programs import equal, integers, train
from rank_programs import EXPERTS, HIDDEN, TOPK, initialize, make_dispatcher, watched_lines

import megatron_patches
from hybrid_ep.errors import CapacityError
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG
from megatron_patches import balance, balance_kernels, static_rows
from megatron_patches.manager import HybridEPManager

TOKENS = 96
CONSTANT = TOKENS * TOPK + TOKENS * TOPK // 100 + -(TOKENS * TOPK + TOKENS * TOPK // 100) % static_rows.ROUNDING


def batch(step, rank):
    """Skewed routing of TOKENS tokens on every rank."""
    generator = torch.Generator().manual_seed(77 * step + rank)
    skew = torch.linspace(0.7, 0, EXPERTS)
    scores = torch.rand(balance_programs.LAYERS, TOKENS, EXPERTS, generator=generator) + skew
    maps = torch.zeros(scores.shape, dtype=torch.bool).scatter_(2, scores.topk(TOPK, 2).indices, True)
    probs = maps * integers(maps.shape, step + 5, 1, 2) / 2
    return integers((TOKENS, 1, HIDDEN), 31 * step + rank), maps, probs


@contextlib.contextmanager
def dispatches():
    """(manager, rows, overflow flag) of every dispatch on this rank; what combines get must have as many rows."""
    seen, inner, combine = [], HybridEPManager.dispatch, HybridEPManager.combine

    def dispatch(self, hidden_states):
        rows = inner(self, hidden_states)
        seen.append((self, rows, self.handle[OVERFLOW_FLAG].clone()))
        return rows

    def combined(self, hidden_states, *streams):
        assert len(hidden_states) == next(len(rows) for manager, rows, _ in reversed(seen) if manager is self)
        return combine(self, hidden_states, *streams)

    HybridEPManager.dispatch, HybridEPManager.combine = dispatch, combined
    try:
        yield seen
    finally:
        HybridEPManager.dispatch, HybridEPManager.combine = inner, combine


def quiet(*arguments, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(*arguments, **keywords)


def rows_stay(ep, grouped):
    """With plans every dispatch has the constant's rows, all of them go through the experts, and the bits are off's."""
    groups = initialize(ep)
    balance_programs.batch = batch
    common = {"ranks_per_node": ep // 2, "grouped_gemm": grouped}
    megatron_patches.apply(**common)
    off, _ = train(groups, ep)
    for policy in ("grow", "drop", "raise"):
        for recompute in (False, True) if policy == "grow" else (False,):
            megatron_patches.apply(**common, balance="exact", spare_slots=2, static_rows=policy)
            with dispatches() as seen, warnings.catch_warnings():
                warnings.filterwarnings("error", ".*static-rows.*")
                got, copies = train(groups, ep, recompute=recompute)
            assert copies > 0 and equal(got, off), (policy, recompute)
            assert {len(rows) for _, rows, _ in seen} == {CONSTANT} and not any(int(flag) for *_, flag in seen)
            for manager in {manager for manager, *_ in seen}:
                counts = manager.static
                batches = balance_programs.STEPS * balance_programs.MICROBATCHES
                assert (counts.micro_batches, counts.overflows, counts.rows_over) == (batches, 0, 0)
                assert int(manager.tokens_per_expert.sum()) == CONSTANT
    megatron_patches.revert()
    return True


def quantised(ep):
    """A dispatch of mxfp8 rows with plans has the bits of one without: a clone's rows are those of its expert."""
    groups = initialize(ep)

    def too_fine(step, rank):
        hidden, *routing = batch(step, rank)
        return 17 * hidden, *routing  # in four bits it is 16: whole numbers, and not those of bf16

    balance_programs.batch = too_fine
    common = {"ranks_per_node": ep // 2, "grouped_gemm": True, "dispatch_dtype": "mxfp8"}
    megatron_patches.apply(**common | {"dispatch_dtype": "bf16"})
    exact, _ = train(groups, ep)
    megatron_patches.apply(**common)
    off, _ = train(groups, ep)
    found = [equal(off, exact)]
    for static in (None, "grow", "drop"):
        megatron_patches.apply(**common, balance="exact", spare_slots=2, static_rows=static)
        got, copies = quiet(groups, ep)
        found.append(copies > 0 and equal(got, off))
    megatron_patches.revert()
    return found


@contextlib.contextmanager
def beside_the_host():
    """As on a GPU: whether anything is cloned is not asked, and what the host reads of a kernels' plan is noted."""
    read, inner = [], balance.KernelPlan.__getattr__

    def noted(self, name):
        asking = next(f for f in reversed(traceback.extract_stack()[:-1]) if not f.filename.endswith("microbatch.py"))
        if "tests" not in Path(asking.filename).parts:  # which look at plans themselves
            read.append(name)
        return inner(self, name)

    clones = balance_kernels.KernelCloneExperts
    asked, balance.KernelPlan.__getattr__, clones.may_clone = clones.may_clone, noted, lambda self, plan: True
    try:
        yield read
    finally:
        balance.KernelPlan.__getattr__, clones.may_clone = inner, asked


def host_reads(ep):
    """What the host read of plans with "drop", whose bits are those of off."""
    groups = initialize(ep)
    balance_programs.batch = batch
    common = {"ranks_per_node": ep, "grouped_gemm": True}
    megatron_patches.apply(**common)
    off, _ = train(groups, ep, main_grad=torch.float32)
    megatron_patches.apply(**common, balance="exact", spare_slots=2, static_rows="drop", balance_push="kernels")
    with beside_the_host() as read, dispatches() as seen:
        got, _ = quiet(groups, ep, main_grad=torch.float32)
    assert equal(got, off)
    assert {len(rows) for _, rows, _ in seen} == {CONSTANT}
    plan = seen[-1][0].last_plan
    assert plan.load_of_ranks().tolist() == plan.tokens_of_ranks().tolist()
    megatron_patches.revert()
    return sorted(set(read))


def overflows(ep, grouped):
    """Where nothing is cloned: grow keeps the bits of off, drop says how much it lost, raise ends every rank."""
    groups = initialize(ep)
    balance_programs.batch = batch
    common = {"ranks_per_node": ep // 2, "grouped_gemm": grouped}
    forced = balance_programs.empty_plan
    megatron_patches.apply(**common)
    off, _ = train(groups, ep)
    asked = {**common, "balance": "exact", "spare_slots": 1}
    for recompute in (False, True):
        megatron_patches.apply(**asked, static_rows="grow")
        with dispatches() as seen:
            got, _ = quiet(groups, ep, forced, recompute=recompute)
        assert equal(got, off), "grow loses or adds something"
        first = seen[0][0].static
        batches = balance_programs.STEPS * balance_programs.MICROBATCHES
        assert first.micro_batches == batches and 0 < first.overflows <= batches and first.rows_over > 0
    # Clones may overflow, too: any plan is served.
    random, _ = quiet(groups, ep, lambda manager: balance_programs.random_plan(3, manager))
    assert equal(random, off), "grow with clones"
    megatron_patches.apply(**asked, static_rows="drop")
    with dispatches() as seen:
        lossy, _ = quiet(groups, ep, forced)
    assert not equal(lossy, off) and all(torch.isfinite(x).all() for x in lossy)
    assert {len(rows) for _, rows, _ in seen} == {CONSTANT}
    # Flagged on the device where this rank dropped, counted for all ranks alike.
    first, rank = seen[0][0], groups.ep.rank()
    load = torch.stack([batch(0, r)[1][0].sum(0) for r in range(ep)]).sum(0).reshape(ep, -1).sum(1)
    mine = next(flag for manager, _, flag in seen if manager is first)
    assert bool(mine) == bool(load[rank] > CONSTANT) and (load > CONSTANT).any()
    megatron_patches.apply(**asked, static_rows="raise")
    with pytest.raises(CapacityError, match="spare-slots") as raised:
        quiet(groups, ep, forced)
    assert raised.value.rows == tuple(load.tolist()) and set(raised.value.capacity) == {CONSTANT}
    megatron_patches.revert()
    return first.static.rows_over


def kernels_overflow(ep):
    """Plans of the kernels where one spare slot cannot level: six of eight experts have all tokens, so that the fourth
    rank can take one of them and no more. Returns the rows over."""
    groups = initialize(ep)

    def six_hot(step, rank):
        hidden, maps, probs = batch(step, rank)
        scores = torch.rand(maps.shape, generator=torch.Generator().manual_seed(step + 99 * rank))
        scores[..., -2:] = -1
        maps = torch.zeros_like(maps).scatter_(2, scores.topk(TOPK, 2).indices, True)
        return hidden, maps, maps * integers(maps.shape, step + 5, 1, 2) / 2

    balance_programs.batch = six_hot
    common = {"ranks_per_node": ep, "grouped_gemm": True}
    megatron_patches.apply(**common)
    off, _ = train(groups, ep, main_grad=torch.float32)
    asked = {**common, "balance": "exact", "spare_slots": 1, "balance_push": "kernels"}
    for recompute in (False, True):
        megatron_patches.apply(**asked, static_rows="grow")
        with dispatches() as seen:
            got, copies = quiet(groups, ep, recompute=recompute, main_grad=torch.float32)
        assert copies > 0 and equal(got, off), recompute
    first = seen[0][0].static
    assert first.overflows > 0
    megatron_patches.apply(**asked, static_rows="drop")
    with dispatches() as seen:
        lossy, copies = quiet(groups, ep, main_grad=torch.float32)
    assert copies > 0 and not equal(lossy, off) and all(torch.isfinite(x).all() for x in lossy)
    assert {len(rows) for _, rows, _ in seen} == {CONSTANT}
    megatron_patches.apply(**asked, static_rows="raise")
    with pytest.raises(CapacityError, match="spare-slots"):
        quiet(groups, ep, main_grad=torch.float32)
    megatron_patches.revert()
    return first.rows_over


def by_lines(ep, ranks_per_node):
    """Static rows are what the latency path wants: plans with it have the bits of off without it."""
    groups = initialize(ep)
    balance_programs.batch = batch
    common = {"ranks_per_node": ranks_per_node, "grouped_gemm": True}
    megatron_patches.apply(**common)
    off, _ = train(groups, ep)
    called = []
    for policy, most in (("grow", TOKENS), ("drop", TOKENS), ("drop", TOKENS - 1)):
        megatron_patches.apply(**common, balance="exact", spare_slots=2, static_rows=policy, latency_tokens=most)
        with watched_lines() as lines:
            got, copies = quiet(groups, ep)
        assert copies > 0 and equal(got, off), (policy, most)
        called.append(lines.called)
    megatron_patches.revert()
    return called


def broken(ep):
    """A tail that no expert takes, or one too short, must be noticed: returns what was not."""
    groups = initialize(ep)
    balance_programs.batch = batch
    megatron_patches.apply(ranks_per_node=ep // 2)
    off, _ = train(groups, ep)
    missed = []

    def lost_tail(counts, num_rows, num_owners, has_clones):
        return counts

    def wrong_group(counts, num_rows, num_owners, has_clones):
        rest = torch.zeros_like(counts)
        rest[0] = 1
        return counts + rest * (num_rows - counts.sum())

    right = balance.filled
    for mutant in (lost_tail, wrong_group):
        balance.filled = mutant
        megatron_patches.apply(ranks_per_node=ep // 2, balance="exact", spare_slots=2, static_rows="grow")
        try:
            with dispatches():
                if equal(quiet(groups, ep)[0], off):
                    missed.append(mutant.__name__)
        except (RuntimeError, ValueError, AssertionError):
            pass
        balance.filled = right
    megatron_patches.revert()
    return missed


def refusals(ep):
    """Where rows cannot be static."""
    groups = initialize(ep)
    megatron_patches.apply(balance="exact", static_rows="grow")
    with pytest.raises(ValueError, match="variable-seq-lengths"):
        make_dispatcher("ours", groups, ep, after={"variable_seq_lengths": True}, gradient_accumulation_fusion=False)
    for bad in ({"static_rows": "grow"}, {"static_rows": "grow", "balance": "slow"}, {"static_rows": "lose"}):
        with pytest.raises(ValueError, match="static_rows"):
            megatron_patches.apply(**bad)
    megatron_patches.revert()
    return True
