"""Signatures of deep_ep, as facts, against what we serve under its name: names, order, defaults.

Read at deepseek-ai/DeepEP, branch hybrid-ep, commit 94a9f8f (2026-07-10), except what the table NEWER says, which is
pull request 744 (commit 15f4acf, 2026-09-07) as its author's branch has it (0aa8753 of abcdabcd987/DeepEP), and
pull request 746 (2026-09-09), which moved a field of the handle. Someone reads upstream anew, corrects these tables,
and this test says what has to follow."""

from __future__ import annotations

import inspect

import pytest
import torch
from callers import integers, routing

import hybrid_ep
from hybrid_ep import compat
from hybrid_ep.compat.buffer import Buffer
from hybrid_ep.compat.events import Config, EventHandle, EventOverlap
from hybrid_ep.compat.hybrid import HybridEPBuffer, indices_to_map
from hybrid_ep.runtime import validation
from hybrid_ep.testing import VirtualWorld

REQUIRED = inspect.Parameter.empty
_ROUTING = {"topk_idx": None, "topk_weights": None}
_EVENTS = {"previous_event": None, "async_finish": False, "allocate_on_comm_stream": False}

HYBRID = {
    "__init__": {
        "group": REQUIRED,
        "hidden_dim": REQUIRED,
        "max_num_of_tokens_per_rank": REQUIRED,
        "num_local_experts": REQUIRED,
        "use_fp8": False,
        "num_sms_dispatch_api": None,
        "num_sms_combine_api": None,
        "num_sms_preprocessing_api": None,
        "num_blocks_permute": None,
        "num_blocks_unpermute": None,
        "load_cached_kernels": False,
        "use_shared_buffer": True,
        "enable_custom_allgather": False,
        "num_of_hybrid_ep_ranks_per_nvlink_domain": None,
        "use_mnnvl": None,
    },
    "empty_jit_cache": {},
    "update_template_config": {
        "hidden_dim": None,
        "num_of_tokens_per_rank": None,
        "num_local_experts": None,
        "pad_multiple": None,
        "use_fp8": None,
        "fuse_permute_dispatch": False,
    },
    "dispatch": {
        "hidden": REQUIRED,
        "scaling_factor": None,
        **_ROUTING,
        "num_of_experts": None,
        "probs": None,
        "routing_map": None,
        "num_dispatched_tokens_tensor": None,
        "num_dispatched_tokens": None,
        "handle": None,
    },
    "combine": {"hidden": REQUIRED, "probs": None, "handle": None},
    "dispatch_with_permute": {
        "hidden": REQUIRED,
        **_ROUTING,
        "num_of_experts_per_rank": None,
        "num_of_experts": None,
        "use_fp8": None,
        "routing_map": None,
        "probs": None,
        "scaling_factor": None,
        "num_permuted_tokens": None,
        "pad_multiple": None,
        "handle": None,
        "non_blocking": False,
        "fuse_permute_dispatch": False,
        "num_dispatched_tokens": None,
        "use_host_meta": None,
    },
    "combine_with_unpermute": {
        "hidden": REQUIRED,
        "probs": None,
        "handle": None,
        "pad_multiple": None,
        "fuse_unpermute_combine": False,
        "num_dispatched_tokens": None,
    },
}
# Verb: (what is new, the parameter that it comes after).
NEWER = {
    "dispatch": ("num_of_tokens_per_rank", "handle"),
    "dispatch_with_permute": ("num_of_tokens_per_rank", "pad_multiple"),
}

