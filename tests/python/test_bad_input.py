"""Bad arguments: a ValueError that names the argument, its value and what to do; the buffer works
afterwards."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep import HybridEPBuffer
from hybrid_ep.testing import VirtualWorld

T, H, E, K = 4, 16, 4, 2
X = torch.ones(T, H, dtype=torch.bfloat16)
IDX = torch.tensor([[0, 1], [2, 3], [1, -1], [3, 0]])
W = torch.ones(T, K)
MAP = torch.ones(T, E, dtype=torch.bool)
P = torch.ones(T, E)


@pytest.fixture(scope="module")
def buffer():
    world = VirtualWorld(1, 1)
    with world.buffers(H, 8, E, timeout_s=20)[0] as b:
        yield b


def permute(b, **changes):
    return b.dispatch_with_permute(**{"hidden": X, "topk_idx": IDX, "topk_weights": W, "pad_multiple": 4, **changes})


def by_map(b, **changes):
    return permute(b, **{"topk_idx": None, "topk_weights": None, "routing_map": MAP, "probs": P, **changes})


def unpermute(b, **changes):
    rows, weights, _, _, handle = permute(b)
    return b.combine_with_unpermute(**{"hidden": rows, "probs": weights, "handle": handle, **changes})


def combine(b, **changes):
    rows, weights, _, handle = b.dispatch(X, topk_idx=IDX, topk_weights=W)
    return b.combine(**{"hidden": rows, "probs": weights, "handle": handle, **changes})


def cached(b, **changes):
    return permute(b, topk_idx=None, topk_weights=None, **{"handle": permute(b)[-1], **changes})


BAD_CALLS = {
    "hidden is no tensor": (permute, {"hidden": [[1.0]]}, ["hidden", "list", "tensor"]),
    "hidden has one dimension": (permute, {"hidden": X[0]}, ["hidden", "(16,)", "2 dimensions"]),
    "hidden of an unknown dtype": (permute, {"hidden": X.to(torch.complex64)}, ["hidden", "complex64", "supported"]),
    "hidden not in 16 bytes": (permute, {"hidden": X[:, :12]}, ["hidden", "12", "multiple of 8"]),
    "hidden without columns": (permute, {"hidden": X[:, :0]}, ["hidden", "0", "16"]),
    "hidden on another device": (permute, {"hidden": X.to("meta")}, ["hidden", "meta", "CPU"]),
    "hidden is sparse": (permute, {"hidden": X.to_sparse()}, ["hidden", "layout", "dense"]),
    "topk_idx of floats": (permute, {"topk_idx": IDX.float()}, ["topk_idx", "float32", "int64"]),
    "topk_idx too short": (permute, {"topk_idx": IDX[:3], "topk_weights": W[:3]}, ["topk_idx", "3 rows", "one row"]),
    "topk_idx with one dimension": (permute, {"topk_idx": IDX[:, 0]}, ["topk_idx", "2 dimensions"]),
    "topk_idx without columns": (permute, {"topk_idx": IDX[:, :0]}, ["topk_idx", "(4, 0)", "at least one"]),
    "topk_idx too large": (permute, {"topk_idx": IDX + 1}, ["topk_idx", "holds 4", "0..3"]),
    "topk_idx below -1": (permute, {"topk_idx": IDX - 1}, ["topk_idx", "holds -2", "-1 drops"]),
    "topk_idx is no tensor": (permute, {"topk_idx": IDX.tolist()}, ["topk_idx", "list", "give a tensor"]),
    "topk_weights of the wrong shape": (permute, {"topk_weights": W[:, :1]}, ["topk_weights", "(4, 1)", "(4, 2)"]),
    "topk_weights of the wrong dtype": (permute, {"topk_weights": W.half()}, ["topk_weights", "float16", ".float()"]),
    "topk_weights without topk_idx": (by_map, {"topk_weights": W}, ["topk_weights", "topk_idx", "probs"]),
    "no routing": (permute, {"topk_idx": None, "topk_weights": None}, ["topk_idx", "routing_map", "handle", "None"]),
    "routing_map of integers": (by_map, {"routing_map": MAP.int()}, ["routing_map", "int32", "bool"]),
    "routing_map too long": (by_map, {"routing_map": MAP.repeat(2, 1)}, ["routing_map", "8 rows", "one row"]),
    "routing_map and number of experts": (by_map, {"num_of_experts": 8}, ["routing_map", "4 columns", "8"]),
    "probs of the wrong shape": (by_map, {"probs": P[:, :2]}, ["probs", "(4, 2)", "(4, 4)"]),
    "probs of the wrong dtype": (by_map, {"probs": P.double()}, ["probs", "float64", "float32"]),
    "num_of_experts of zero": (permute, {"num_of_experts": 0}, ["num_of_experts", "0", "from 1"]),
    "num_of_experts twice": (
        permute,
        {"num_of_experts": 8, "num_of_experts_per_rank": 4},
        ["num_of_experts=8", "num_of_experts_per_rank=4", "only one"],
    ),
    "num_of_experts_per_rank of text": (permute, {"num_of_experts_per_rank": "4"}, ["num_of_experts_per_rank", "'4'"]),
    "scaling_factor too short": (
        permute,
        {"scaling_factor": torch.ones(3, 1)},
        ["scaling_factor", "3 rows", "one row"],
    ),
    "scaling_factor with one dimension": (
        permute,
        {"scaling_factor": torch.ones(T)},
        ["scaling_factor", "2 dimensions"],
    ),
    "scaling_factor of booleans": (permute, {"scaling_factor": MAP}, ["scaling_factor", "bool", "float32"]),
    "use_fp8 with two-byte elements": (permute, {"use_fp8": True}, ["use_fp8=True", "bfloat16", "1-byte"]),
    "pad_multiple below zero": (permute, {"pad_multiple": -4}, ["pad_multiple=-4", "from 0"]),
    "pad_multiple is a fraction": (permute, {"pad_multiple": 1.5}, ["pad_multiple=1.5", "integer"]),
    "num_permuted_tokens below zero": (permute, {"num_permuted_tokens": -1}, ["num_permuted_tokens=-1", "from 0"]),
    "num_permuted_tokens is a fraction": (permute, {"num_permuted_tokens": torch.tensor(2.5)}, ["num_permuted_tokens"]),
    "num_permuted_tokens too small": (permute, {"num_permuted_tokens": 8}, ["num_permuted_tokens=8", "non_blocking"]),
    "non_blocking without a budget": (permute, {"non_blocking": True}, ["num_permuted_tokens=None", "static number"]),
    "non_blocking with an odd budget": (
        permute,
        {"non_blocking": True, "num_permuted_tokens": 6},
        ["num_permuted_tokens=6", "pad_multiple=4"],
    ),
    "non_blocking is no flag": (permute, {"non_blocking": 1}, ["non_blocking=1", "True or False"]),
    "handle is no tuple": (cached, {"handle": 7}, ["handle", "int 7", "dispatch_with_permute()"]),
    "handle of the other verb": (
        lambda b, **c: cached(b, handle=b.dispatch(X, topk_idx=IDX)[-1]),
        {},
        ["handle", "7 elements", "11-tuple"],
    ),
    "handle without a plan": (cached, {"handle": (None,) * 11}, ["handle", "no plan"]),
    "handle with another number of tokens": (cached, {"hidden": X[:2]}, ["hidden", "2 rows", "4 tokens"]),
    "handle with too small a result": (cached, {"num_permuted_tokens": 8}, ["num_permuted_tokens=8", "16 rows"]),
    "handle with other experts": (cached, {"probs": P[:, :2]}, ["probs", "(4, 2)", "(4, 4)"]),
    "combine of bytes": (unpermute, {"hidden": torch.ones(16, H, dtype=torch.uint8)}, ["hidden", "uint8", "bfloat16"]),
    "combine of too few rows": (unpermute, {"hidden": X}, ["hidden", "4 rows", "16"]),
    "combine without a handle": (unpermute, {"handle": None}, ["handle", "None", "dispatch_with_permute()"]),
    "combine of dense rows, too many": (combine, {"hidden": torch.ones(9, H)}, ["hidden", "9 rows", "returned 4"]),
    "combine with the wrong probs": (combine, {"probs": W}, ["probs", "(4, 2)", "(4, 4)"]),
    "combine with the wrong probs dtype": (unpermute, {"probs": torch.ones(16).bfloat16()}, ["probs", "bfloat16"]),
    "combine with short probs": (unpermute, {"probs": torch.ones(3)}, ["probs", "(3,)", "(16,)"]),
    "weighted with probs": (unpermute, {"weighted": True}, ["weighted=True", "probs"]),
    "fp32_partials is no flag": (unpermute, {"fp32_partials": "yes"}, ["fp32_partials='yes'", "True or False"]),
    "an unknown template field": (lambda b, **c: b.update_template_config(speed=9), {}, ["speed=9", "known"]),
    "a template with an odd hidden": (lambda b, **c: b.update_template_config(hidden_dim=13), {}, ["hidden_dim=13"]),
    "a template without blocks of permute": (
        lambda b, **c: b.update_template_config(num_of_blocks_permute=0),
        {},
        ["num_of_blocks_permute=0"],
    ),
    "a template without blocks": (
        lambda b, **c: b.update_template_config(num_of_blocks_dispatch_api=0),
        {},
        ["num_of_blocks_dispatch_api=0"],
    ),
}
BAD_CONSTRUCTORS = {
    "group": ({"group": None}, ["group=None", "init_process_group"]),
    "hidden_dim": ({"hidden_dim": 13}, ["hidden_dim=13", "must be even"]),
    "hidden_dim type": ({"hidden_dim": 16.0}, ["hidden_dim=16.0", "integer"]),
    "max_num_of_tokens_per_rank": ({"max_num_of_tokens_per_rank": -1}, ["max_num_of_tokens_per_rank=-1"]),
    "num_local_experts": ({"num_local_experts": 0}, ["num_local_experts=0", "from 1"]),
    "use_fp8": ({"use_fp8": "no"}, ["use_fp8='no'"]),
    "num_sms_dispatch_api": ({"num_sms_dispatch_api": 0}, ["num_sms_dispatch_api=0", "blocks"]),
    "num_sms_combine_api": ({"num_sms_combine_api": True}, ["num_sms_combine_api=True"]),
    "num_blocks_permute": ({"num_blocks_permute": 0}, ["num_blocks_permute=0", "blocks"]),
    "num_blocks_unpermute": ({"num_blocks_unpermute": "all"}, ["num_blocks_unpermute='all'"]),
    "num_sms_preprocessing_api": ({"num_sms_preprocessing_api": -1}, ["num_sms_preprocessing_api=-1"]),
    "ranks per node type": (
        {"num_of_hybrid_ep_ranks_per_nvlink_domain": "all"},
        ["num_of_hybrid_ep_ranks_per_nvlink_domain='all'", "HYBRID_EP_RANKS_PER_NODE"],
    ),
    "capacity_factor": ({"capacity_factor": 0}, ["capacity_factor=0", "positive"]),
    "overflow": ({"overflow": "ignore"}, ["overflow='ignore'", "raise", "drop"]),
    "timeout_s": ({"timeout_s": -5}, ["timeout_s=-5", "positive"]),
    "executor": ({"executor": "gpu"}, ["executor='gpu'", "host", "on a machine with a GPU also 'cuda'"]),
}


@pytest.mark.parametrize("what", sorted(BAD_CALLS))
def test_bad_calls(buffer, what):
    call, changes, words = BAD_CALLS[what]
    with pytest.raises(ValueError) as error:
        call(buffer, **changes)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"
    out, _ = unpermute(buffer, probs=None)
    assert out[:, 0].tolist() == [2, 2, 1, 2]


class FewBlocks:
    """An engine as a GPU's is: a launch may not have more blocks than there are SMs."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def require_blocks(self, name, blocks):
        if blocks > 3:
            raise ValueError(f"{name}: is {blocks}; 3 is the most")
        self._engine.require_blocks(name, blocks)


