"""What a rank does in the tests of experts in fp8: clones against owners, training against 16 bits, Megatron's flag."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from balance_programs import random_plan
from experts_programs import HIDDEN, both, config, configured
from megatron.core import parallel_state
from rank_programs import initialize as initialize_ranks
from rank_programs import make_dispatcher
from slow_programs import Job, gradients_of, initialize, moe_layers

import megatron_patches
from hybrid_ep.moe import block_scaled
from megatron_patches import balance, experts

IN_FP8 = {"grouped_gemm": True, "grouped_gemm_precision": "fp8"}


def ours(dtype=torch.float32):
    """GroupedExperts of fp8 products."""
    megatron_patches.apply(**IN_FP8)
    _, made = both(configured(1))
    megatron_patches.revert()
    return made.to(dtype)


def products():
    """Two products of the reference with the activation between, and no others; parameters keep their dtype."""
    module = ours(torch.bfloat16)
    torch.manual_seed(2)
    counts = torch.tensor([0, 5, 0, 3, 140, 0, 1, 0])
    rows, probs = torch.randn(149, HIDDEN).bfloat16(), torch.rand(149)
    out, _ = module(rows, counts, probs)
    start = 0
    for e, count in enumerate(counts.tolist()):
        mine = slice(start, start := start + count)
        h = block_scaled.rows_times_matrix(rows[mine], module.weight1[e].t())
        gate, up = h.float().chunk(2, -1)
        h = (torch.nn.functional.silu(gate) * up * probs[mine, None]).bfloat16()
        want = block_scaled.rows_times_matrix(h, module.weight2[e].t())
        assert torch.allclose(
            out[mine].float(), want.float(), rtol=2e-2, atol=1e-2 * float(want.abs().max() if count else 0)
        )
    out.float().square().sum().backward()
    for parameter in module.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.bfloat16 and parameter.grad.isfinite().all()
        assert all((gradient == 0).all() for gradient, count in zip(parameter.grad, counts, strict=True) if not count)


def clones():
    """Of an expert's rows a clone takes those from `cut` on: outputs and gradients of rows have the owner's bits, and
    gradients of the weight, of other blocks of rows, are near. Returns {cut: the largest relative difference}."""
    module, hot, worst = ours(), 3, {}
    counts = torch.tensor([4, 0, 20, 256, 1, 0, 2, 0])
    torch.manual_seed(1)
    total = int(counts.sum())
    rows, probs, grad = torch.randn(total, HIDDEN), torch.rand(total), torch.randn(total, HIDDEN)

    def run(order, counts, further=()):
        module.zero_grad()
        x, p = rows[order].requires_grad_(), probs[order].requires_grad_()
        out, _ = module(x, counts, p, further)
        out.backward(grad[order])
        back = torch.argsort(order)
        return out.detach()[back], x.grad[back], p.grad[back]

    everyone = torch.arange(total)
    want, first = run(everyone, counts), int(counts[:hot].sum())
    whole = [w.grad[hot].clone() for w in (module.weight1, module.weight2)]
    for cut in (100, 128):
        theirs = everyone[first + cut : first + int(counts[hot])]
        order = torch.cat([everyone[: first + cut], everyone[first + int(counts[hot]) :], theirs])
        split = torch.cat([counts, torch.tensor([len(theirs)])])
        split[hot] = cut
        spare = [w.detach()[hot : hot + 1].clone().requires_grad_() for w in (module.weight1, module.weight2)]
        got = run(order, split, [tuple(spare)])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), "a clone's rows are not its owner's"
        sums = [w.grad[hot] + s.grad[0] for w, s in zip((module.weight1, module.weight2), spare, strict=True)]
        worst[cut] = max(float((a - b).norm() / b.norm()) for a, b in zip(sums, whole, strict=True))
    return worst


def training(ep, steps):
    """Losses of a small GPT by how its experts multiply and whether they are balanced, and the largest relative
    difference of a parameter's gradient in the first step, of fp8 from off and of fp8 balanced from fp8."""
    initialize(ep)
    losses, gradients = {}, {}
    for name, precision, mode in (("params", "params", "off"), ("fp8", "fp8", "off"), ("fp8 exact", "fp8", "exact")):
        megatron_patches.apply(balance=mode, timeout_s=60.0, grouped_gemm=True, grouped_gemm_precision=precision)
        job = Job(ep, topk=4)
        found = gradients[name] = {}

        def look(job, found=found):
            for key, parameter in job.model.named_parameters():
                assert parameter.main_grad.isfinite().all(), key
                found.setdefault(key, parameter.main_grad.clone())

        job.look = look
        managers = [layer.token_dispatcher._comm_manager for layer in moe_layers(job.model)]
        for seed, manager in enumerate(managers if mode != "off" else []):
            manager.plan_with = random_plan(seed, manager)
        losses[name] = [sum(job.train_step()) / 2 for _ in range(steps)]
        assert mode == "off" or any(manager.last_plan.num_copies for manager in managers)
        megatron_patches.revert()
    means = torch.tensor([losses[name] for name in losses])
    dist.all_reduce(means)

    def apart(a, b):
        return max(float((gradients[a][k] - g).norm() / g.norm().clamp(min=1e-12)) for k, g in gradients[b].items())

    return (means / dist.get_world_size()).tolist(), apart("fp8", "params"), apart("fp8 exact", "fp8")


