"""Weight gradients of our experts that are made behind the backward (--delay-wgrad-compute): when, by whom, and what is
said where nobody asks for them. And the rows that they read, which the schedule must not free."""

from types import SimpleNamespace

import exact_layers
import pytest
import torch

from megatron_patches import experts, hooks, settings

pytestmark = pytest.mark.version_free
COUNTS = torch.tensor([4, 2])


@pytest.fixture
def grouped():
    before = settings.configure(settings.Settings.of(grouped_gemm=True))
    yield
    settings.configure(before)


def made(delay):
    config = SimpleNamespace(
        moe_apply_probs_on_input=False,
        overlap_moe_expert_parallel_comm=True,
        delay_wgrad_compute=delay,
        recompute_granularity=None,
    )
    return exact_layers.Experts(SimpleNamespace(rank=lambda: 0), config, 0, "cpu")


def forward(module):
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(6, exact_layers.H, generator=random).bfloat16().requires_grad_()
    return rows, module(rows, COUNTS, torch.rand(6, generator=random))[0].sum()


def gradients(module):
    return [weight.grad for weight in (module.weight1, module.weight2)]


def test_gradients_are_made_when_they_are_asked_for_and_reduced_then(grouped):
    at_once, later, seen = made(False), made(True), []
    forward(at_once)[1].backward()
    later.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(gradients(later)))
    forward(later)[1].backward()
    assert gradients(later) == [None, None] and not seen
    later.backward_dw()
    assert all(map(torch.equal, gradients(later), gradients(at_once)))
    (when_reduced,) = seen
    assert all(a is b for a, b in zip(when_reduced, gradients(later), strict=True)), "reduced before all were made"
    later.backward_dw()  # of a layer whose backward has not run
    assert len(seen) == 1


def test_a_wrapper_that_does_not_know_is_told_the_flag(grouped):
    module = made(True)
    forward(module)[1].backward()
    with pytest.raises(RuntimeError, match="DistributedDataParallelConfig delay_wgrad_compute=True"):
        module.backward_dw()


def test_gradients_that_nobody_made_are_said_and_can_be_forgotten(grouped):
    module = made(True)
    forward(module)[1].backward()
    with torch.no_grad():
        forward(module)
    with pytest.raises(RuntimeError, match=r"call backward_dw\(\) behind it.*or forget_delayed\(\)"):
        forward(module)
    module.forget_delayed()
    rows, loss = forward(module)
    torch.autograd.grad(loss, rows)  # asks for no weight's
    forward(module)
    module.backward_dw()
    assert gradients(module) == [None, None]


def test_the_schedule_keeps_the_rows_that_their_backward_reads(grouped):
    schedule = hooks.freed_inputs()
    config = SimpleNamespace(
        fp8="e4m3",
        fp4=None,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="hybridep",
        cuda_graph_modules=[],
    )
    frees = experts.keeps_rows(schedule.should_free_input)
    assert schedule.should_free_input("mlp", True, config, 2), "Megatron would not free them: the test says nothing"
    assert not frees("mlp", True, config, 2) and frees("moe_combine", True, config, 2)
    settings.configure(settings.Settings.of())
    assert frees("mlp", True, config, 2), "Transformer Engine's experts keep theirs in 8 bits"
