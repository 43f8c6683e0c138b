"""Layers whose tokens have more experts than a buffer has room for by itself, in programs of ranks."""

import contextlib
from unittest import mock

import pytest
import rank_programs as programs
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils

import megatron_patches
from hybrid_ep.runtime import session
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG


def wrong_counts_end_the_run(manager, counts):
    """Counts that lie on a device are compared there, when the rows are: nobody else looks at them."""
    rows = int(counts[0])
    for given, right in ((counts, True), (counts - (torch.arange(len(counts)) == 3).long(), False)):
        on_device = torch.empty(len(counts), dtype=torch.int64, device="meta")
        assert torch.equal(manager._promised_rows(rows, on_device), counts)
        assert manager._promised == (on_device, rows)
        manager._promised = given, rows
        said = f"promises {rows} rows for each local expert"
        with contextlib.nullcontext() if right else pytest.raises(RuntimeError, match=said):
            manager.get_permuted_hidden_states_by_experts(torch.zeros(1))
        assert manager._promised is None


def wide_maps(ep, pad, latency_tokens=None, as_on_gpu=False):
    """Tokens with more experts than a buffer has room for by itself: padding to capacity gives experts tokens that did
    not choose them, and a budget of rows has as many as the router chooses. as_on_gpu: the host looks at no map."""
    names = mock.patch.multiple(programs, EXPERTS=64, TOPK=2 if pad else 10)
    names.start()
    opened = session.Session.__init__

    def beside(self, *args, **kwargs):
        opened(self, *args, **kwargs)
        self.runs_beside = True

    with mock.patch.object(session.Session, "__init__", beside) if as_on_gpu else contextlib.nullcontext():
        groups = programs.initialize(ep)
        megatron_patches.apply(latency_tokens=latency_tokens)
        options = {"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True} if pad else {}
        ours = programs.make_dispatcher("ours", groups, ep, **options)
        theirs = programs.make_dispatcher("alltoall", groups, ep, **options)
        hidden, routing_map, probs = programs.route(32, dist.get_rank(), 64)
        if pad:
            probs, routing_map = moe_utils.apply_router_token_dropping(
                probs, routing_map, router_topk=programs.TOPK, capacity_factor=4.0, pad_to_capacity=True
            )
        else:
            ours._comm_manager.moe_expert_rank_capacity_factor = 4.0
        assert int(routing_map.sum(1).max()) > 8, "no token of more experts than 8: the case shows nothing"
        for _ in range(2):  # the first makes the buffer
            with programs.watched_lines() as lines:
                x, p = ours.dispatch_preprocess(hidden, routing_map, probs)
                x, p = ours.token_dispatch(x, p)
                rows, counts, row_probs = ours.dispatch_postprocess(x, p)
                assert not int(ours._comm_manager.handle[OVERFLOW_FLAG])
                ours.token_combine(rows)
            assert lines.called == bool(latency_tokens)
        wanted = programs.six_steps(theirs, hidden, routing_map, probs)
        if pad and as_on_gpu:
            wrong_counts_end_the_run(ours._comm_manager, counts)
        kept = int(counts.sum())
        assert torch.equal(counts, wanted["counts"]) and kept == len(wanted["rows"])
        assert torch.equal(rows[:kept], wanted["rows"]) and torch.equal(row_probs[:kept], wanted["row_probs"])
    megatron_patches.revert()
    names.stop()
    return True