@pytest.mark.parametrize("runs_beside", [False, True])
@pytest.mark.parametrize("num_sms", [0, 4, 1 << 40])
def test_blocks_are_refused_before_the_ranks_exchange_anything(num_sms, runs_beside):
    world = VirtualWorld(1, 2)
    buffers = world.buffers(H, 8, E // 2, timeout_s=20)

    def work(rank, _):
        buffer, session = buffers[rank], buffers[rank]._session
        session.runs_beside = runs_beside
        permute(buffer)  # makes room
        session.engine = FewBlocks(session.engine)
        rows, weights, _, _, handle = permute(buffer)
        dense, _, _, dense_handle = buffer.dispatch(X, topk_idx=IDX)
        before = session.num_launches()
        if rank == 0:  # alone: the other rank would wait for it, had it begun
            for call in (
                lambda: permute(buffer, num_sms=num_sms),
                lambda: permute(buffer, topk_idx=None, topk_weights=None, handle=handle, num_sms=num_sms),
                lambda: buffer.dispatch(X, topk_idx=IDX, num_sms=num_sms),
                lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle, num_sms=num_sms),
                lambda: buffer.combine(dense, handle=dense_handle, num_sms=num_sms),
            ):
                with pytest.raises(ValueError, match="num_sms"):
                    call()
            assert session.num_launches() == before
        out, _ = unpermute(buffer, probs=None)
        assert out[:, 0].tolist() == [2, 2, 1, 2]

    world.run(work)


