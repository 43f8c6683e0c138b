"""`import deep_ep` can mean hybrid_ep, never by surprise."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import ModuleType

import pytest
import torch

import hybrid_ep
from hybrid_ep import compat
from hybrid_ep.compat import events
from hybrid_ep.runtime.handle_kinds import OVERFLOW_FLAG
from hybrid_ep.testing import VirtualWorld


@pytest.fixture(autouse=True)
def clean():
    before = sys.modules.pop("deep_ep", None)
    yield
    compat.uninstall()
    sys.modules.pop("deep_ep", None)
    if before is not None:
        sys.modules["deep_ep"] = before


def test_install_and_uninstall():
    module = compat.install_as_deep_ep()
    from deep_ep import HybridEPBuffer, HybridEpConfigInstance

    assert issubclass(HybridEPBuffer, hybrid_ep.HybridEPBuffer)
    assert HybridEpConfigInstance is hybrid_ep.HybridEpConfigInstance
    assert "hybrid_ep" in module.__version__
    assert compat.install_as_deep_ep() is module and compat.installed()
    compat.uninstall()
    compat.uninstall()
    assert "deep_ep" not in sys.modules and not compat.installed()
    with pytest.raises(ImportError):
        import deep_ep  # noqa: F401


@pytest.mark.parametrize("name", ["deep_ep._C", "deep_ep_cpp"])
def test_the_compiled_halves_are_served(name):
    compat.install_as_deep_ep()
    assert importlib.util.find_spec(name) is not None
    module = importlib.import_module(name)
    assert (module.Config, module.EventHandle, module.topk_idx_t) == (events.Config, events.EventHandle, torch.int64)
    compat.uninstall()
    assert name not in sys.modules


def test_a_real_deep_ep_is_respected():
    real = ModuleType("deep_ep")
    sys.modules["deep_ep"] = real
    with pytest.raises(RuntimeError, match="force=True"):
        compat.install_as_deep_ep()
    assert sys.modules["deep_ep"] is real
    assert compat.install_as_deep_ep(force=True) is not real
    compat.uninstall()
    assert sys.modules["deep_ep"] is real


@pytest.mark.parametrize(
    "executor, variable, virtual, asked",
    [
        (None, None, False, "cuda"),
        ("host", None, False, "host"),
        (None, "host", False, "host"),
        (None, None, True, "host"),
    ],
)
def test_a_caller_with_gloo_beside_gpus_gets_the_gpu(executor, variable, virtual, asked, monkeypatch):
    """deep_ep has no host, and vLLM gives it a group for CPUs."""
    from hybrid_ep.compat import hybrid
    from hybrid_ep.runtime.bootstrap import GroupView

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if variable is not None:
        monkeypatch.setenv("HYBRID_EP_EXECUTOR", variable)
    view = GroupView(0, 1, "gloo", None, None, 0)
    monkeypatch.setattr(GroupView, "virtual", virtual)
    assert hybrid.HybridEPBuffer._asked_executor(executor, view) == asked
    assert hybrid_ep.HybridEPBuffer._asked_executor(executor, view) == ("host" if asked == "cuda" else asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hybrid.HybridEPBuffer._asked_executor(executor, view) == "host"


def test_the_calls_of_a_deep_ep_caller():
    """The four call shapes of a training framework: keywords, routing map, the overflow flag at its place, a
    0-d tensor, dense probs."""
    compat.install_as_deep_ep()
    from deep_ep import HybridEPBuffer

    assert "fuse_permute_dispatch" in inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters
    world = VirtualWorld(1, 2)
    torch.manual_seed(0)
    hidden = [torch.randint(-4, 5, (6, 32)).bfloat16() for _ in range(2)]
    route = [torch.rand(6, 4) < 0.5 for _ in range(2)]
    probs = [torch.rand(6, 4).masked_fill(~r, 0) for r in route]

    def work(rank, group):
        buffer = HybridEPBuffer(
            group=group,
            hidden_dim=32,
            max_num_of_tokens_per_rank=6,
            num_local_experts=2,
            use_fp8=False,
            num_sms_dispatch_api=2,
            num_sms_combine_api=2,
            num_sms_preprocessing_api=108,
        )
        rows, weights, scale, tokens_per_expert, handle = buffer.dispatch_with_permute(
            hidden=hidden[rank],
            routing_map=route[rank],
            probs=probs[rank],
            scaling_factor=None,
            pad_multiple=16,
            num_of_experts_per_rank=2,
            num_permuted_tokens=None,
            non_blocking=False,
            fuse_permute_dispatch=True,
        )
        assert tokens_per_expert.to(torch.int64).sum() == rows.shape[0]
        assert scale is None and not (handle[OVERFLOW_FLAG] != 0)
        out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=16, fuse_unpermute_combine=True)
        assert torch.equal(out.float(), hidden[rank].float() * route[rank].sum(1, keepdim=True))
        grad = buffer.dispatch_with_permute(
            hidden=out, scaling_factor=None, handle=handle, pad_multiple=16, num_permuted_tokens=tokens_per_expert.sum()
        )[0]
        assert grad.shape == rows.shape
        _, grad_probs = buffer.combine_with_unpermute(hidden=grad, probs=weights, handle=handle, pad_multiple=16)
        assert torch.equal(grad_probs, probs[rank])

    world.run(work)
