"""What the ranks of the dispatcher tests do: the six steps of a dispatcher around experts that are matrices.

Runs inside `parity_world.run_world`; every function returns plain numbers or raises AssertionError on its
rank. The expert e of tensor parallel rank r is the matrix W[e, r], so a row that meets the wrong expert
changes the sum.
"""

import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

import hybrid_ep
import megatron_patches
from hybrid_ep.payload import quantize
from hybrid_ep.runtime import latency as latency_path
from megatron_patches import buffers, settings

HIDDEN, EXPERTS, TOPK = 32, 8, 2


def initialize(ep, tp=1):
    """Model parallel groups of ep x tp ranks and their collection."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    )
    return moe_utils.get_default_pg_collection()


def make_config(kind, ep, tp=1, **options):
    """A TransformerConfig for one dispatcher; `after` sets attributes past Megatron's validation."""
    after = options.pop("after", {})
    if kind == "ours":
        options["moe_flex_dispatcher_backend"] = "hybridep"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_dtype="fp32",
        add_bias_linear=False,
        use_cpu_initialization=True,
        moe_token_dispatcher_type="flex" if kind == "ours" else kind,
        expert_model_parallel_size=ep,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_tensor_parallel_size=tp,
        **options,
    )
    for name, value in after.items():
        setattr(config, name, value)
    return config


def make_dispatcher(kind, groups, ep, tp=1, **options):
    """The dispatcher as MoELayer builds it: ours by the patched name in moe_layer, Megatron's by theirs."""
    local = EXPERTS // ep
    first = groups.ep.rank() * local
    cls = moe_layer.MoEFlexTokenDispatcher if kind == "ours" else token_dispatcher.MoEAlltoAllTokenDispatcher
    return cls(
        local, list(range(first, first + local)), config=make_config(kind, ep, tp, **options), pg_collection=groups
    )


