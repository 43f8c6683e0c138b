"""Other projects' own code over deep_ep as hybrid_ep serves it. It runs where their package is installed, or where
HYBRID_EP_TEST_CALLERS names a folder with their checkouts (torchtitan, Automodel, deepspeed, xtuner); nothing is
fetched.

Only the one module that talks to deep_ep is loaded, once for each rank, for it keeps its buffer in a global. What is
changed while it is read: "cuda" and "CUDA" become "cpu" and "CPU" where an operator is registered for a device, and
the operators' namespace gets a number. docs/compatibility.md says what ran."""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from callers import check_layer, dense, experts_of_choices, experts_of_groups, layer_inputs
from torch.utils.checkpoint import checkpoint

import hybrid_ep
from hybrid_ep.testing import VirtualWorld

TOKENS, LOCAL, TOPK, HIDDEN = (6, 1, 3, 9), 2, 3, 16
EXPERTS = 4 * LOCAL
_COUNT = itertools.count()
FOLDER = os.environ.get("HYBRID_EP_TEST_CALLERS", "")


def source(checkout: str, package: str, path: str, marker: str) -> str:
    """The text of one module, from a checkout or from the installed package, neither of which is imported."""
    places = [Path(FOLDER) / checkout] if FOLDER else []
    spec = importlib.machinery.PathFinder.find_spec(package)  # which does not look at the stand-ins below
    places += [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if (file := place / package / path).is_file() and marker in (text := file.read_text()):
            return text
    pytest.skip(f"{package}/{path} with {marker!r} is neither installed nor below HYBRID_EP_TEST_CALLERS={FOLDER!r}")


@pytest.fixture(params=[2, 4], ids=["2x2", "1x4"])
def world(request, monkeypatch):
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", str(request.param))
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "60")
    # What their modules import of their own packages: a logger.
    silent = SimpleNamespace(info=lambda *_: None)
    for name, contents in (
        ("torchtitan.tools.logging", {"logger": silent}),
        ("xtuner.v1.utils", {"get_logger": lambda: silent}),
        ("deepspeed.utils", {"logger": silent}),
    ):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        sys.modules[name].__dict__.update(contents)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)  # Automodel 0.7 times its first call with it
    hybrid_ep.compat.install_as_deep_ep()
    yield VirtualWorld(4 // request.param, request.param)
    hybrid_ep.compat.uninstall()


def load(text: str, name: str, namespace: str) -> ModuleType:
    number = next(_COUNT)
    for a, b in (
        ('"cuda"', '"cpu"'),
        ('"CUDA"', '"CPU"'),
        (f'"{namespace}::', f'"{namespace}{number}::'),
        (f"torch.ops.{namespace}.", f"torch.ops.{namespace}{number}."),
        (f'Library("{namespace}"', f'Library("{namespace}{number}"'),
    ):
        text = text.replace(a, b)
    module = ModuleType(f"{name}_{number}")
    sys.modules[module.__name__] = module
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    return module


def run(world, modules, make_layer):
    def work(rank, group):
        layer = make_layer(modules[rank], rank, group)
        for step in range(2):
            check_layer(layer, *layer_inputs(10 * step + rank, TOKENS[rank - step], EXPERTS, TOPK, HIDDEN))

    world.run(work)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_automodel_deepep(world, asynchronous):
    text = source("Automodel", "nemo_automodel", "components/moe/megatron/fused_a2a.py", "def free_buffer")
    modules = [load(text, "automodel", "none") for _ in range(4)]

    def make_layer(module, rank, group):
        assert module.HAVE_DEEP_EP and module.HAVE_HYBRIDEP
        module.set_deepep_num_sms(8)

        def layer(x, idx, weights):
            rows, recv_idx, recv_weights, counts, handle = module.fused_dispatch(
                x, idx, weights, EXPERTS, group, async_finish=asynchronous, allocate_on_comm_stream=asynchronous
            )
            assert counts.tolist() == [int((recv_idx == e).sum()) for e in range(LOCAL)]
            rows = experts_of_choices(rows, recv_idx, recv_weights, rank * LOCAL)
            return module.fused_combine(
                rows, group, handle, async_finish=asynchronous, allocate_on_comm_stream=asynchronous
            )[0]

        return layer

    run(world, modules, make_layer)
    for module in modules:
        module.free_buffer()
        assert module._buffer is None


@pytest.mark.parametrize(("static", "compact"), [(None, False), (240, False), (None, True)])
def test_automodel_hybridep(world, static, compact):
    """compact: 0.7 can send topk_idx in place of the routing map, with dense probabilities beside it."""
    text = source("Automodel", "nemo_automodel", "components/moe/megatron/fused_a2a.py", "def hybrid_ep_dispatch")
    if compact and "topk_idx: torch.Tensor" not in text:
        pytest.skip("this Automodel has no compact routing")
    modules = [load(text, "automodel", "none") for _ in range(4)]

    def make_layer(module, rank, group):
        def layer(x, idx, weights):
            route, probs = dense(idx, weights, EXPERTS)
            sparse = {"topk_idx": idx, "num_experts": EXPERTS} if compact else {}
            rows, row_probs, _, counts, handle = module.hybrid_ep_dispatch(
                x, None if compact else route, probs, group, LOCAL, num_permuted_tokens=static, pad_multiple=8, **sparse
            )
            rows = experts_of_groups(rows * row_probs[:, None], counts, rank * LOCAL)
            return module.hybrid_ep_combine(rows, handle, num_permuted_tokens=len(rows), pad_multiple=8)

        return layer

    run(world, modules, make_layer)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_torchtitan_hybridep(world, capacity, monkeypatch):
    pytest.importorskip("torch._library.opaque_object", reason="this PyTorch has no opaque types in operators")
    text = source("torchtitan", "torchtitan", "distributed/deepep/hybridep.py", "def dispatch_tokens")
    modules = [load(text, "torchtitan", "hybridep") for _ in range(4)]
    monkeypatch.setattr(
        torch.distributed.distributed_c10d,
        "_resolve_process_group",
        lambda name: world.groups[int(threading.current_thread().name.removeprefix("rank"))],
    )

    def make_layer(module, rank, group):
        module.get_buffer(group, hidden_dim=HIDDEN, num_max_tokens_per_rank=max(TOKENS), num_local_experts=LOCAL)

        def layer(x, idx, weights):
            rows, counts, state = module.dispatch_tokens(
                x, idx, weights, LOCAL, EXPERTS, group, non_blocking_expert_capacity_factor=capacity, pad_multiple=4
            )
            return module.combine_tokens(experts_of_groups(rows, counts, rank * LOCAL), state, pad_multiple=4)

        return layer

    if capacity is None:
        run(world, modules, make_layer)
        return

    def work(rank, group):  # its static number of rows is of this rank's tokens, and enough where all have as many
        layer = make_layer(modules[rank], rank, group)
        check_layer(layer, *layer_inputs(rank, 6, EXPERTS, TOPK, HIDDEN))

    world.run(work)


@pytest.mark.parametrize("static", [False, True])
def test_torchtitan_elastic(world, static, monkeypatch):
    """DeepEP V2's buffer: compact with gradients, or expanded without a wait and without them."""
    text = source("torchtitan", "torchtitan", "distributed/deepep/deepep.py", "from deep_ep import ElasticBuffer")
    modules = [load(text, "torchtitan", "deepep") for _ in range(4)]

    def make_layer(module, rank, group):
        module.get_buffer(group, hidden=HIDDEN, num_max_tokens_per_rank=max(TOKENS), num_topk=TOPK)

        def layer(x, idx, weights):
            rows, counts, state = module.dispatch_tokens(
                x, idx, weights, LOCAL, EXPERTS, num_tokens_per_rank=max(TOKENS), cudagraphable=static
            )
            out = module.combine_tokens(experts_of_groups(rows, counts, rank * LOCAL), state)
            module.sync_combine()
            return out

        return layer

    if not static:
        run(world, modules, make_layer)
        return

    def work(rank, group):
        layer = make_layer(modules[rank], rank, group)
        for step in range(2):
            x, idx, weights = layer_inputs(10 * step + rank, TOKENS[rank - step], EXPERTS, TOPK, HIDDEN)
            with torch.no_grad():
                out = layer(x, idx, weights)
            assert torch.equal(out, x * (weights * (idx + 1)).sum(1, keepdim=True))

    world.run(work)


def test_torchtitan_deepep(world):
    text = source("torchtitan", "torchtitan", "distributed/deepep/deepep.py", "from deep_ep import Buffer")
    modules = [load(text, "torchtitan", "deepep") for _ in range(4)]

    def make_layer(module, rank, group):
        def layer(x, idx, weights):
            rows, counts, state = module.dispatch_tokens(x, idx, weights, LOCAL, EXPERTS, group)
            out = module.combine_tokens(experts_of_groups(rows, counts, rank * LOCAL), state)
            module.sync_combine()
            return out

        return layer

    run(world, modules, make_layer)


@pytest.mark.parametrize("recompute", [None, False, True], ids=["kept", "non-reentrant", "reentrant"])
def test_deepspeed_elastic(world, recompute):
    """AutoEP over DeepEP V2's buffer: expanded rows, weights that have gradients, and, under activation checkpointing,
    a dispatch that repeats the forward's by its handle."""
    text = source("deepspeed", "deepspeed", "module_inject/auto_ep_comm.py", "class DeepEPCheckpointReplay")
    modules = [load(text, "deepspeed", "none") for _ in range(4)]

    def make_layer(module, rank, group):
        exchange = module.shared_exchange(0, group, EXPERTS, TOPK, HIDDEN, max(TOKENS))
        assert module.shared_exchange(0, group, EXPERTS, TOPK, HIDDEN, max(TOKENS)) is exchange
        replay = module.DeepEPCheckpointReplay()

        def once(x, idx, weights):
            rows, weights, exchange_used = module.deepep_dispatch(exchange, x, idx, weights, replay=replay)
            handle = exchange_used.last_handle
            assert len(rows) == len(weights) == handle.num_expanded_tokens
            ends = handle.psum_num_recv_tokens_per_expert
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            return module.deepep_combine(
                exchange, experts_of_groups(rows * weights.reshape(-1, 1), counts, rank * LOCAL), handle
            )

        def layer(x, idx, weights):
            return (
                once(x, idx, weights)
                if recompute is None
                else checkpoint(once, x, idx, weights, use_reentrant=recompute)
            )

        layer.exchange = exchange
        return layer

    layers = []

    def remembered(*given):
        layers.append(make_layer(*given))
        return layers[-1]

    run(world, modules, remembered)
    for layer in layers:
        layer.exchange.release()
        layer.exchange.release()
        assert layer.exchange.destroyed


def test_xtuner_deepep(world):
    text = source("xtuner", "xtuner", "v1/ops/comm/deepep_op.py", "class DeepEPDispatch")
    modules = [load(text, "xtuner", "none") for _ in range(4)]

    def make_layer(module, rank, group):
        def layer(x, idx, weights):
            rows, recv_idx, recv_weights, counts, handle, event = module.DeepEPDispatch.apply(
                x, idx, weights, EXPERTS, group, module.buffer_capture()
            )
            event.current_stream_wait()
            assert counts == [int((recv_idx == e).sum()) for e in range(LOCAL)]
            rows = experts_of_choices(rows, recv_idx, recv_weights, rank * LOCAL)
            out, event = module.DeepEPCombine.apply(rows, EXPERTS, handle, group, module.buffer_capture())
            event.current_stream_wait()
            return out

        return layer

    run(world, modules, make_layer)
