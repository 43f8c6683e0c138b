"""What the ranks of the load statistics tests do: a small GPT under Megatron's schedule, its routers counted twice."""

import atexit
import os
import signal
from pathlib import Path

import router_programs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from slow_programs import EXPERTS, Job, initialize

import megatron_patches
from hybrid_ep.balance.statistics import parts_folder
from megatron_patches import load_stats
from recipes import get_recipe
from recipes.model import build_model, moe_layers

MICROBATCHES, ITERATIONS, LENGTH = 2, 6, 8


def _model(ep, balance, recompute):
    """(model, its MoE layers)"""
    config = get_recipe("tiny_cpu_smoke").derive(
        parallel={"num_ranks": ep, "expert_parallel_size": ep, "ranks_per_node": 1, "balance": balance},
        model={"num_layers": 2, "seq_length": LENGTH, "num_experts": 8},
    )
    model = build_model(config)
    if recompute:
        model.config.recompute_granularity, model.config.recompute_method = "full", "uniform"
        model.config.recompute_num_layers = 1
    return model, moe_layers(model)


def _count_from_outside(layers, recompute, seen):
    """Every map a router makes for the first time: without gradients where the layer is going to be recomputed."""
    for number, layer in enumerate(layers, 1):

        def hook(router, _inputs, output, number=number):
            if router.training and torch.is_grad_enabled() != recompute:
                key = seen["iteration"], number
                seen[key] = seen.get(key, 0) + output[1].long().sum(0)

        layer.router.register_forward_hook(hook)


def collect(path, wanted, balance="off", recompute=False, die_in=None, environment=None):
    """Train ITERATIONS iterations, each with an evaluation after it. Counts of all ranks as {iteration: {layer: []}},
    and as "sources" what each rank sent to each expert in the iterations that are wanted.

    die_in: the iteration in which the forward raises, on every rank.
    """
    os.environ.update(environment or {})
    ep = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    model_parallel_cuda_manual_seed(1)
    statistics = {"load_stats": path, "load_stats_range": wanted} if wanted else {}
    reach = {"balance_clones": "anywhere"} if balance == "exact" else {}
    megatron_patches.apply(ranks_per_node=1, balance=balance, **reach, **statistics)
    model, layers = _model(ep, balance, recompute)
    seen = {}
    _count_from_outside(layers, recompute, seen)
    positions = torch.arange(LENGTH)[None]
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def step(micro_batches, model):
        seed = 1000 * seen["iteration"] + 10 * next(micro_batches) + dist.get_rank()
        if seen["iteration"] == die_in:
            raise FloatingPointError("on purpose")
        tokens = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
        return model(tokens, positions, mask, labels=tokens), lambda out: (out.float().mean(), {})

    def iteration(number, **keywords):
        seen["iteration"] = number
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(MICROBATCHES)),
            model=model,
            micro_batch_size=1,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            **keywords,
        )

    try:
        for number in range(1, ITERATIONS + 1):
            model.train()
            iteration(number)
            model.eval()
            with torch.no_grad():
                iteration(number + 100, forward_only=True)
    except FloatingPointError:
        if number != die_in:
            raise
    counts, own = {}, torch.zeros(8, dtype=torch.int64)
    for (number, layer), mine in sorted((k, v) for k, v in seen.items() if k != "iteration"):
        own += mine if wanted and wanted[0] <= number <= wanted[1] else 0
        dist.all_reduce(mine)
        counts.setdefault(number, {})[layer] = mine.tolist()
    of_ranks = [torch.empty_like(own) for _ in range(ep)]
    dist.all_gather(of_ranks, own)
    return {**counts, "sources": torch.stack(of_ranks).tolist()}


def collect_and_revert(*arguments):
    """As `collect`; afterwards Megatron is as before and nobody counts."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.moe_layer import MoELayer

    before = [getattr(schedules, name) for name in load_stats.NAMES], MoELayer.__init__
    counts = collect(*arguments)
    assert before != ([getattr(schedules, name) for name in load_stats.NAMES], MoELayer.__init__)
    megatron_patches.revert()
    assert before == ([getattr(schedules, name) for name in load_stats.NAMES], MoELayer.__init__)
    assert load_stats._collector is None
    return counts


def collect_beside_a_dense_stage(path, wanted):
    """The last stage of two has an MoE layer, the first none: {iteration: {layer: []}} of the last, by itself."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    megatron_patches.apply(ranks_per_node=1, load_stats=path, load_stats_range=wanted)
    of_config, seen = router_programs.config(1), {}
    has_experts = parallel_state.is_pipeline_last_stage()
    stage = router_programs.layer(of_config) if has_experts else torch.nn.Identity()
    stage.config = of_config
    _count_from_outside([stage] if has_experts else [], False, seen)
    x = torch.rand(LENGTH, 1, of_config.hidden_size)
    train = load_stats.schedule(lambda *, model: model[0](x))
    for seen["iteration"] in (1, 2, 3):
        train(model=[stage])
    return {number: {1: seen[number, 1].tolist()} for number in (1, 2) if has_experts}


def collect_in_a_pipeline(complete, early):
    """Two stages of two MoE layers each, EP2, four iterations; ranges 2-3 into `complete` and 2-9 into `early`.

    Counts of all ranks for both, [iteration][layer][expert], and of each rank in iterations 2 and 3, [rank][expert];
    layers are numbered here without asking Megatron.
    """
    initialize(2, pp=2)
    stage, counts = parallel_state.get_pipeline_model_parallel_rank(), []
    for path, last in ((complete, 3), (early, 9)):
        megatron_patches.apply(load_stats=path, load_stats_range=(2, last), timeout_s=60.0)
        job, seen = Job(2, num_layers=4), torch.zeros(4, 4, EXPERTS, dtype=torch.int64)
        for local, layer in enumerate(moe_layers(job.model)):

            def hook(_router, _inputs, output, job=job, seen=seen, number=2 * stage + local):
                seen[job.step, number] += output[1].long().sum(0)

            layer.router.register_forward_hook(hook)
        assert len(moe_layers(job.model)) == 2
        for _ in range(4):
            job.train_step()
        megatron_patches.revert()
        of_ranks = [torch.empty(EXPERTS, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, seen[1:3].sum(dim=(0, 1)))
        dist.all_reduce(seen)
        counts.append((seen.tolist(), torch.stack(of_ranks).tolist()))
    return counts


def until_exit(path):
    """One rank of a script that knows TensorRT-LLM's variables only and ends inside their range."""
    variables = {"EXPERT_STATISTIC_PATH": path, "EXPERT_STATISTIC_ITER_RANGE": "3-9"}
    counts = collect(None, None, "off", False, None, variables)
    assert not Path(path).exists() and not parts_folder(path).exists()
    atexit._run_exitfuncs()  # what the interpreter does when a script returns or raises
    return counts


def until_sigterm(path):
    """As `until_exit`, ended by a launcher."""
    collect(path, (3, 8))
    os.kill(os.getpid(), signal.SIGTERM)