BUFFER = {
    "__init__": {
        "group": REQUIRED,
        "num_nvl_bytes": 0,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 24,
        "allow_nvlink_for_normal_mode": True,
        "allow_nvlink_for_low_latency_mode": True,
        "allow_mnnvl": False,
        "use_fabric": False,
        "explicitly_destroy": False,
        "comm": None,
    },
    "get_dispatch_layout": {"topk_idx": REQUIRED, "num_experts": REQUIRED, **_EVENTS},
    "dispatch": {
        "x": REQUIRED,
        "handle": None,
        "num_tokens_per_rank": None,
        "num_tokens_per_rdma_rank": None,
        "is_token_in_rank": None,
        "num_tokens_per_expert": None,
        **_ROUTING,
        "expert_alignment": 1,
        "num_worst_tokens": 0,
        "config": None,
        **_EVENTS,
    },
    "combine": {"x": REQUIRED, "handle": REQUIRED, "topk_weights": None, "bias": None, "config": None, **_EVENTS},
    "get_low_latency_rdma_size_hint": {
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_ranks": REQUIRED,
        "num_experts": REQUIRED,
    },
    "get_dispatch_config": {"num_ranks": REQUIRED},
    "get_combine_config": {"num_ranks": REQUIRED},
    "set_num_sms": {"new_num_sms": REQUIRED},
    "capture": {},
    "destroy": {},
    "get_comm_stream": {},
    "is_sm90_compiled": {},
}
# What V2's Buffer (branch main, commit dd758ca, deep_ep/buffers/legacy.py) has that the branch's has not.
V2_ONLY = {
    "constructor": {"enable_shrink": False},
    "methods": ("low_latency_update_mask_buffer", "low_latency_query_mask_buffer", "low_latency_clean_mask_buffer"),
}
OTHERS = {
    EventOverlap.__init__: {"event": None, "extra_tensors": None},
    Config.__init__: {
        "num_sms": 20,
        "num_max_nvl_chunked_send_tokens": 6,
        "num_max_nvl_chunked_recv_tokens": 256,
        "num_max_rdma_chunked_send_tokens": 6,
        "num_max_rdma_chunked_recv_tokens": 256,
    },
    Config.get_nvl_buffer_size_hint: {"hidden_bytes": REQUIRED, "num_ranks": REQUIRED},
    indices_to_map: {
        "topk_idx": REQUIRED,
        "topk_weights": REQUIRED,
        "num_of_tokens": REQUIRED,
        "num_of_experts": REQUIRED,
    },
}
KEYWORDS_ONLY = ("dispatch_with_permute", "combine_with_unpermute")


def drift(function, theirs: dict) -> list[str]:
    """How a function of ours differs from theirs; a tail of further keyword-only parameters is no difference."""
    ours = [
        p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind is not p.VAR_KEYWORD
    ]
    found = [
        f"{p.name} is before {name}, want the order {list(theirs)}"
        for p, name in zip(ours, theirs, strict=False)
        if p.name != name
    ][:1]
    by_name = {p.name: p for p in ours}
    found += [f"{name} is missing" for name in theirs if name not in by_name]
    found += [
        f"{name}={by_name[name].default!r}, want {default!r}"
        for name, default in theirs.items()
        if name in by_name and by_name[name].default != default
    ]
    found += [
        f"{p.name} is ours but not keyword-only with a default"
        for p in ours
        if p.name not in theirs and (p.kind is not p.KEYWORD_ONLY or p.default is REQUIRED)
    ]
    return found


def newest(verb: str) -> dict:
    signature = dict(HYBRID[verb])
    if verb not in NEWER:
        return signature
    name, after = NEWER[verb]
    items = list(signature.items())
    place = [key for key, _ in items].index(after) + 1
    return dict([*items[:place], (name, None), *items[place:]])


@pytest.mark.parametrize("verb", HYBRID)
def test_hybrid_ep_buffer(verb):
    function = getattr(HybridEPBuffer, verb)
    assert drift(function, newest(verb)) == []
    if verb in KEYWORDS_ONLY:
        assert all(
            p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in list(inspect.signature(function).parameters.values())[1:]
        )
    if verb != "empty_jit_cache":
        assert function is getattr(hybrid_ep.HybridEPBuffer, verb)


@pytest.mark.parametrize("verb", BUFFER)
def test_buffer(verb):
    assert drift(getattr(Buffer, verb), BUFFER[verb]) == []


def test_v2s_buffer():
    parameters = inspect.signature(Buffer).parameters
    assert {name: parameters[name].default for name in V2_ONLY["constructor"]} == V2_ONLY["constructor"]
    assert [name for name in V2_ONLY["methods"] if not hasattr(Buffer, name)] == []


def test_the_rest():
    assert {f.__qualname__: drift(f, theirs) for f, theirs in OTHERS.items() if drift(f, theirs)} == {}
    assert EventHandle().current_stream_wait() is None


def test_drift_is_seen():
    def ours(self, hidden, handle=None, probs=None, extra=3, *, later=1): ...

    assert drift(ours, {"hidden": REQUIRED, "probs": 0, "handle": None, "gone": 1}) == [
        "handle is before probs, want the order ['hidden', 'probs', 'handle', 'gone']",
        "gone is missing",
        "probs=None, want 0",
        "extra is ours but not keyword-only with a default",
    ]


def test_handles_are_read_from_the_front():
    """Upstream's have 7 and 11 elements (94a9f8f), then 8 and 12: with the new one last (15f4acf), then before the
    overflow flag (#746). Ours: 7 and 11, the flag where readers of any of these look."""
    world = VirtualWorld(1, 2)
    buffers = world.buffers(16, 8, 2)
    idx, _ = routing(0, 5, 4, 2)

    def work(rank, _):
        *_, plain = buffers[rank].dispatch(integers(0, 5, 16), topk_idx=idx, num_of_experts=4)
        *_, handle = buffers[rank].dispatch_with_permute(
            hidden=integers(0, 5, 16), topk_idx=idx, num_of_experts=4, num_permuted_tokens=2, non_blocking=True
        )
        assert (len(plain), len(handle)) == (7, 11) and plain[5] == handle[8] == 5
        assert handle[10] is handle[-1] and handle[10].dtype == torch.int32 and handle[10].tolist() == [1]
        assert handle[9].is_valid() and handle[9].token_data_type.name == "UINT16"

    world.run(work)