def one_expert_a_token(ep):
    """With top-1 no sum depends on where an expert's rows are computed: in the first step balancing gives the losses'
    bits, and the bits of all gradients but the experts', whose blocks of rows are others. Returns how far those are."""
    initialize(ep)
    losses, found = {}, {"off": {}, "exact": {}}
    for mode, gradients in found.items():
        megatron_patches.apply(balance=mode, timeout_s=60.0, **IN_FP8)
        job = Job(ep, distributed=False, topk=1)
        managers = [layer.token_dispatcher._comm_manager for layer in moe_layers(job.model)]
        for seed, manager in enumerate(managers if mode == "exact" else []):
            manager.plan_with = random_plan(seed, manager)
        job.look = gradients_of(gradients)
        losses[mode] = job.train_step(microbatches=1)
        assert mode == "off" or any(manager.last_plan.num_copies for manager in managers)
        megatron_patches.revert()
    assert losses["exact"] == losses["off"]
    apart = {k: float((found["exact"][k] - g).norm() / g.norm().clamp(min=1e-12)) for k, g in found["off"].items()}
    others = {k for k, g in found["off"].items() if not torch.equal(g, found["exact"][k])}
    assert all(".mlp.experts." in k for k in others), others
    return max(apart.values())


def travelling(ep):
    """The largest relative difference of a gradient, with weights that travel and with tokens that do; losses agree."""
    initialize(ep)
    losses, found = {}, {"tokens": {}, "weights": {}}
    for move, gradients in found.items():
        megatron_patches.apply(timeout_s=60.0, move=move, **IN_FP8)
        job = Job(ep, distributed=False, topk=4)
        job.look = gradients_of(gradients)
        losses[move] = job.train_step()
        megatron_patches.revert()
    assert losses["weights"] == pytest.approx(losses["tokens"], rel=1e-5)
    return max(float((found["weights"][k] - g).norm() / g.norm().clamp(min=1e-12)) for k, g in found["tokens"].items())


def with_megatrons_flag(ep):
    """--fp8-format: refused unless these experts are told what they do, accepted with either, by the balancer, too, and
    their groups are not padded."""
    said = []
    changed = dataclasses.replace(config(1))
    changed.fp8 = "e4m3"
    with pytest.raises(ValueError, match="fp8-format") as refused:
        experts.check_supported(changed)
    said.append(str(refused.value))
    groups, fp8 = initialize_ranks(ep), {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    megatron_patches.apply(balance="exact")
    with pytest.raises(ValueError, match="fp8-format") as refused:
        make_dispatcher("ours", groups, ep, after=fp8, gradient_accumulation_fusion=False)
    said.append(str(refused.value))
    for precision in ("params", "fp8"):
        megatron_patches.apply(balance="exact", grouped_gemm=True, grouped_gemm_precision=precision)
        dispatcher = make_dispatcher("ours", groups, ep, after=fp8, gradient_accumulation_fusion=False)
        assert isinstance(dispatcher._comm_manager, balance.ExactManager)
        assert dispatcher._comm_manager.pad_multiple is None
        assert experts.check_supported(changed, precision) == "swiglu"
    megatron_patches.revert()
    return said


def several(programs):
    """The results of ((name, *arguments), ...), which a fresh world each are not worth."""
    found = {}
    for name, *arguments in programs:
        parallel_state.destroy_model_parallel()
        found[name] = globals()[name](*arguments)
    return found
