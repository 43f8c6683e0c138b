"""One rank of a parity run: trains a list of cases in one world and records loss and gradient norm.

A case is (variant, dispatcher, EP size). Weights depend on nothing but names: dense parameters are seeded
by their name, experts by their global id, data by the global rank. So every case of a variant has one right
answer, and a token that reaches the wrong expert changes it. (Megatron under the CPU generator would give
all EP ranks the same experts, and hide exactly that.) `run_cases` is what `parity_world.run_world` runs on
every rank.
"""

import contextlib
import dataclasses
import time
import types
import warnings
import zlib

import parity_field_notes

VOCABULARY, SEQUENCE, MICRO_BATCH = 128, 32, 2
LAYERS, HIDDEN, EXPERTS, TOPK = 2, 64, 8, 2


@dataclasses.dataclass(frozen=True)
class Variant:
    """Training options on top of the plain model.

    config: TransformerConfig overrides. dtype: of parameters and activations. microbatches: in a step.
    starved: this many experts, the last ones, never get a token; opening: they get none at first, until their bias,
    which starts at -opening, has been raised. tolerance, norm_tolerance: largest relative
    difference of loss and of gradient norm. overlap: 1F1B expert-parallel overlap schedule. same_ep: compare
    with alltoall at the same EP size only. since: first megatron-core minor release that can run it.
    """

    config: dict = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    microbatches: int = 2
    starved: int = 0
    opening: float = 0.0
    tolerance: float = 2e-6
    norm_tolerance: float = 2e-6
    overlap: bool = False
    same_ep: bool = False
    since: int = 16


