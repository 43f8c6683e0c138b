"""Arguments that nobody gives on purpose, and uses at the edge of what is supported: none crashes, loses a buffer, or
gives sums of something else."""

import numpy as np
import pytest
import torch

from hybrid_ep import functional
from hybrid_ep.testing import VirtualWorld

H = 64


def lone(**options):
    return VirtualWorld(1, 1).buffers(H, 8, 4, timeout_s=10, **options)[0]


def call(**changed):
    given = {"hidden": torch.ones(2, H), "topk_idx": torch.tensor([[0], [3]]), "num_of_experts": 4}
    return {**given, **changed}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pad_multiple": 2**30}, "pad_multiple=1073741824 must be an integer from 0 to 65536"),
        ({"pad_multiple": 2**70}, "pad_multiple"),
        ({"num_permuted_tokens": 2**70}, "num_permuted_tokens"),
        ({"num_of_experts": 2**31}, "num_of_experts=2147483648 must be an integer from 1 to"),
        ({"hidden": None, "num_of_tokens_per_rank": 4}, "hidden"),
    ],
)
def test_numbers_beyond_all_use_are_refused_by_name(changed, named):
    buffer = lone()
    with pytest.raises(ValueError, match=named):
        buffer.dispatch_with_permute(**call(**changed))
    assert len(buffer.dispatch_with_permute(**call())[0]) == 2, "the buffer stays usable"


@pytest.mark.parametrize(
    "given",
    [{"hidden_dim": 2**31 - 2}, {"hidden_dim": 2**31}, {"num_local_experts": 2**33}, {"capacity_factor": 10**400}],
)
def test_constructors_refuse_them_likewise(given):
    options = {"hidden_dim": H, "max_tokens": 8, "num_local_experts": 4, **given}
    with pytest.raises(ValueError, match=next(iter(given))):
        VirtualWorld(1, 1).buffers(**options)


@pytest.mark.parametrize("factor", [np.float32(2), np.int64(2), 2])
def test_any_positive_number_is_one(factor):
    assert len(lone(capacity_factor=factor).dispatch_with_permute(**call())[0]) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_of_tokens_per_rank": "a"},
        {"max_num_of_tokens_per_rank": -5},
        {"max_num_of_tokens_per_rank": 2**40},
        {"hidden_dim": 2**40},
        {"num_of_blocks_preprocessing_api": 0},
        {"num_of_blocks_preprocessing_api": "a"},
        {"num_of_experts_per_rank": 0},
        {"num_of_tokens_per_chunk_dispatch_api": 2**40},
    ],
)
def test_a_template_is_not_poisoned(given):
    buffer = lone()
    with pytest.raises(ValueError, match=next(iter(given))):
        buffer.update_template_config(**given)
    assert len(buffer.dispatch_with_permute(**call())[0]) == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float64])
def test_weights_alone_get_gradients_where_rows_are_of_no_type_that_a_combine_sums(dtype):
    buffer, idx = lone(), torch.tensor([[0, 2], [3, 1], [1, 0]])
    weights = torch.rand(3, 2, requires_grad=True)
    hidden = torch.ones(3, H).to(dtype)
    _, dense, *_ = functional.dispatch_with_permute(
        buffer, hidden, topk_idx=idx, topk_weights=weights, num_of_experts=4
    )
    scale = torch.arange(1.0, 1 + len(dense))
    (dense * scale).sum().backward()
    by_expert = [0, 2, 1, 2, 0, 1]  # rows are by expert, then by token: (token of row)
    order = sorted((int(idx[t, k]), t, k) for t in range(3) for k in range(2))
    assert [t for _, t, _ in order] == by_expert
    want = torch.zeros(3, 2)
    for row, (_, t, k) in enumerate(order):
        want[t, k] = scale[row]
    assert torch.equal(weights.grad, want)


def test_a_map_wider_than_the_latency_path_has_room_for_is_refused_on_hosts():
    buffer = VirtualWorld(1, 1).buffers(H, 8, 16, timeout_s=10, latency_tokens=8)[0]
    wide = torch.zeros(1, 16, dtype=torch.bool)
    wide[0, :12] = True
    given = {"hidden": torch.ones(1, H), "routing_map": wide, "num_permuted_tokens": 16, "non_blocking": True}
    with pytest.raises(ValueError, match="a token with 12 experts.*laid out for 8"):
        buffer.dispatch_with_permute(**given, path="latency")
    rows, *_ = buffer.dispatch_with_permute(hidden=given["hidden"], routing_map=wide)
    assert len(rows) == 12
    *_, handle = buffer.dispatch_with_permute(**given, path="latency")
    assert float(buffer.combine_with_unpermute(hidden=torch.ones(16, H), handle=handle)[0][0, 0]) == 12
