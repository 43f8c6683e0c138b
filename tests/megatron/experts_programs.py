"""What a rank does in the tests of the grouped experts: values, gradients, layouts, checkpoints, refusals."""

import dataclasses
import importlib.util
import multiprocessing
import queue
import types

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from te_experts_stand_in import te_experts

import megatron_patches
from hybrid_ep.moe import backends as moe_backends
from megatron_patches import buffers, experts, hooks

F = torch.nn.functional
EXPERTS, HIDDEN, FFN = 8, 32, 48
ACTIVATIONS = {
    "silu gated": (F.silu, True),
    "gelu gated": (F.gelu, True),
    "fast gelu gated": (fast_gelu, True),
    "silu": (F.silu, False),
    "gelu": (F.gelu, False),
    "relu": (F.relu, False),
    "relu2": (squared_relu, False),
}


def configured(ep, etp=1, **options):
    """A configuration, Megatron's groups made for it."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    model_parallel_cuda_manual_seed(7)
    return config(ep, etp, **options)


def config(ep, etp=1, **options):
    base = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=3 * HIDDEN,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_ffn_hidden_size=FFN,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    return TransformerConfig(**(base | options))


def both(of_config, num_local=None):
    """(SequentialMLP, GroupedExperts) with the same weights, by the same seed."""
    groups = get_default_pg_collection()
    num_local = num_local or EXPERTS // of_config.expert_model_parallel_size
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    made = []
    for build in (SequentialMLP, experts.GroupedExperts):
        torch.manual_seed(3 + groups.ep.rank())
        made.append(build(num_local, of_config, linears, pg_collection=groups))
    return made


def weights(module):
    """{Sequential's name: tensor} without the empty extra states."""
    return {k: v for k, v in module.state_dict().items() if torch.is_tensor(v)}


def values_and_gradients():
    """Equal to SequentialMLP: output, gradients of rows and probabilities and weights, whatever the counts.
    Returns the largest difference over the largest value, in fp32."""
    worst = 0.0
    for name, (function, gated) in ACTIVATIONS.items():
        of_config = configured(1, activation_func=function, gated_linear_unit=gated)
        theirs, ours = both(of_config)
        assert weights(theirs).keys() == weights(ours).keys(), name
        assert all(torch.equal(a, weights(ours)[k]) for k, a in weights(theirs).items()), f"{name}: initial weights"
        for counts in ((0, 0, 5, 9, 1, 0, 8, 0), (3, 0, 0, 0, 0, 0, 0, 16), (0,) * 8, (4,) * 8):
            worst = max(worst, compared(theirs, ours, counts))
    assert_attributes(theirs, ours)
    return worst


def compared(theirs, ours, counts):
    torch.manual_seed(1)
    rows, grad = torch.randn(sum(counts), HIDDEN), torch.randn(sum(counts), HIDDEN)
    probs = torch.rand(sum(counts))
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        x, p = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        out, bias = module(x, torch.tensor(counts), p)
        assert bias is None
        out.backward(grad)
        results.append((out.detach(), x.grad, p.grad, *weight_gradients(module)))
    for count, gradient in zip(counts * 2, results[1][3:], strict=True):
        assert count or (gradient == 0).all(), "an expert without rows has a gradient of exact zeros"
    return max(difference(a, b) for a, b in zip(*results, strict=True))


def difference(got, want):
    if got is None or want is None:
        return 0.0
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-20)) if got.numel() else 0.0


def weight_gradients(module):
    """fc1 of each expert, then fc2; zeros where autograd had nothing."""
    if isinstance(module, experts.GroupedExperts):
        return [*module.weight1.grad, *module.weight2.grad]
    linears = [getattr(e, name) for name in ("linear_fc1", "linear_fc2") for e in module.local_experts]
    return [torch.zeros_like(m.weight) if m.weight.grad is None else m.weight.grad for m in linears]


