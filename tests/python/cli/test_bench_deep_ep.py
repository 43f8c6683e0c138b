"""DeepEP's buffers as bench peers: called as their interfaces say; left out, with the reason, where they cannot run.

A module that records its calls stands in for DeepEP, which needs GPUs."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from bench_case import one_rank_case

from hybrid_ep import compat
from hybrid_ep.cli.bench import checks, deep_ep
from hybrid_ep.cli.bench.implementations import Setting


class Recorder:
    """A deep_ep that moves nothing on one rank and writes down how it was called."""

    def __init__(self, ways: str):
        self.calls, recorder = [], self

        def record(name, kwargs):
            recorder.calls.append((name, sorted(kwargs)))

        class Buffer:
            def __init__(self, *args, **kwargs):
                record("init", {**kwargs, **{str(i): a for i, a in enumerate(args)}})

            @staticmethod
            def set_num_sms(n):
                record("set_num_sms", {str(n): n})

            @staticmethod
            def get_dispatch_config(ranks):
                return types.SimpleNamespace(
                    get_nvl_buffer_size_hint=lambda row, n: row * n, get_rdma_buffer_size_hint=lambda row, n: 0
                )

            get_combine_config = get_dispatch_config

            def get_dispatch_layout(self, topk_idx, num_experts):
                record("layout", {})
                return ("rank", "node", "expert", "in rank", "event")

            def dispatch(self, x, **kwargs):
                record("dispatch", kwargs)
                return (x, None, None, *((None, "handle", None) if ways == "v1" else ("handle", None)))

            def combine(self, x, handle, **kwargs):
                record("combine", kwargs)
                assert handle == "handle"
                return x, None, None

            def destroy(self):
                record("destroy", {})

        self.module = types.ModuleType("deep_ep")
        setattr(self.module, {"v1": "Buffer", "v2": "ElasticBuffer"}[ways], Buffer)


@pytest.mark.parametrize("kind, ways", [(deep_ep.DeepEpV1, "v1"), (deep_ep.DeepEpV2, "v2")])
def test_deep_ep_is_called_as_its_interface_says(monkeypatch, kind, ways):
    recorder = Recorder(ways)
    monkeypatch.setitem(sys.modules, "deep_ep", recorder.module)
    assert kind.unavailable(Setting(8, 3, 2, 128, False, "bf16", "cuda")) is None
    peer = kind(one_rank_case())
    done = peer.dispatch()
    out = peer.combine(done, done.rows)
    assert torch.equal(out, peer.case.x) and done.weights is None
    peer.step()
    peer.close()
    names = [name for name, _ in recorder.calls]
    called = dict(recorder.calls[names.index("dispatch") :])
    if ways == "v1":
        assert names[:5] == ["set_num_sms", "init", "layout", "dispatch", "combine"]
        assert called["dispatch"] == ["config", "handle"]  # the backward's, the last one recorded
        assert recorder.calls[3][1] == sorted(
            [
                "num_tokens_per_rank",
                "num_tokens_per_rdma_rank",
                "is_token_in_rank",
                "num_tokens_per_expert",
                "topk_idx",
                "topk_weights",
                "config",
            ]
        )
        assert peer.buffer_bytes() == 64 * 2
    else:
        assert names[:3] == ["init", "dispatch", "combine"] and names[-1] == "destroy"
        assert recorder.calls[1][1] == sorted(
            ["topk_idx", "topk_weights", "num_experts", "num_max_tokens_per_rank", "num_sms"]
        )
    quantised = kind(one_rank_case(dtype="fp8", scales=torch.ones(3, 1)))
    rows, _, _, scales = quantised.dispatch()
    assert rows is quantised.case.x and scales is quantised.case.scales


def test_deep_ep_s_hybrid_buffer_is_driven_through_the_interface_that_ours_has(monkeypatch):
    made = {}

    class HybridEPBuffer:
        def __init__(self, **kwargs):
            made.update(kwargs)

    module = types.ModuleType("deep_ep")
    module.HybridEPBuffer = HybridEPBuffer
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    deep_ep.DeepEpHybrid(one_rank_case())
    assert made == {
        "group": None,
        "hidden_dim": 64,
        "max_num_of_tokens_per_rank": 3,
        "num_local_experts": 4,
        "use_fp8": False,
        "num_sms_dispatch_api": 20,
        "num_sms_combine_api": 20,
    }


@pytest.mark.parametrize(
    "kind, setting, words",
    [
        (deep_ep.DeepEpV1, {"permute": True}, "--no-permute"),
        (deep_ep.DeepEpV1, {"executor": "host"}, "--backend cuda"),
        (deep_ep.DeepEpV1, {"dtype": "mxfp8"}, "not mxfp8"),
        (deep_ep.DeepEpV1, {"dtype": "fp32"}, "no fp32 rows"),
        (deep_ep.DeepEpV1, {"num_ranks": 12}, "nodes of 8"),
        (deep_ep.DeepEpV2, {}, "has no ElasticBuffer"),
    ],
)
def test_when_deep_ep_cannot_take_part(monkeypatch, kind, setting, words):
    monkeypatch.setitem(sys.modules, "deep_ep", Recorder("v1").module)
    facts = {"num_ranks": 8, "max_tokens": 3, "topk": 2, "row_bytes": 128, "permute": False, "executor": "cuda"}
    assert words in kind.unavailable(Setting(**(facts | setting)))


def test_hybrid_ep_under_deep_ep_s_name_is_no_peer(monkeypatch):
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    compat.install_as_deep_ep(force=True)
    try:
        said = deep_ep.DeepEpHybrid.unavailable(Setting(8, 3, 2, 128, True, "bf16", "cuda"))
        assert "deep_ep is hybrid_ep under that name" in said
    finally:
        compat.uninstall()


def test_rows_in_another_order_are_right_and_other_rows_are_wrong(monkeypatch):
    x = torch.arange(12).view(3, 4).bfloat16()
    want = checks.Expected(
        rows=x, scales=None, expert_rows=x, weights=None, factors=torch.full((3,), 2.0), combined=2 * x
    )

    class Peer:
        ordered = False

        def __init__(self, rows):
            self.rows = rows

        def dispatch(self):
            return checks.Dispatched(self.rows, None, None)

        def combine(self, done, rows):
            return 2 * x  # its own inverse order

    assert checks.count_wrong(Peer(x[[2, 0, 1]]), want) == 0
    assert checks.count_wrong(Peer(x[[2, 0, 0]]), want) == 12
    assert checks.count_wrong(Peer(x[:2]), want) == 12
