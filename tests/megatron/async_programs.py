"""What the ranks of the asynchronous tests do: train over a buffer whose results come only when they are waited for."""

import math
import sys
from unittest import mock

import pytest
import rank_programs
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from rank_programs import assert_same, make_dispatcher, route, six_steps
from slow_programs import Job, difference, initialize

import hybrid_ep
import megatron_patches
from hybrid_ep.streams import EventOverlap
from megatron_patches.manager import HybridEPManager


class Late(EventOverlap):
    """An event before whose wait the results are NaN, as those of another stream may be anything."""

    waits = 0

    def __init__(self, results):
        super().__init__()
        self.results = [(late, late.detach().clone()) for late in results if late is not None]
        for late, _ in self.results:
            late.detach().fill_(float("nan"))

    def current_stream_wait(self):
        Late.waits += 1
        for late, real in self.results:
            late.data.copy_(real)  # as a kernel writes, unseen by autograd


class LateBuffer(hybrid_ep.HybridEPBuffer):
    """HybridEPBuffer on a CPU as one on another stream would look."""

    def dispatch_with_permute(self, *, async_finish=False, **keywords):
        out = super().dispatch_with_permute(**keywords)
        return (*out, Late(out[:2])) if async_finish else out

    def combine_with_unpermute(self, *, async_finish=False, **keywords):
        out = super().combine_with_unpermute(**keywords)
        return (*out, Late(out[:1])) if async_finish else out


def train(ep, asynchronous, keep=True, **options):
    """(losses, logical state) of two steps; keep: whether the state is wanted."""
    megatron_patches.apply(timeout_s=60.0, buffer_class=LateBuffer, async_finish=asynchronous)
    try:
        Late.waits = 0
        job = Job(ep, **options)
        return [job.train_step() for _ in range(2)], job.logical() if keep else None
    finally:
        megatron_patches.revert()


def late_results(ep):
    """Bit for bit the training that waits at once, with recompute too."""
    initialize(ep)
    moe = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    for options, waits in ({}, 2), ({"after": moe}, 3):
        at_once = train(ep, False, **options)
        assert Late.waits == 0
        late = train(ep, True, **options)
        assert Late.waits == waits * 2 * 2 * 2, (options, Late.waits)  # of layers, micro-batches and steps
        assert difference(at_once, late) is None, options
    return True


def read_at_once(ep):
    """Rows that are cut to their width, and the flag of a budget, are waited for where they are read."""
    groups, rank_programs.HIDDEN = rank_programs.initialize(ep), 30
    batch, results = route(16, dist.get_rank()), []
    for asynchronous in (False, True):
        megatron_patches.apply(timeout_s=60.0, buffer_class=LateBuffer, async_finish=asynchronous)
        ours = make_dispatcher("ours", groups, ep, after={"hidden_size": 30})
        results.append(six_steps(ours, *batch))
        ours._comm_manager.moe_expert_rank_capacity_factor = 0.5
        x, p = ours.dispatch_preprocess(*batch)
        rows, _ = ours.token_dispatch(x, p)
        assert ours._comm_manager.over_budget.item() and not rows.isnan().any()
        ours.token_combine(rows)
        ours._comm_manager.wait()
        megatron_patches.revert()
    assert_same(*results, ("out", "hidden_grad", "prob_grad", "rows", "row_probs"), tolerance=0)
    return True


def forgotten_waits(ep):
    """A place that does not wait is noticed: its results are used as they are."""
    initialize(ep)
    for name in ("dispatch_postprocess", "combine_postprocess"):
        with mock.patch.object(HybridEPManager, "wait", _wait_not_in(name, HybridEPManager.wait)):
            assert all(map(math.isnan, train(ep, True, keep=False)[0][0])), name
    groups = moe_utils.get_default_pg_collection()
    for wrong, dtype in ({"overlap_moe_expert_parallel_comm": True}, None), ({}, "mxfp8"):
        megatron_patches.apply(async_finish=True, dispatch_dtype=dtype)
        with pytest.raises(ValueError, match="--hybrid-ep-async-finish.* drop one of them"):
            make_dispatcher("ours", groups, ep, after=wrong)
        megatron_patches.revert()
    return True


def _wait_not_in(name, honest):
    """`wait`, but not from that step of the dispatcher."""

    def wait(self):
        frame, steps = sys._getframe(1), ("dispatch_postprocess", "combine_postprocess", "token_combine")
        while frame is not None and frame.f_code.co_name not in steps:
            frame = frame.f_back
        if frame is None or frame.f_code.co_name != name:
            honest(self)

    return wait