def assert_attributes(theirs, ours):
    """What Megatron notes on parameters: who reduces them, who counts them in norms."""
    for name, linear in experts.MATRICES.items():
        one, stacked = getattr(theirs.local_experts[0], linear).weight, getattr(ours, name)
        for attribute in ("allreduce", "tensor_model_parallel", "partition_stride"):
            assert getattr(one, attribute, None) == getattr(stacked, attribute, None), attribute
        assert sorted(dict(ours.named_parameters())) == ["weight1", "weight2"]


def rows_behind_the_last_group():
    """A static buffer: NaN behind the last expert's rows reaches nothing."""
    _, ours = both(configured(1))
    counts = torch.tensor([0, 4, 0, 3, 0, 0, 2, 0])
    x = torch.cat([torch.randn(9, HIDDEN), torch.full((5, HIDDEN), float("nan"))]).requires_grad_()
    out, _ = ours(x, counts, torch.cat([torch.rand(9), torch.zeros(5)]))
    out.backward(torch.cat([torch.ones(9, HIDDEN), torch.full((5, HIDDEN), float("nan"))]))
    assert out.isfinite().all() and (out[9:] == 0).all() and (x.grad[9:] == 0).all()
    assert ours.weight1.grad.isfinite().all() and ours.weight2.grad.isfinite().all()
    return True


def layers(ep, etp, dispatcher):
    """A whole MoE layer, ours against SequentialMLP, fp32, expert tensor parallelism included."""
    options = {"moe_token_dispatcher_type": "alltoall"}
    if dispatcher == "hybrid_ep":
        options = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    of_config = configured(ep, etp, **options)
    rank = torch.distributed.get_rank()
    results = []
    for grouped in (False, True):
        megatron_patches.apply(grouped_gemm=grouped)
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
        torch.manual_seed(11)
        arguments = getattr(spec, "keywords", None) or {"submodules": spec.submodules}
        layer = MoELayer(of_config, **arguments)
        assert isinstance(layer.experts, experts.GroupedExperts) == grouped
        with torch.no_grad():
            for expert, matrix in enumerate(every_weight(layer.experts)):
                seed = torch.Generator().manual_seed(
                    100 * expert + layer.experts.ep_group.rank() * 7 + layer.experts.tp_group.rank()
                )
                matrix.copy_(torch.randn(matrix.shape, generator=seed) * 0.1)
        torch.manual_seed(20 + rank)
        x = torch.randn(6, 2, HIDDEN, requires_grad=True)
        layer(x)  # buffers have grown then
        formed = partial_rows()
        out = layer(x)[0]
        formed = partial_rows() - formed
        assert (formed > 0) == (dispatcher == "hybrid_ep" and not grouped), formed  # ours are read where they lie
        formed = partial_rows()
        out.square().sum().backward()
        formed = partial_rows() - formed
        assert (formed > 0) == (dispatcher == "hybrid_ep" and not grouped), formed  # and so are their rows' gradients
        results.append((out.detach(), x.grad, layer.router.weight.grad, *weight_gradients(layer.experts)))
        megatron_patches.revert()
    assert max(difference(a, b) for a, b in zip(*results, strict=True)) < 3e-6
    return True


def partial_rows():
    """That combines formed so far of rows that they could not read in place."""
    return sum(buffer.traffic()["partial_rows"] for buffer in buffers._buffers.values())


def every_weight(module):
    """Expert by expert: fc1, fc2."""
    if isinstance(module, experts.GroupedExperts):
        return [w for i in range(module.num_local_experts) for w in module.expert_weights(i).values()]
    return [p for expert in module.local_experts for p in expert.parameters()]


# ---- checkpoints


