"""What the ranks of the dispatcher tests do about shapes: groups against nodes, rows of any width.

Runs inside `parity_world.run_world`; see rank_programs.py."""

import os
import warnings

import pytest
import rank_programs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rank_programs import assert_same, dense, initialize, make_dispatcher, route, six_steps

import megatron_patches
from megatron_patches import buffers


def nodes(declared):
    """Groups inside a node, groups of several nodes: values are those of no dispatch, the buffer says how many."""
    for ranks_per_node, ep, want in ((8, 2, 1), (8, 4, 1), (2, 2, 1), (2, 4, 2), (3, 1, 1)):
        groups = initialize(ep)
        if declared == "flag":
            megatron_patches.apply(ranks_per_node=ranks_per_node)
        else:
            os.environ["HYBRID_EP_RANKS_PER_NODE"] = str(ranks_per_node)
            megatron_patches.apply()
        ours, batch = make_dispatcher("ours", groups, ep), route(9 + dist.get_rank(), dist.get_rank())
        assert_same(six_steps(ours, *batch), dense(*batch, 1), ("out", "hidden_grad", "prob_grad"))
        (buffer,) = buffers.live()
        assert (buffer.num_of_nodes, buffer.group_size) == (want, ep)
        megatron_patches.release_buffers()
        parallel_state.destroy_model_parallel()


def refused_dtype():
    """fp8 needs whole blocks of 128 values; HIDDEN has none."""
    groups = initialize(1)
    megatron_patches.apply(dispatch_dtype="fp8")
    with pytest.raises(ValueError) as raised:
        make_dispatcher("ours", groups, 1)
    return str(raised.value)


def width(hidden, dtype):
    """Rows of `hidden` values against no dispatch; returns how many warnings of the cost two layers gave."""
    rank_programs.HIDDEN, dtype = hidden, getattr(torch, dtype)
    groups = initialize(2)
    megatron_patches.apply()
    x, *routing = route(11 + dist.get_rank(), dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            options = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16, "after": {"hidden_size": hidden}}
            ours = make_dispatcher("ours", groups, 2, **options)
            got = six_steps(ours, x.to(dtype), *routing)
    assert got["out"].shape == x.shape and got["out"].is_contiguous() and got["rows"].shape[1] == hidden
    want = dense(x.to(dtype).float(), *routing, 1)
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    got = {name: got[name].float() for name in want}
    assert_same(got, want, want, tolerance=tolerance)
    return sum("multiple of 16 bytes" in str(w.message) for w in caught)
