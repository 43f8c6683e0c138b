"""What the ranks do in the tests of virtual stages: each has several parts of the model, whose forwards and backwards
take turns as Megatron's interleaved schedule has them."""

import torch.distributed as dist
from balance_programs import random_plan
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from slow_programs import EXPERTS, SEQ, forward, run_config

import megatron_patches
from megatron_patches import weights
from recipes.model import moe_layers, set_weights_by_name, transformer_config

EP, PP, CHUNKS, LAYERS_A_CHUNK, MICRO_BATCHES = 2, 2, 2, 2, 4


def stages(config, megatron, chunks, **ddp):
    """(models, the same under Megatron's DDP) of one rank: its part of a pipeline, in so many virtual stages, or in one
    that is none. config: the recipe's; megatron: Megatron's; ddp: of DistributedDataParallelConfig."""
    wrapped = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, qk_layernorm=False)
    models = []
    for chunk in range(chunks):
        stage = {"ignore_virtual": False, "vp_stage": chunk if chunks > 1 else None}
        model = GPTModel(
            megatron,
            spec,
            config.model.vocab_size,
            SEQ,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=False,
            vp_stage=stage["vp_stage"],
        )
        set_weights_by_name(model, config)
        models.append(model)
    megatron.finalize_model_grads_func = finalize_model_grads
    return models, [DistributedDataParallel(megatron, wrapped, model) for model in models]


class Chunks:
    """The parts of one rank, under Megatron's DDP, and their gradients of a step."""

    def __init__(self, **after):
        model_parallel_cuda_manual_seed(1)
        config = run_config(EP, num_layers=PP * CHUNKS * LAYERS_A_CHUNK, topk=4)
        megatron = transformer_config(config)
        sizes = {"pipeline_model_parallel_size": PP, "virtual_pipeline_model_parallel_size": CHUNKS}
        for name, value in {**sizes, "microbatch_group_size_per_vp_stage": PP, **after}.items():
            setattr(megatron, name, value)
        self.models, self.nets = stages(config, megatron, CHUNKS)
        megatron.no_sync_func = [net.no_sync for net in self.nets]
        self.layers = [layer for model in self.models for layer in moe_layers(model)]

    def step(self, number):
        """(losses, {name: gradient}) of a step that ends before the optimizer's."""
        for net in self.nets:
            net.train()
            net.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(range(100 * number, 100 * number + MICRO_BATCHES)) for _ in self.nets],
            model=self.nets,
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQ,
            micro_batch_size=1,
            decoder_seq_length=SEQ,
        )
        found = {
            (chunk, name): parameter.main_grad.double()
            for chunk, model in enumerate(self.models)
            for name, parameter in model.named_parameters()
        }
        return [float(part["loss"]) for part in losses], found

    def _forward(self, micro_batches, model):
        return forward(model, next(micro_batches) + 1000 * parallel_state.get_data_parallel_rank())


def initialize():
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=PP,
        virtual_pipeline_model_parallel_size=CHUNKS,
        expert_model_parallel_size=EP,
        expert_tensor_parallel_size=1,
    )


def differences(found, wanted):
    """The worst of losses, and of gradients by their norm, in which steps differ from those wanted."""
    worst = 0.0
    for (losses, gradients), (right, by_name) in zip(found, wanted, strict=True):
        worst = max([worst, *(abs(a - b) / abs(b) for a, b in zip(losses, right, strict=True))])
        for name, gradient in by_name.items():
            worst = max(worst, float((gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)))
    return worst


def clones_and_weights(after):
    """Steps of exact balancing and of travelling weights against those of neither: {what: worst difference}, the clones
    of a step, and layers whose weights nobody had asked for, by step."""
    initialize()
    steps, worst, missed = 3, {}, []
    megatron_patches.apply(timeout_s=60.0, grouped_gemm=True)
    job = Chunks(**after)
    wanted = [job.step(n) for n in range(steps)]
    megatron_patches.revert()

    megatron_patches.apply(timeout_s=60.0, grouped_gemm=True, balance="exact")
    job = Chunks(**after)
    for seed, layer in enumerate(job.layers):
        manager = layer.token_dispatcher._comm_manager
        manager.plan_with = random_plan(seed, manager)
    worst["exact"] = differences([job.step(n) for n in range(steps)], wanted)
    copies = sum(layer.token_dispatcher._comm_manager.last_plan.num_copies for layer in job.layers)
    megatron_patches.revert()

    megatron_patches.apply(timeout_s=60.0, grouped_gemm=True, move="weights")
    job, found = Chunks(**after), []
    for n in range(steps):
        found.append(job.step(n))
        weights.changed()  # the optimizer would have
        counted = sum(group.prefetcher.statistics.missed for group in weights.live())
        missed.append(counted - sum(missed))
    worst["weights"] = differences(found, wanted)
    megatron_patches.revert()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (worst, copies, missed))
    return ranks