@pytest.mark.parametrize("what", sorted(BAD_CONSTRUCTORS))
def test_bad_constructors(what):
    changes, words = BAD_CONSTRUCTORS[what]
    arguments = {
        "group": VirtualWorld(1, 1).groups[0],
        "hidden_dim": H,
        "max_num_of_tokens_per_rank": 8,
        "num_local_experts": E,
        "timeout_s": 20,
        **changes,
    }
    with pytest.raises(ValueError) as error:
        HybridEPBuffer(**arguments)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


@pytest.mark.parametrize(
    "name,value",
    [
        ("HYBRID_EP_TIMEOUT_S", "soon"),
        ("HYBRID_EP_TIMEOUT_S", "-1"),
        ("HYBRID_EP_RANKS_PER_NODE", "0"),
        ("HYBRID_EP_NUM_BLOCKS", "many"),
        ("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "x"),
        ("HYBRID_EP_EXECUTOR", "abacus"),
        ("HYBRID_EP_SEED", "1.5"),
    ],
)
def test_bad_environment(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=value):
        VirtualWorld(1, 1).run(lambda rank, group: HybridEPBuffer(group, H, 8, E))


def test_a_foreign_handle_is_refused():
    a, b = VirtualWorld(1, 1).buffers(H, 8, E, timeout_s=20)[0], VirtualWorld(1, 2)
    handle = a.dispatch(X, topk_idx=IDX)[-1]

    def work(rank, group):
        with HybridEPBuffer(group, H, 8, 2, timeout_s=20) as buffer:
            buffer.combine(X, handle=handle)

    for error in b.run(work, return_errors=True):
        assert type(error) is ValueError and "1 ranks" in str(error) and "2" in str(error)