def test_newer_arguments():
    """num_of_tokens_per_rank, dense probs beside topk_idx, and routing_map before topk_idx."""
    world = VirtualWorld(1, 2)
    buffers = world.buffers(16, 8, 2)
    idx, weights = routing(3, 6, 4, 2)
    route, probs = indices_to_map(idx, weights, 6, 4)
    x = integers(0, 6, 16)

    def work(rank, _):
        want = buffers[rank].dispatch_with_permute(hidden=x, topk_idx=idx, topk_weights=weights, num_of_experts=4)
        for routed in (
            {"topk_idx": idx, "probs": probs, "num_of_experts": 4},
            {"topk_idx": idx.flip(0), "routing_map": route, "probs": probs},
        ):
            got = buffers[rank].dispatch_with_permute(hidden=x, num_of_tokens_per_rank=6 + rank, **routed)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        for wrong, text in (
            ({"topk_idx": idx, "topk_weights": weights, "probs": probs}, "both given"),
            ({"topk_idx": idx, "num_of_tokens_per_rank": 5}, "num_of_tokens_per_rank=5"),
            ({"routing_map": route, "topk_weights": weights, "topk_idx": idx}, "probs"),
        ):
            with pytest.raises(ValueError, match=text):
                buffers[rank].dispatch_with_permute(hidden=x, num_of_experts=4, **wrong)

    world.run(work)


def test_what_newer_callers_ask_of_routing_by_indices():
    """Pull request 673 (936e059), Megatron-Core's pull requests 6614 and 6615, and DeepEP's test of dropped tokens: the
    field that says whether topk_idx is taken, and a combine that is told not to wait."""
    world = VirtualWorld(1, 2)
    assert hasattr(hybrid_ep.HybridEpConfigInstance(), "topk")
    idx, weights = routing(3, 6, 4, 2)
    x = integers(0, 6, 16)

    def work(rank, group):
        buffer = HybridEPBuffer(group, 16, 8, 2)
        assert buffer.update_template_config(topk=8).topk == 8
        rows, *_, handle = buffer.dispatch_with_permute(
            hidden=x, topk_idx=idx, topk_weights=weights, num_of_experts=4, num_permuted_tokens=64, non_blocking=True
        )
        got, want = (
            buffer.combine_with_unpermute(hidden=rows, handle=handle, **k)[0] for k in ({"non_blocking": True}, {})
        )
        assert torch.equal(got, want)
        with pytest.raises(ValueError, match="non_blocking=1 must be True or False"):
            buffer.combine_with_unpermute(hidden=rows, handle=handle, non_blocking=1)

    world.run(work)


def test_what_callers_ask_of_a_buffer():
    compat.install_as_deep_ep()
    try:
        from deep_ep import HybridEPBuffer as served
        from hybrid_ep_cpp import UINT8
    finally:
        compat.uninstall()
    world = VirtualWorld(1, 1)

    def work(rank, group):
        buffer = served(group, 16, 8, 2, load_cached_kernels=True, enable_custom_allgather=True)
        assert buffer.empty_jit_cache() is None and buffer.runtime.get_rdma_rank() == 0
        assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank >= 8
        config = buffer.configurer.get_default_config(fuse_permute_dispatch=True)
        config.token_data_type = UINT8
        buffer.configurer.adjust_template(config, True)
        assert config.is_valid(True) and config.use_fp8 and not buffer.config.use_fp8
        config.num_of_blocks_dispatch_api = 0
        assert not config.is_valid()
        assert buffer.update_template_config(use_fp8=True).token_data_type is UINT8

    world.run(work)
    with pytest.raises(ValueError, match="num_of_tokens_per_rank=-1"):
        validation.token_slots(-1, integers(0, 1, 16))


def test_maps_of_indices():
    route, probs = indices_to_map(torch.tensor([[0, 2], [-1, 1]]), torch.tensor([[0.5, 1.0], [3.0, 2.0]]), 2, 3)
    assert route.tolist() == [[True, False, True], [False, True, False]]
    assert probs.tolist() == [[0.5, 0, 1.0], [0, 2.0, 0]] and probs.dtype == torch.float32
    assert indices_to_map(torch.tensor([[-1]]), None, 1, 3)[1] is None
    with pytest.raises(ValueError, match="num_of_tokens=3"):
        indices_to_map(torch.tensor([[-1]]), None, 3, 3)