def layouts():
    """state_dict in SequentialMLP's names and back; TEGroupedMLP's names; what is wrong is named."""
    theirs, ours = both(configured(1))
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert all(v.shape == weights(ours)[k].shape for k, v in weights(theirs).items())
    with torch.no_grad():
        ours.weight1.normal_()
    theirs.load_state_dict(ours.state_dict())
    assert all(torch.equal(v, weights(ours)[k]) for k, v in weights(theirs).items())
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    ours.load_state_dict(theirs.state_dict())
    assert all(torch.equal(v, weights(ours)[k]) for k, v in weights(theirs).items())
    te = {
        f"{linear}.weight{i}": torch.randn_like(getattr(ours, own)[i])
        for own, linear in experts.MATRICES.items()
        for i in range(EXPERTS)
    }
    te |= {"linear_fc1._extra_state": torch.zeros(1), "linear_fc2._extra_state": None}
    ours.load_state_dict(te)
    assert all(
        torch.equal(weights(ours)[f"local_experts.{i}.{linear}.weight"], te[f"{linear}.weight{i}"])
        for linear in experts.MATRICES.values()
        for i in range(EXPERTS)
    )
    said = []
    good = ours.state_dict()
    short = {k: v for k, v in good.items() if k != "local_experts.3.linear_fc2.weight"}
    wrong = good | {"local_experts.0.linear_fc1.weight": torch.zeros(2, 2)}
    for state in (short, wrong, good | {"local_experts.9.linear_fc1.weight": torch.zeros(1)}):
        try:
            ours.load_state_dict(state)
        except RuntimeError as error:
            said.append(str(error))
    return said


def sharded_entries_equal():
    """Built factories of all three classes: the same (key, shape, offset, data), layer axis and singletons too."""
    for ep, etp, gated in ((4, 1, True), (2, 2, True), (2, 2, False), (1, 1, True)):
        theirs, ours = both(configured(ep, etp, gated_linear_unit=gated))
        ours.load_state_dict(theirs.state_dict())
        te = te_experts(theirs)
        for metadata in (None, {"singleton_local_shards": True}):
            for offsets in ((), ((0, 1, 2),)):
                a, b, c = (
                    described(m.sharded_state_dict("mlp.", offsets, dict(metadata) if metadata else None))
                    for m in (theirs, ours, te)
                )
                assert a and a == b, (ep, etp, gated, metadata, offsets, set(a) ^ set(b))
                assert b == c, (ep, etp, gated, metadata, offsets, set(b) ^ set(c))
    return True


def described(entries):
    """{(key, global shape, offset, replica): sum of data} after factories have built."""
    assert not any(isinstance(e, ShardedTensorFactory) and e.data is None for e in entries.values())
    apply_factories(entries)
    found = {}

    def walk(entry):
        if isinstance(entry, ShardedTensor):
            place = (
                entry.key,
                tuple(entry.global_shape),
                tuple(entry.global_offset),
                tuple(entry.replica_id),
                tuple(entry.axis_fragmentations),
                entry.prepend_axis_num,
            )
            found[place] = float(entry.data.double().sum())
        elif isinstance(entry, (list, dict)):
            for part in entry.values() if isinstance(entry, dict) else entry:
                walk(part)
        else:
            found[(entry.key, tuple(entry.replica_id), entry.global_shape, entry.global_offset)] = entry.data

    walk(entries)
    return found


def backends():
    """{setting: backends whose product ran} of the experts built under it."""
    seen, calls = {}, []
    of_config, honest = configured(1), {name: backend.mm for name, backend in moe_backends.BACKENDS.items()}
    for name, backend in moe_backends.BACKENDS.items():
        backend.mm = staticmethod(lambda *args, name=name: calls.append(name) or honest[name](*args))
    for asked in ("auto", "torch", "loop"):
        megatron_patches.apply(grouped_gemm=True, grouped_gemm_backend=asked)
        _, ours = both(of_config)
        megatron_patches.revert()
        for _ in ("probes, which call several", "multiplies"):
            calls.clear()
            ours(torch.randn(9, HIDDEN), torch.tensor([0, 4, 0, 3, 0, 0, 2, 0]), torch.rand(9))
        seen[asked] = sorted(set(calls))
    return seen


def several(names):
    """The results of programs that a fresh world each is not worth."""
    return [globals()[name]() for name in names]