SHARED = {"moe_shared_expert_intermediate_size": 2 * HIDDEN}
# Sigmoid scores with a bias that Megatron raises by 0.1 a step for experts below the mean: closed, then open.
OPENING = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.1,
}
VARIANTS = {
    "plain": Variant(),
    "bf16": Variant(dtype="bfloat16", tolerance=2e-4, norm_tolerance=5e-3, same_ep=True),
    "recompute": Variant({"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "shared": Variant(SHARED),
    "shared_overlap": Variant({**SHARED, "moe_shared_expert_overlap": True}, since=18),
    "overlap_1f1b": Variant(microbatches=4, overlap=True),
    "capacity": Variant({"moe_expert_capacity_factor": 0.9}),
    "pad_to_capacity": Variant({"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}),
    "notes_fp32": Variant(),
    "notes_bf16": Variant(dtype="bfloat16"),
    "notes_forced_fp32": Variant({"moe_router_force_load_balancing": True}),
    "notes_forced_bf16": Variant({"moe_router_force_load_balancing": True}, dtype="bfloat16"),
    "notes_opening_fp32": Variant(OPENING, starved=3, opening=0.7),
    "notes_opening_bf16": Variant(OPENING, dtype="bfloat16", starved=3, opening=0.7),
    "starved": Variant({"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}, starved=2),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run. dispatcher: allgather, alltoall, or ours through one of its hooks. overlap: None
    follows the variant. sabotage: a bug put into our dispatcher on purpose. reference: hybrid_ep.reference
    for its engine. seed: of weights and data. grouped: our experts in place of SequentialMLP. broken: one of
    parity_field_notes.BREAKS put into them. move: what travels in ours, experts' weights need `grouped`."""

    variant: str
    dispatcher: str
    ep: int
    steps: int
    overlap: bool | None = None
    sabotage: str = ""
    reference: bool = False
    seed: int = 0
    grouped: bool = False
    broken: str = ""
    move: str = "tokens"


def build_config(case, torch):
    """The complete TransformerConfig of a case."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    variant = VARIANTS[case.variant]
    dtype = getattr(torch, variant.dtype)
    options = dict(variant.config)
    if case.dispatcher in ("token_dispatcher", "deep_ep"):
        options["moe_flex_dispatcher_backend"] = "hybridep"
    kind = "flex" if case.dispatcher in ("token_dispatcher", "deep_ep") else case.dispatcher
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=4 * HIDDEN,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=2 * HIDDEN,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=kind,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        **options,
    )
    # Megatron admits the overlap schedule for bf16 and fp16 only. Nothing in the schedule depends on it,
    # and fp32 compares a thousand times closer, so the switch is set behind the validation.
    config.overlap_moe_expert_parallel_comm = overlapped(case)
    return config


def overlapped(case):
    """Does this case run the 1F1B overlap schedule?"""
    return VARIANTS[case.variant].overlap if case.overlap is None else case.overlap


def build_model(case, config, torch):
    """A GPT whose weights depend on parameter names and global expert ids alone."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    variant = VARIANTS[case.variant]
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE
        )
    if config.bf16:
        model = model.bfloat16()

    def seed(parameter, *names):
        generator = torch.Generator().manual_seed(zlib.crc32("/".join(map(str, names)).encode()) + case.seed)
        with torch.no_grad():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.dtype))

    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and ".experts." not in name:
            seed(parameter, name)
    for number, layer in enumerate(model.decoder.layers):
        experts = layer.mlp.experts
        for local, expert_id in enumerate(layer.mlp.local_expert_indices):
            if hasattr(experts, "expert_weights"):
                matrices = experts.expert_weights(local)
            else:
                matrices = dict(experts.local_experts[local].named_parameters())
            for name, parameter in matrices.items():
                seed(parameter, "layer", number, "expert", expert_id, name)
        if variant.starved:
            layer.mlp.router.expert_bias[-variant.starved :] = -variant.opening or -1e4
    return model


def train(case, torch):
    """Run one case. Returns {"loss", "grad_norm", "empty" expert groups, "expert_output" norm}, a list each."""
    from megatron.core import distributed, optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    variant = VARIANTS[case.variant]
    config = build_config(case, torch)
    model = build_model(case, config, torch)
    wrapped = distributed.DistributedDataParallel(
        config,
        distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        ),
        model,
    )
    adam = optimizer.get_megatron_optimizer(
        optimizer.OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [wrapped],
    )
    config.finalize_model_grads_func = lambda models, tokens=None, **_: distributed.finalize_model_grads(models, tokens)
    position = torch.arange(SEQUENCE).unsqueeze(0).expand(MICRO_BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)

    def mean_loss(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides loss in place

    def forward(batches, network, return_schedule_plan=False):
        batch = next(batches)
        run = network.build_schedule_plan if return_schedule_plan else network
        return run(batch[:, :-1].contiguous(), position, mask, labels=batch[:, 1:].contiguous()), mean_loss

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = torch.randint(
        0,
        VOCABULARY,
        (case.steps, variant.microbatches, MICRO_BATCH, SEQUENCE + 1),
        generator=torch.Generator().manual_seed(1000 + rank + 1000 * case.seed),
    )
    record, seen = {"loss": [], "grad_norm": [], "empty": [], "expert_output": []}, watch_experts(model)
    for step in range(case.steps):
        wrapped.zero_grad_buffer()
        adam.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(data[step]),
            model=wrapped,
            seq_length=SEQUENCE,
            num_microbatches=variant.microbatches,
            micro_batch_size=MICRO_BATCH,
            decoder_seq_length=SEQUENCE,
        )
        _, grad_norm, _ = adam.step()
        loss = torch.stack([output["loss"] for output in outputs]).mean().double()
        torch.distributed.all_reduce(loss)
        record["loss"].append(loss.item() / world)
        record["grad_norm"].append(float(grad_norm))
        facts = torch.tensor([seen.pop("empty", 0.0), seen.pop("squares", 0.0)], dtype=torch.float64)
        torch.distributed.all_reduce(facts)
        record["empty"].append(int(facts[0]))
        record["expert_output"].append(float(facts[1].sqrt()))
    return record


def watch_experts(model):
    """A dict that sums over this rank's experts: groups without a token ("empty"), squares of outputs ("squares")."""
    seen = {}

    def look(_experts, arguments, results):
        seen["empty"] = seen.get("empty", 0.0) + float((arguments[1] == 0).sum())
        seen["squares"] = seen.get("squares", 0.0) + float(results[0].detach().double().square().sum())

    for layer in model.decoder.layers:
        layer.mlp.experts.register_forward_hook(look)
    return seen


@contextlib.contextmanager
def patched(case):
    """The patch a case needs, and none of it afterwards."""
    import megatron_patches

    if case.dispatcher in ("token_dispatcher", "deep_ep"):
        options = {"grouped_gemm": True} if case.grouped else {}
        options |= {"move": case.move} if case.move != "tokens" else {}
        if case.reference:
            from hybrid_ep.reference import ReferenceBuffer

            options["buffer_class"] = ReferenceBuffer
        megatron_patches.apply(case.dispatcher, **options)
    try:
        with sabotaged(case.sabotage), parity_field_notes.built(case):
            yield
    finally:
        megatron_patches.revert()


SABOTAGE = ("probs_rolled", "row_dropped", "prob_grad_zeroed", "rows_swapped", "hidden_grad_scaled")


@contextlib.contextmanager
def sabotaged(kind):
    """Put one bug between our dispatcher and its operators, to show that parity notices."""
    if not kind:
        yield
        return
    import torch

    from megatron_patches import manager

    honest = manager.functional

    def dispatch_with_permute(buffer, hidden, **keywords):
        rows, probs, scale, counts, handle = honest.dispatch_with_permute(buffer, hidden, **keywords)
        if kind == "probs_rolled":
            probs = probs.roll(1)
        elif kind == "row_dropped":
            rows = torch.cat([rows[:1] * 0, rows[1:]])
        elif kind == "prob_grad_zeroed":
            probs = probs.detach() + 0 * probs
        elif kind == "rows_swapped":
            rows = torch.cat([rows[-1:], rows[1:-1], rows[:1]])
        elif kind == "hidden_grad_scaled":
            rows = rows.detach() + 0.999 * (rows - rows.detach())
        return rows, probs, scale, counts, handle

    manager.functional = types.SimpleNamespace(
        dispatch_with_permute=dispatch_with_permute, combine_with_unpermute=honest.combine_with_unpermute
    )
    try:
        yield
    finally:
        manager.functional = honest


def run_cases(cases):
    """Train every case in this world, in order. Returns {"megatron_core", "torch", "records": [...]} on
    every rank.

    Cases of one EP size should be neighbours: another size makes new process groups, and gloo keeps the old
    ones.
    """
    import megatron.core
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    records, ep = [], None
    for case in cases:
        if case.ep != ep:
            if ep is not None:
                parallel_state.destroy_model_parallel()
            ep = case.ep
            parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
            model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        if VARIANTS[case.variant].config.get("moe_router_force_load_balancing"):
            model_parallel_cuda_manual_seed(1234)  # the random logits of a run are those of the run before
        start = time.monotonic()
        with patched(case):
            record = train(case, torch)
        records.append({**record, "seconds": time.monotonic() - start})
    if ep is not None:
        parallel_state.destroy_model_parallel()
    version = megatron.core.__version__.partition("+")[0]  # without the commit of whatever repository this is
    return {"megatron_core": version, "torch": torch.__version__, "records": records}