def route(num_tokens, seed, allowed=EXPERTS):
    """Top-k of the first `allowed` experts: (hidden [T, 1, H], map bool [T, E], probs fp32 [T, E])."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 1, HIDDEN, generator=generator)
    scores = torch.rand(num_tokens, EXPERTS, generator=generator) + 0.1
    scores[:, allowed:] = 0
    chosen = scores.topk(min(TOPK, allowed), dim=1).indices
    routing_map = torch.zeros(num_tokens, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    return hidden, routing_map, scores * routing_map


def expert_weight(expert, tp_rank):
    """W[e, r] [H, H], the same on every rank."""
    generator = torch.Generator().manual_seed(10_000 + 100 * tp_rank + expert)
    return torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5


def run_experts(dispatcher, rows, counts, probs):
    """Each segment of rows through its expert, scaled by the probabilities, as a Megatron expert does it."""
    assert probs.dtype == torch.float32 and probs.shape == rows.shape[:1]
    assert counts.dtype == torch.int64 and counts.device.type == "cpu" and int(counts.sum()) == rows.shape[0]
    parts = torch.split(rows * probs.unsqueeze(1).to(rows.dtype), counts.tolist())
    weights = [expert_weight(e, dispatcher.tp_rank).to(rows.dtype) for e in dispatcher.local_expert_indices]
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def six_steps(dispatcher, hidden, routing_map, probs):
    """One forward and backward. Returns dict of output, gradients, and what the experts saw."""
    hidden, probs = hidden.clone().requires_grad_(), probs.clone().requires_grad_()
    x, p = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    x, p = dispatcher.token_dispatch(x, p)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(x, p)
    out = run_experts(dispatcher, rows, counts, row_probs)
    out = dispatcher.combine_preprocess(out)
    out = dispatcher.token_combine(out)
    out = dispatcher.combine_postprocess(out)
    (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
    return {
        "out": out.detach(),
        "hidden_grad": hidden.grad,
        "prob_grad": probs.grad,
        "counts": counts,
        "rows": rows.detach(),
        "row_probs": row_probs.detach(),
    }


def dense(hidden, routing_map, probs, tp):
    """The same without any dispatch: every token through its experts here. Tensor parallel shards add up."""
    hidden, probs = hidden.clone().requires_grad_(), probs.clone().requires_grad_()
    out = torch.zeros_like(hidden)
    for expert in range(EXPERTS):
        weight = sum(expert_weight(expert, tp_rank) for tp_rank in range(tp))
        scale = (probs[:, expert] * routing_map[:, expert]).view(-1, 1, 1)
        out = out + (hidden * scale) @ weight
    (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
    return {"out": out.detach(), "hidden_grad": hidden.grad, "prob_grad": probs.grad}


def assert_same(ours, theirs, names, case="", tolerance=2e-6):
    """Equal shapes and values to `tolerance` of the largest value."""
    for name in names:
        a, b = ours[name], theirs[name]
        assert a.shape == b.shape, f"{case} {name}: shape {tuple(a.shape)}, not {tuple(b.shape)}"
        scale = max(b.abs().max().item(), 1e-30) if b.numel() else 1.0
        error = (a - b).abs().max().item() / scale if b.numel() else 0.0
        assert error <= tolerance, f"{case} {name}: relative difference {error:.2e}"


def contract(ep, tp, ranks_per_node):
    """Ours against alltoall and no dispatch at all: even, uneven, missing tokens, one expert, two rounds."""
    groups = initialize(ep, tp)
    megatron_patches.apply(ranks_per_node=ranks_per_node)
    ours, theirs = make_dispatcher("ours", groups, ep, tp), make_dispatcher("alltoall", groups, ep, tp)
    rank = dist.get_rank()
    sizes = {"even": 24, "uneven": 7 + 5 * rank, "an empty rank": 0 if rank == 1 else 16}
    for round_number, (name, num_tokens) in enumerate([*sizes.items(), *sizes.items()]):
        for allowed in (EXPERTS, TOPK, 1):
            batch = route(num_tokens, 100 * round_number + rank, allowed)
            a = six_steps(ours, *batch)
            assert_same(a, dense(*batch, tp), ("out", "hidden_grad", "prob_grad"), name)
            if tp > 1 or allowed < TOPK:
                continue  # alltoall wants all top-k pairs, and gloo cannot gather its unequal tensor shares
            b = six_steps(theirs, *batch)
            assert torch.equal(a["counts"], b["counts"]), f"{name}: {a['counts']} {b['counts']}"
            # The order inside an expert is free, but both use (source rank, token).
            assert torch.equal(a["rows"], b["rows"]) and torch.equal(a["row_probs"], b["row_probs"]), name
            assert_same(a, b, ("out", "hidden_grad", "prob_grad"), name)
    assert len(buffers.live()) == 1
    megatron_patches.revert()
    return True


def watched_lines():
    """Of the dispatches inside: `called` says whether one took the latency path."""
    return mock.patch.object(latency_path, "dispatch", wraps=latency_path.dispatch)


def latency(ep):
    """Not with more tokens than the path takes, with sequences of any length, or rows that only the map tells."""
    groups = initialize(ep)
    for most, factor, options, taken in (
        (32, 4.0, {}, True),
        (31, 4.0, {}, False),
        (32, 4.0, {"after": {"variable_seq_lengths": True}}, False),
        (32, None, {}, False),
    ):
        megatron_patches.apply(latency_tokens=most)
        dispatcher = make_dispatcher("ours", groups, ep, **options)
        dispatcher._comm_manager.moe_expert_rank_capacity_factor = factor
        x, p = dispatcher.dispatch_preprocess(*route(32, dist.get_rank()))
        with watched_lines() as lines:
            rows, _ = dispatcher.token_dispatch(x, p)
        assert lines.called == taken, (most, factor, options)
        dispatcher.token_combine(rows)
        megatron_patches.revert()
    return True


def unlike_tokens(ep):
    """Ranks with unlike numbers of tokens, some of them few enough for the latency path, do not take it."""
    groups = initialize(ep)
    megatron_patches.apply(latency_tokens=16)
    dispatcher = make_dispatcher("ours", groups, ep)
    dispatcher._comm_manager.moe_expert_rank_capacity_factor = 4.0
    for num_tokens in (16 - 8 * dist.get_rank(), 24, 16):
        for _ in range(2):
            x, p = dispatcher.dispatch_preprocess(*route(num_tokens, dist.get_rank()))
            with watched_lines() as lines:
                rows, _ = dispatcher.token_dispatch(x, p)
            assert not lines.called
            dispatcher.token_combine(rows)
    return True


def capacity(ep, latency_tokens=None, ranks_per_node=None):
    """Dropped pairs and drop-and-pad, on maps made by the router's own function."""
    groups = initialize(ep)
    megatron_patches.apply(latency_tokens=latency_tokens, ranks_per_node=ranks_per_node)
    for pad in (False, True):
        options = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": pad}
        ours = make_dispatcher("ours", groups, ep, **options)
        theirs = make_dispatcher("alltoall", groups, ep, **options)
        hidden, routing_map, probs = route(32, dist.get_rank(), allowed=6)
        probs, routing_map = moe_utils.apply_router_token_dropping(
            probs, routing_map, router_topk=TOPK, capacity_factor=1.0, pad_to_capacity=pad
        )
        assert pad or int(routing_map.sum()) < 32 * TOPK, "nothing was dropped: the case shows nothing"
        with watched_lines() as lines:
            a = six_steps(ours, hidden, routing_map, probs)
        b = six_steps(theirs, hidden, routing_map, probs)
        assert lines.called == bool(pad and latency_tokens)
        assert torch.equal(a["counts"], b["counts"].cpu())
        assert_same(a, b, ("out", "hidden_grad", "prob_grad"))
        if pad:
            assert a["counts"].tolist() == [8 * groups.ep.size()] * (EXPERTS // ep)
    with pytest.raises(ValueError, match="promises"):  # a map that is not padded must not go on quietly
        six_steps(ours, *route(32, dist.get_rank()))
    return True


def rank_budget(ep, latency_tokens=None, ranks_per_node=None):
    """moe_expert_rank_capacity_factor: rows beyond the budget dropped and flagged, None lifts it."""
    groups = initialize(ep)
    megatron_patches.apply(latency_tokens=latency_tokens, ranks_per_node=ranks_per_node)
    dispatcher = make_dispatcher("ours", groups, ep)
    manager = dispatcher._comm_manager
    hidden, routing_map, probs = route(32, dist.get_rank())

    def dispatch():
        x, p = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        rows, _ = dispatcher.token_dispatch(x, p)
        counts = manager.get_number_of_tokens_per_expert()
        dispatcher.token_combine(rows)
        return rows, counts

    whole, whole_counts = dispatch()
    assert not manager.over_budget.item()
    align = max(moe_utils.get_align_size_for_quantization(manager.config), 1)
    for factor, over in ((4.0, False), (0.5, True)):
        manager.moe_expert_rank_capacity_factor = factor
        with watched_lines() as lines:
            rows, counts = dispatch()
        assert lines.called == bool(latency_tokens)
        budget = int(32 * TOPK * factor)
        assert rows.shape[0] == budget + -budget % align
        kept = int(counts.sum())
        assert not rows[kept:].any(), "slack rows are not zero"
        assert manager.over_budget.dtype == torch.bool and manager.over_budget.shape == (1,)
        assert manager.over_budget.item() == over and (kept < int(whole_counts.sum())) == over
    dispatch()
    assert manager.over_budget.item(), "the flag must last until it is reset"
    manager.over_budget.fill_(0)
    manager.moe_expert_rank_capacity_factor = None
    rows, counts = dispatch()
    assert torch.equal(rows, whole) and torch.equal(counts, whole_counts) and not manager.over_budget.item()
    return True


def quantization_padding(ep):
    """fp8 asks for aligned segments: padded with zero rows and zero probabilities, unseen in the sum."""
    groups = initialize(ep)
    megatron_patches.apply()
    plain = make_dispatcher("ours", groups, ep)
    padded = make_dispatcher("ours", groups, ep, after={"fp8": "e4m3", "fp8_recipe": "delayed"})
    batch = route(21 + dist.get_rank(), dist.get_rank())
    a, b = six_steps(padded, *batch), six_steps(plain, *batch)
    assert padded._comm_manager.pad_multiple == 16 and plain._comm_manager.pad_multiple is None
    assert (
        (a["counts"] % 16 == 0).all()
        and (a["counts"] >= b["counts"]).all()
        and not torch.equal(a["counts"], b["counts"])
    )
    start, source = 0, 0
    for size, real in zip(a["counts"].tolist(), b["counts"].tolist(), strict=True):
        assert torch.equal(a["rows"][start : start + real], b["rows"][source : source + real])
        assert not a["rows"][start + real : start + size].any()
        assert not a["row_probs"][start + real : start + size].any()
        start, source = start + size, source + real
    assert_same(a, b, ("out", "hidden_grad", "prob_grad"), tolerance=0)
    return True


def quantised_dispatch(ep):
    """mxfp8: the experts' rows are the rounded rows of an unquantised dispatch; counts and probabilities its own."""
    groups = initialize(ep)
    batch = route(21 + dist.get_rank(), dist.get_rank())
    results = []
    for name in ("bf16", "mxfp8"):
        megatron_patches.apply(dispatch_dtype=name)
        results.append(six_steps(make_dispatcher("ours", groups, ep), *batch))
        megatron_patches.revert()
    plain, rounded = results
    fmt = quantize.FORMATS["mxfp8"]
    want = quantize.dequantize(*quantize.quantize(plain["rows"], fmt), fmt, torch.float32)
    assert torch.equal(rounded["rows"], want) and not torch.equal(want, plain["rows"])
    assert_same(rounded, plain, ("counts", "row_probs", "hidden_grad"), tolerance=0)  # straight through
    assert (rounded["out"] - plain["out"]).abs().max() < 0.1 * plain["out"].abs().max()
    return True


def attributes(ep):
    """What the 1F1B schedule, CUDA graphs and the paged stash do with a manager from outside."""
    groups = initialize(ep)
    megatron_patches.apply()
    dispatcher = make_dispatcher("ours", groups, ep)
    manager = dispatcher._comm_manager
    assert not [name for name in megatron_patches.hooks.MANAGER_INTERFACE if not hasattr(manager, name)]
    hidden, routing_map, probs = route(16, dist.get_rank())
    x, p = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    for path in dispatcher.cudagraph_attrs:
        value = dispatcher
        for part in path.split("."):
            value = getattr(value, part)
        assert torch.is_tensor(value) and value.shape == (16, EXPERTS), path
    assert p is manager.token_probs
    detached = (p * 2).detach().requires_grad_()  # the schedule puts its own copy here before dispatch
    manager.token_probs = detached
    rows, row_probs = dispatcher.token_dispatch(x, p)
    again = row_probs.detach().requires_grad_()  # and here before the experts
    manager.dispatched_probs = again
    assert dispatcher.dispatch_postprocess(rows, row_probs)[2] is again
    row_probs.sum().backward()
    assert torch.equal(detached.grad, routing_map.float()), "gradient must reach the copy that was put in"
    assert torch.equal(torch.sort(row_probs[row_probs > 0].detach()).values[:1] > 0.2, torch.tensor([True]))
    dispatcher.token_combine(rows.detach())
    assert manager.handle is None
    manager.over_budget.fill_(1)
    manager.reset_transient_forward_state()
    assert manager.token_probs is None and manager.dispatched_probs is None and manager.over_budget.item()
    if hasattr(dispatcher, "check_over_budget"):
        assert dispatcher.check_over_budget() is manager.over_budget
        dispatcher.reset_over_budget()
        assert not manager.over_budget.item()
    return True


def shared_buffers(ep):
    """Layers of one shape share a buffer, dtypes and settings do not; handles outlive other layers' calls."""
    groups = initialize(ep)
    megatron_patches.apply(timeout_s=60.0)
    first, second = (make_dispatcher("ours", groups, ep) for _ in range(2))
    a, b = route(16, dist.get_rank()), route(24, 50 + dist.get_rank())
    alone = [six_steps(first, *a), six_steps(second, *b)]
    hidden = [a[0].clone().requires_grad_(), b[0].clone().requires_grad_()]
    outs = []
    for dispatcher, x, batch in ((first, hidden[0], a), (second, hidden[1], b)):  # both forwards, then both backwards
        x, p = dispatcher.dispatch_preprocess(x, batch[1], batch[2])
        rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(x, p))
        out = dispatcher.token_combine(run_experts(dispatcher, rows, counts, row_probs))
        outs.append(dispatcher.combine_postprocess(out))
    for number in (0, 1):
        (outs[number] * torch.linspace(0.5, 1.5, outs[number].numel()).view_as(outs[number])).sum().backward()
        assert torch.equal(hidden[number].grad, alone[number]["hidden_grad"])
    assert len(buffers.live()) == 1
    six_steps(first, a[0].bfloat16(), a[1], a[2])
    assert len(buffers.live()) == 2 and len(megatron_patches.apply(timeout_s=60.0).buffers) == 2
    megatron_patches.release_buffers()
    assert not buffers.live()
    if hasattr(TransformerConfig, "moe_hybridep_num_blocks_permute"):  # Megatron's wish, since 0.17
        apart = make_dispatcher("ours", groups, ep, moe_hybridep_num_blocks_permute=3)
        again = six_steps(apart, *a)
        assert all(torch.equal(again[name], alone[0][name]) for name in ("out", "hidden_grad", "prob_grad"))
        assert buffers.live()[0].config.tuned()["num_of_blocks_permute"] == 3
        assert "num_of_blocks_unpermute" not in buffers.live()[0].config.tuned()
    return True


