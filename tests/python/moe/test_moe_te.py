"""The Transformer Engine backend against a module that mimics GroupedLinear's call: what is passed, what comes back.

Transformer Engine has no build for CPUs; the real one has not run. This shows that counts, weights and shapes go in as
its public signature takes them, that empty experts come out exact, and that tail rows never enter.
"""

from __future__ import annotations

import importlib.machinery
import json
import runpy
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from hybrid_ep.moe import backends
from hybrid_ep.moe.backends import Groups, LoopBackend, TransformerEngineBackend


class GroupedLinear(torch.nn.Module):
    """num_gemms weights weight0, weight1, ... [out, in]; forward(rows, m_splits: list[int])."""

    calls: list = []

    def __init__(self, num_gemms, in_features, out_features, *, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        assert not bias and device == "meta", "the module must hold no memory of its own"
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))

    def forward(self, inp, m_splits):
        assert isinstance(m_splits, list) and all(isinstance(m, int) for m in m_splits), "TE takes a list of ints"
        assert len(m_splits) == self.num_gemms and sum(m_splits) == inp.shape[0] and inp.is_contiguous()
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        assert all(w.device.type != "meta" and w.is_contiguous() for w in weights), "our weights must be in place"
        self.calls.append((tuple(m_splits), tuple(inp.shape)))
        return torch.cat([x @ w.t() for x, w in zip(inp.split(m_splits), weights, strict=True)])


@pytest.fixture
def fake(monkeypatch):
    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.GroupedLinear = GroupedLinear
    package = types.ModuleType("transformer_engine")
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None)
    package.pytorch = pytorch
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.setattr(backends, "_te_modules", threading.local())
    monkeypatch.setattr(GroupedLinear, "calls", [])


@pytest.mark.parametrize("counts", [(0, 5, 0, 3), (4, 0, 0, 0), (1, 2, 3, 4), (0, 0, 0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_weight_gradients_through_grouped_linear(fake, counts, dtype):
    torch.manual_seed(0)
    total = sum(counts)
    x, g = torch.randn(total + 3, 16).to(dtype), torch.randn(total + 3, 24).to(dtype)
    x[total:] = g[total:] = float("nan")
    w = torch.randn(4, 16, 24).to(dtype)
    groups = Groups(torch.tensor(counts).cumsum(0).int(), (4,))
    out, dw = TransformerEngineBackend.mm(x, [w], groups), TransformerEngineBackend.wgrad(x, g, groups)[0]
    assert GroupedLinear.calls == [(counts, (total, 16))] * 2, "tail rows must not enter"
    torch.testing.assert_close(out[:total], LoopBackend.mm(x, [w], groups)[:total])
    assert (out[total:] == 0).all() and out.dtype == dtype
    torch.testing.assert_close(dw, LoopBackend.wgrad(x, g, groups)[0])
    assert all((dw[e] == 0).all() for e, count in enumerate(counts) if not count)


def test_no_row_at_all_calls_nothing_and_modules_are_made_once(fake):
    none = Groups(torch.zeros(4, dtype=torch.int32), (4,))
    x, g, w = torch.randn(2, 16), torch.randn(2, 24), torch.randn(4, 16, 24)
    assert (TransformerEngineBackend.mm(x, [w], none) == 0).all()
    assert (TransformerEngineBackend.wgrad(x, g, none)[0] == 0).all() and not GroupedLinear.calls
    full = Groups(torch.tensor([1, 1, 1, 2], dtype=torch.int32), (4,))
    TransformerEngineBackend.mm(x, [w], full)
    TransformerEngineBackend.wgrad(x, g, full)
    assert len(backends._te_modules.modules) == 1


def test_refusals_say_why(fake):
    shape = (4, 16, 24)
    assert "needs a GPU" in TransformerEngineBackend.refusal(torch.device("cpu"), torch.bfloat16, shape)
    assert TransformerEngineBackend.refusal(torch.device("cuda"), torch.int8, shape).startswith("dtype torch.int8")


def test_the_bench_of_operators_runs_without_a_gpu(tmp_path, capsys):
    program = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "gpu_bench_moe.py"))
    assert program["main"](["--device", "cpu", "--smoke", "--json", str(tmp_path / "o.json")]) == 0
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    moved = {r["operator"]: r["bytes"] for r in rows}
    assert moved["weighted SwiGLU, forward"] == 6 * 128 * 32 + 4 * 128
    assert moved["grouped_mm in fp8 in loop, forward"] == 4 * 128 * 64 + 4 * 8 * 64 * 32 + 2 * 128 * 32
    assert capsys.readouterr().out.count("\n| ") == len(rows) + 1