def distributed_checkpoint(folder, writer, ep_of_writer, sizes_of_readers):
    """Save by one class at one EP size, load by both at others: every expert is the one that was saved."""
    theirs, ours = both(configured(ep_of_writer))
    module = {"sequential": theirs, "grouped": ours}[writer]
    fill(module)
    save(folder, module)
    for reader in [module for sizes in sizes_of_readers for module in both(configured(*sizes))]:
        want = weights_of_global_experts(reader)
        with torch.no_grad():
            for p in reader.parameters():
                p.fill_(float("nan"))
        sharded = reader.sharded_state_dict("mlp.experts.")
        loaded = dist_checkpointing.load(dict(sharded), folder)
        reader.load_state_dict({k.removeprefix("mlp.experts."): v for k, v in loaded.items()})
        for matrix, right in zip(every_weight(reader), want, strict=True):
            assert torch.equal(matrix, right), type(reader).__name__
    return True


def save(folder, module):
    # Megatron's writer collects results through a process of its own, which takes seconds to start and which daemons
    # may not have; and it logs its memory with psutil, which Megatron does not depend on.
    filesystem_async._results_queue = queue.Queue()
    multiprocessing.current_process()._config["daemon"] = False  # 0.16 forks its writers, too
    if importlib.util.find_spec("psutil") is None:
        idle = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=0))
        filesystem_async.psutil = types.SimpleNamespace(Process=lambda *_: idle)
        filesystem_async.HAVE_PSUTIL = True
    dist_checkpointing.save(module.sharded_state_dict("mlp.experts."), folder)
    torch.distributed.barrier()


def full(expert, number):
    """fc1 (gate and up) or fc2 of a global expert, as without expert tensor parallelism."""
    shape = (2 * FFN, HIDDEN) if number == 0 else (HIDDEN, FFN)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2 * expert + number))


def weights_of_global_experts(module):
    """What every_weight(module) must hold: global experts of this rank, this rank's part of F."""
    first = module.ep_group.rank() * module.num_local_experts
    parts, part = module.tp_group.size(), module.tp_group.rank()
    out = []
    for expert in range(first, first + module.num_local_experts):
        gate, up = full(expert, 0).chunk(2)
        out += [torch.cat([gate.chunk(parts)[part], up.chunk(parts)[part]]), full(expert, 1).chunk(parts, 1)[part]]
    return out


def fill(module):
    with torch.no_grad():
        for matrix, right in zip(every_weight(module), weights_of_global_experts(module), strict=True):
            matrix.copy_(right)


def refusals():
    """One message for every option that is not supported."""
    configured(1)
    said = []
    for options in (
        {"add_bias_linear": True},
        {"activation_func": quick_gelu},
        {"activation_func": squared_relu},
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        {"expert_gtp_weight_remat_size": 2},  # of 0.19 on
        {"activation_func_fp8_input_store": True, "moe_paged_stash": True},
    ):
        changed = dataclasses.replace(config(1))
        for name, value in options.items():
            setattr(changed, name, value)
        try:
            experts.check_supported(changed)
        except ValueError as error:
            said.append(str(error))
    return said


def moved():
    """The refusal when the places the experts and the router guards stand on have moved."""
    from megatron.core.transformer.moe import moe_layer, moe_utils

    said = []
    for owner, name, value, options in (
        (moe_layer, "MoESubmodules", object, {"grouped_gemm": True}),
        (moe_utils, "topk_routing_with_score_function", print, {"router_guard": "stop"}),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            megatron_patches.apply(**options)
        except hooks.HookError as error:
            said.append(str(error))
        finally:
            setattr(owner, name, before)
        assert not megatron_patches.status().applied
    init = MoELayer.__init__
    status = megatron_patches.apply(grouped_gemm=True)
    assert any("experts: " in text for text in status.patched) and MoELayer.__init__ is not init
    assert not megatron_patches.revert().applied and MoELayer.__init__ is init
    return said