def rows_for_outputs(ep):
    """Experts write into the buffer of the layer that is between dispatch and combine, and into no other."""
    groups = initialize(ep)
    lent = []

    class Lending(hybrid_ep.HybridEPBuffer):
        def empty(self, *arguments):
            lent.append(self)
            return super().empty(*arguments)

    class OfOthers:  # a buffer that lends nothing, nor says whether it can be used
        def __init__(self, **options):
            self._ours = hybrid_ep.HybridEPBuffer(**options)

        def __getattr__(self, name):
            if name in ("empty", "is_usable"):
                raise AttributeError(name)
            return getattr(self._ours, name)

    batch = route(16, dist.get_rank())
    for cls in (Lending, OfOthers):
        megatron_patches.apply(timeout_s=60.0, buffer_class=cls)
        for _ in range(2):  # the buffer lends before the first dispatch as little as after a combine
            assert buffers.place(HIDDEN, torch.float32) is None
            dispatcher = make_dispatcher("ours", groups, ep)
            manager = dispatcher._comm_manager
            x, p = dispatcher.dispatch_preprocess(*batch)
            rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(x, p))
            lender = buffers.place(HIDDEN, torch.float32)
            given = None if lender is None else lender.empty(len(rows), HIDDEN, torch.float32)
            if cls is Lending:
                assert lent.pop() is manager.buffer and given.shape == rows.shape
            assert (given is None) == (cls is OfOthers)
            assert buffers.place(HIDDEN + 8, torch.float32) is None
            assert buffers.place(HIDDEN, torch.bfloat16) is None
            dispatcher.token_combine(run_experts(dispatcher, rows, counts, row_probs))
        megatron_patches.revert()
        assert not lent
    return True


