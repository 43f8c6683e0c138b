"""What the ranks do in the tests of Megatron's 1F1B overlap of expert communication: a micro-batch's forward and
another's backward take turns, layer by layer, in pieces."""

import slow_programs
import torch.distributed as dist
from balance_programs import random_plan
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from slow_programs import SEQ, run_config
from virtual_programs import stages

import megatron_patches
from recipes.model import moe_layers, transformer_config

MICRO_BATCHES, STEPS, LAYERS_A_CHUNK = 4, 2, 3


class Job:
    """The parts of the model that a rank has, under Megatron's DDP, and what a step of them makes."""

    def __init__(self, pp, overlap, delay, again):
        model_parallel_cuda_manual_seed(1)
        chunks = 2 if pp > 1 else 1
        config = run_config(2, num_layers=pp * chunks * LAYERS_A_CHUNK, topk=4)
        megatron = transformer_config(config)
        # Megatron admits the schedule for bf16 and fp16 alone; nothing in it depends on that.
        after = {"overlap_moe_expert_parallel_comm": overlap, "delay_wgrad_compute": delay}
        after["pipeline_model_parallel_size"] = pp
        if again:
            after |= {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
        if pp > 1:
            after |= {"virtual_pipeline_model_parallel_size": chunks, "microbatch_group_size_per_vp_stage": pp}
        for name, value in after.items():
            setattr(megatron, name, value)
        overlapped = {"overlap_grad_reduce": delay, "delay_wgrad_compute": delay}
        self.models, self.nets = stages(config, megatron, chunks, **overlapped)
        dispatchers = [layer.token_dispatcher for model in self.models for layer in moe_layers(model)]
        self.managers = [dispatcher._comm_manager for dispatcher in dispatchers]

    def step(self, number):
        """Losses and gradients, in one list."""
        for net in self.nets:
            net.train()
            net.zero_grad_buffer()
        batches = [iter(range(100 * number, 100 * number + MICRO_BATCHES)) for _ in self.nets]
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.nets if len(self.nets) > 1 else self.nets[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQ,
            micro_batch_size=1,
            decoder_seq_length=SEQ,
        )
        gradients = [p.main_grad.clone() for model in self.models for p in model.parameters()]
        return [part["loss"].clone() for part in losses] + gradients


def _forward(micro_batches, model, return_schedule_plan=False):
    seed = next(micro_batches) + 1000 * parallel_state.get_data_parallel_rank()
    return slow_programs.forward(model, seed, return_schedule_plan)


def steps_of(pp, overlap, forced=False, delay=False, again=False, **settings):
    """What steps make under these settings, and how many clones the last plans of the layers have. delay: weight
    gradients are made behind the backward, and what a bucket has is reduced as soon as it is whole. again: experts'
    activations are not kept."""
    megatron_patches.apply(timeout_s=60.0, **settings)
    try:
        job = Job(pp, overlap, delay, again)
        if forced:
            for seed, manager in enumerate(job.managers):
                manager.plan_with = random_plan(seed, manager)
        made = [x for n in range(STEPS) for x in job.step(n)]
        plans = [getattr(manager, "last_plan", None) for manager in job.managers]
        return made, sum(plan.num_copies for plan in plans if plan is not None)
    finally:
        megatron_patches.revert()


def worst(found, wanted):
    """Of losses and gradients, by their norm, the largest relative difference."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).double().norm() / b.double().norm().clamp(min=1e-12)) for a, b in pairs)


def same_in_turns(pp, cases):
    """Of all ranks, {case: (clones, how far steps whose passes take turns are off from those without balancing)}.

    On one stage these are passes one after the other. Between stages Megatron's schedule orders what it receives by
    streams alone, which a CPU has not, so that its steps are others; they take turns without balancing, too."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=2 if pp > 1 else None,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    off, found = {}, {}
    for name, (forced, case) in cases.items():
        grouped = case.get("grouped_gemm", False)
        if grouped not in off:
            off[grouped], _ = steps_of(pp, pp > 1, grouped_gemm=grouped)
        turns, clones = steps_of(pp, True, forced, **case)
        found[name] = clones, worst(turns, off[grouped])
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return ranks


def moves_in_turns(mode, grouped):
    """Training whose passes take turns and whose experts move behind every step, against training without either: the
    first thing of what it keeps that differs, how far the worst does, and how many experts moved."""
    slow_programs.initialize(2)
    wanted = slow_programs.train(2, grouped=grouped)
    turns = {"overlap_moe_expert_parallel_comm": True}
    moved = slow_programs.train(2, mode, plan_with=slow_programs.shuffled(3), grouped=grouped, after=turns)
    state, kept = moved[1], wanted[1]
    off = worst([state[key] for key in kept], [kept[key] for key in kept])
    return slow_programs.difference(wanted, moved), off, moved[2].migrator.moved