def two_in_flight(ep):
    """Two layers of one buffer: both dispatch before either combines, and their backwards interleave as well."""
    groups = initialize(ep)
    megatron_patches.apply(timeout_s=60.0)
    layers = [make_dispatcher("ours", groups, ep) for _ in range(2)]
    batches = [route(16, dist.get_rank()), route(24, 50 + dist.get_rank())]
    alone = [six_steps(layer, *batch) for layer, batch in zip(layers, batches, strict=True)]
    hidden, sent, outs = [], [], []
    for layer, (x, routing_map, probs) in zip(layers, batches, strict=True):
        hidden.append(x.clone().requires_grad_())
        x, p = layer.dispatch_preprocess(hidden[-1], routing_map, probs)
        sent.append(layer.dispatch_postprocess(*layer.token_dispatch(x, p)))
    for layer, part in zip(layers, sent, strict=True):
        outs.append(layer.combine_postprocess(layer.token_combine(run_experts(layer, *part))))
    for out, want in zip(outs, alone, strict=True):
        assert torch.equal(out, want["out"])
    sum((out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum() for out in outs).backward()
    for x, want in zip(hidden, alone, strict=True):
        assert torch.equal(x.grad, want["hidden_grad"])
    assert len(buffers.live()) == 1
    return True


def built_by_moe_layer(ep):
    """The class MoELayer looks up, the refusals, and Megatron's own manager when hybrid_ep is off."""
    groups = initialize(ep)
    original = moe_layer.MoEFlexTokenDispatcher
    megatron_patches.apply()
    assert type(make_dispatcher("ours", groups, ep)).__module__ == "megatron_patches.dispatcher"
    messages = []
    settings.configure(settings.DISABLED)
    with pytest.raises(ImportError) as raised:
        make_dispatcher("ours", groups, ep)
    messages.append(str(raised.value))
    megatron_patches.apply()
    with pytest.raises(ValueError) as raised:
        make_dispatcher("ours", groups, ep, after={"moe_flex_dispatcher_backend": "deepep"})
    messages.append(str(raised.value))
    megatron_patches.apply(ranks_per_node=3)
    with pytest.raises(ValueError) as raised:  # when the layer is built, before any token moves
        make_dispatcher("ours", groups, ep)
    messages.append(str(raised.value))
    megatron_patches.apply()
    buffers.release()  # and what it knows of hosts
    host = "a" if dist.get_rank() < 3 else "b"
    with mock.patch.object(socket, "gethostname", return_value=host), pytest.raises(ValueError) as raised:
        make_dispatcher("ours", groups, ep)
    messages.append(str(raised.value))
    megatron_patches.apply(ranks_per_node=1 if dist.get_rank() == 2 else None)
    buffers.release()
    with pytest.raises(ValueError) as raised:  # on every rank, and nobody waits
        make_dispatcher("ours", groups, ep)
    messages.append(str(raised.value))
    megatron_patches.revert()
    assert moe_layer.MoEFlexTokenDispatcher is original
    return messages
