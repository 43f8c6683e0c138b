"""What the ranks of the re-homing tests do: train a small Megatron GPT and compare it expert by logical expert.

Two experts a token: whichever ranks they live on, their outputs are two terms of one sum, so that floating-point sums
are the same bits in any placement. Gradients are not clipped, because the order of a norm's sum is not fixed.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from balance_programs import random_plan
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_patches
from megatron_patches.balance import SlowManager, check_supported
from megatron_patches.balance_move import Arrival, Mover
from megatron_patches.balance_slow import Migrator
from megatron_patches.optimizer_state import OptimizerStates
from recipes import checkpoint, get_recipe
from recipes.model import moe_layers, mtp_spec, set_weights_by_name, transformer_config

EXPERTS, SEQ, STEPS = 8, 16, 3


def run_config(ep, **model):
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "moe_ffn_hidden_size": 16,
        "seq_length": SEQ,
        "num_experts": EXPERTS,
        "topk": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "score_function": "sigmoid",
        "expert_bias": True,
    }
    ranks = {"num_ranks": dist.get_world_size(), "expert_parallel_size": ep, "ranks_per_node": 1}
    return get_recipe("tiny_cpu_smoke").derive(
        model={**sizes, **model}, parallel=ranks, schedule={"micro_batch_size": 1, "eval_sequences": 8}
    )


def forward(model, seed, return_schedule_plan=False):
    """(output or the plan of who makes it, its loss), of a random text as Megatron's schedules ask for them."""
    # Few different tokens: routing is skewed, and differently on every rank.
    tokens = torch.randint(0, 9, (1, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens[:, :-1], torch.arange(SEQ)[None], mask, labels=tokens[:, 1:])

    def loss(per_token):
        mean = per_token.float().mean()
        return mean, {"loss": mean.detach().clone()}  # a schedule may divide the loss where it lies

    return output, loss


class Job:
    """Model, wrapped model and optimizer of one rank. Patches must be in force already."""

    def __init__(self, ep, *, distributed=True, after=None, **model):
        self.config = run_config(ep, **model)
        pp = parallel_state.get_pipeline_model_parallel_world_size()
        model_parallel_cuda_manual_seed(1)
        megatron_config = transformer_config(self.config)
        for name, value in {"pipeline_model_parallel_size": pp, "moe_z_loss_coeff": 1e-3, **(after or {})}.items():
            setattr(megatron_config, name, value)
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, qk_layernorm=False)
        self.model = GPTModel(
            megatron_config,
            spec,
            self.config.model.vocab_size,
            SEQ,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec(self.config, megatron_config, spec),
        )
        self.model = self.model.bfloat16() if megatron_config.bf16 else self.model
        set_weights_by_name(self.model, self.config)
        megatron_config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
        self.net = DistributedDataParallel(megatron_config, ddp, self.model)
        megatron_config.no_sync_func = self.net.no_sync
        self.optimizer = megatron_optimizer.get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.1,
                clip_grad=0.0,
                bf16=megatron_config.bf16,
                params_dtype=megatron_config.params_dtype,
                use_distributed_optimizer=distributed,
            ),
            [self.net],
        )
        self.migrator = getattr(self.optimizer, "hybrid_ep_migrator", None)
        self.step, self.look = 0, None  # look(job) sees the gradients of a step before the optimizer does

    def train_step(self, microbatches=2):
        """One optimizer step on random text; the losses of this rank."""
        self.net.train()
        self.net.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(range(microbatches)),
            model=self.net,
            num_microbatches=microbatches,
            seq_length=SEQ,
            micro_batch_size=1,
            decoder_seq_length=SEQ,
        )
        if self.look is not None:
            self.look(self)
        ok, *_ = self.optimizer.step()
        assert ok
        self.step += 1
        return [float(part["loss"]) for part in losses]

    def _forward(self, micro_batches, model, return_schedule_plan=False):
        seed = 1000 * self.step + 100 * next(micro_batches) + parallel_state.get_data_parallel_rank()
        return forward(model, seed, return_schedule_plan)

    def logical(self):
        """Everything training keeps, of all ranks, by logical name: {(name, kind): flat tensor}.

        Replicas must agree. Ranges of the distributed optimizer are joined to whole parameters.
        """
        if self.migrator is not None:
            self.migrator.finish()
        states, found = OptimizerStates(self.optimizer), {}
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for name, tensor, _, owner, offset in checkpoint.entries(self.model):
            if owner is None:
                continue
            found[f"{stage} {name}", "weight"] = {0: tensor.detach().clone().flatten()}
            shard = states.shard(owner).part(offset, tensor.numel())
            assert self.step == 0 or shard.end == 0 or {"exp_avg", "exp_avg_sq"} <= set(shard.tensors)
            for kind, part in shard.tensors.items():
                found[f"{stage} {name}", kind] = {shard.start: part.clone()}
        for name, buffer in self.model.named_buffers():
            if "expert_bias" in name:
                found[f"{stage} {name}", "bias"] = {0: buffer.clone()}
        merged = {}
        for one in of_all_ranks({(key, start): part for key, parts in found.items() for start, part in parts.items()}):
            for (key, start), part in one.items():
                before = merged.setdefault(key, {}).setdefault(start, part)
                assert torch.equal(before, part), f"replicas of {key} differ"
        return {key: torch.cat([part for _, part in sorted(parts.items())]) for key, parts in merged.items()}


def of_all_ranks(tensors):
    """Every rank's {key: tensor}, by rank. As bytes: a pickled tensor is an archive of its own, which Megatron has
    torch read with care, and a training's thousands of them cost more than the training."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {key: (t.dtype, t.view(torch.uint8).numpy()) for key, t in tensors.items()})
    return [{key: torch.from_numpy(a).view(dtype) for key, (dtype, a) in one.items()} for one in everyone]


def initialize(ep, pp=1):
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
    )


def shuffled(seed):
    """Forced plans: another permutation of all experts of all layers at every call, the same on all ranks."""
    rng = np.random.default_rng(seed)
    return lambda load, current: np.stack([rng.permutation(EXPERTS) for _ in current])


def train(ep, balance="off", steps=STEPS, plan_with=None, grouped=False, **options):
    """(losses, logical state, job) after a few steps with experts moved after each of them."""
    wanted = {"balance_interval": 1, "layer_updates_per_iter": 2} if balance in ("slow", "both") else {}
    megatron_patches.apply(balance=balance, timeout_s=60.0, grouped_gemm=grouped, **wanted)
    job = Job(ep, **options)
    if plan_with is not None:
        job.migrator.plan_with = plan_with
        job.migrator.move({0: np.arange(EXPERTS)[::-1]})  # before there are moments
    losses = [job.train_step() for _ in range(steps)]
    state = job.logical()
    megatron_patches.revert()
    return losses, state, job


def difference(one, other):
    """The first thing in which two trainings differ, or None."""
    if one[0] != other[0]:
        return f"losses {one[0]} {other[0]}"
    keys = sorted(one[1].keys() ^ other[1].keys(), key=str)
    different = [key for key in one[1] if key in other[1] and not torch.equal(one[1][key], other[1][key])]
    return str((keys + different)[0]) if keys or different else None


def moved_everywhere(job):
    return job.migrator.moved > 8 and not any(m.owners.is_identity for m in job.migrator.layers)


def bit_equality(ep, variants, pp=1):
    """Off against slow with every expert moved after every step, for each dict of options of `Job`."""
    initialize(ep, pp)
    for options in variants:
        off = train(ep, **options)
        slow = train(ep, "slow", plan_with=shuffled(ep), **options)
        assert moved_everywhere(slow[2]) and len(off[0]) == STEPS
        assert difference(off, slow) is None, (options, difference(off, slow))
    return True


def gradients_of(found):
    """A look for `Job`: the reduced fp32 gradients of a step before the optimizer sees them, by logical name."""

    def look(job):
        if job.step == 0:
            for name, tensor, _, owner, offset in checkpoint.entries(job.model):
                if owner is not None:
                    found[name] = owner.main_grad.view(-1)[offset : offset + tensor.numel()].double()

    return look


def clones_give_the_gradients_of_off(ep, pp, tolerance, options, grouped=False):
    """Exact and both modes in a GPT with Megatron's DDP, two micro-batches of which the first does not synchronise.

    Sums have another order than without balancing, so gradients agree within `tolerance` of their norm.
    """
    initialize(ep, pp)
    found = {mode: {} for mode in ("off", "exact", "both")}
    losses = {}
    for mode in found:
        wanted = {"balance_interval": 1, "layer_updates_per_iter": 2} if mode == "both" else {}
        megatron_patches.apply(balance=mode, timeout_s=60.0, grouped_gemm=grouped, **wanted)
        job = Job(ep, distributed=False, topk=4, **options)
        if mode == "both":
            job.migrator.move(dict(enumerate(shuffled(9)(None, job.migrator.current))))
        job.look = gradients_of(found[mode])
        managers = [layer.token_dispatcher._comm_manager for layer in moe_layers(job.model)]
        for seed, manager in enumerate(managers if mode != "off" else []):
            manager.plan_with = random_plan(seed, manager)
        losses[mode] = [loss for _ in range(2) for loss in job.train_step(microbatches=3)]
        assert mode == "off" or any(manager.last_plan.num_copies for manager in managers)
        megatron_patches.revert()
    everyone, stage = {}, parallel_state.get_pipeline_model_parallel_rank()
    for mode, mine in found.items():
        of_ranks = of_all_ranks({(stage, name): value for name, value in mine.items()})
        everyone[mode] = {key: value for one in of_ranks for key, value in one.items()}
        assert losses[mode] == pytest.approx(losses["off"], rel=tolerance), mode
    return {
        mode: max(float((everyone[mode][k] - g).norm() / g.norm().clamp(min=1e-12)) for k, g in everyone["off"].items())
        for mode in ("exact", "both")
    }


def mutants(ep, grouped=False):
    """Broken movers that the comparison must notice; returns those it missed."""
    initialize(ep)
    common = {"grouped": grouped}
    off, missed = train(ep, **common), []
    take, pieces, begin, finish = Arrival.take, Mover.pieces, Migrator.begin, Migrator.finish

    def without(*names):
        return lambda self, layer, new: (p for p in pieces(self, layer, new) if p.name not in names)

    def lost(self):
        return [(piece, torch.zeros_like(received)) for piece, received in take(self)]

    def behind_the_step(self):  # in its begin, or where the test looks
        return finish(self) if self.steps != self.begun or self.steps == STEPS else None

    def remembered(self, changes):
        finish(self)
        self.begun = self.steps
        begin(self, changes)

    in_bf16 = {"dtype": "bf16", **common}
    off_bf16 = train(ep, **in_bf16)
    no_moments = {(Mover, "pieces"): without("exp_avg", "exp_avg_sq")}
    late = {(Migrator, "finish"): behind_the_step, (Migrator, "begin"): remembered}
    broken_movers = [
        ("no moments", no_moments),
        ("no second moment", {(Mover, "pieces"): without("exp_avg_sq")}),
        ("no data", {(Arrival, "take"): lost}),
        ("no weights", {(Mover, "pieces"): without("weight")}),
        ("no fp32 copies", {(Mover, "pieces"): without("main")}),
        ("weights land behind the forward", {(SlowManager, "settle"): lambda self: None}),
        ("optimizer state lands behind the step", late),
    ]
    for name, broken in broken_movers[3 if grouped else 0 :]:
        before = {(owner, attribute): getattr(owner, attribute) for owner, attribute in broken}
        for (owner, attribute), function in broken.items():
            setattr(owner, attribute, function)
        reference, options = (off_bf16, in_bf16) if name == "no fp32 copies" else (off, common)
        if difference(reference, train(ep, "slow", plan_with=shuffled(3), **options)) is None:
            missed.append(name)
        for (owner, attribute), function in before.items():
            setattr(owner, attribute, function)
    assert difference(off, train(ep, "slow", plan_with=shuffled(3), **common)) is None
    return missed


def queued(ep, grouped):
    """As on a GPU, whose stream waits for what comes: [what a move asked of its messages, in order]. The host waits in
    the stream's place, since gloo knows none and is asked once."""
    initialize(ep)
    off, asked = train(ep, grouped=grouped), []

    def asks(name):
        def asking(self):
            asked.append((name, self.transfer.what.rpartition(" ")[2]))
            assert name == "follow" or not self.staged, "it has landed"
            originals["wait"](self)

        return asking

    originals = {name: getattr(Arrival, name) for name in ("follow", "wait")}
    for name in originals:
        setattr(Arrival, name, asks(name))
    prepare = Mover.prepare

    def prepared(self, changes):
        move = prepare(self, changes)
        move._queues = True
        return move

    Mover.prepare = prepared
    assert difference(off, train(ep, "slow", plan_with=shuffled(3), grouped=grouped)) is None
    Mover.prepare = prepare
    for name, original in originals.items():
        setattr(Arrival, name, original)
    return asked


def schedule(ep):
    """The planner's own moves: at the interval, layer by layer, the same on all ranks, and only if they pay."""
    initialize(ep)
    original = megatron_optimizer.get_megatron_optimizer
    wanted = {"balance": "slow", "balance_interval": 2, "layer_updates_per_iter": 1}
    megatron_patches.apply(**wanted)
    job, moved, travels = Job(ep), [], []
    for _ in range(4):
        experts = job.migrator.layers[0].experts
        loads = job.migrator.window.reduced(experts.ep_group, experts.dp_group)
        job.train_step()
        travels.append([manager.arriving is not None for manager in job.migrator.layers])
        sent = job.migrator.current
        job.migrator.finish()
        moved.append([not manager.owners.is_identity for manager in job.migrator.layers])
        # What has just been sent is not in force before somebody asks for it.
        assert (sent != job.migrator.current).any(axis=1).tolist() == travels[-1]
    assert travels[:3] == [[False, False], [True, False], [False, True]], travels
    assert moved[:3] == [[False, False], [True, False], [True, True]], moved
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (job.migrator.current.tolist(), loads.tolist()))
    assert all(one == everyone[0] for one in everyone)
    # Tokens of three steps, both micro-batches, all ranks, two experts each; evaluation does not count.
    assert loads.sum(axis=1) == pytest.approx([2 * dist.get_world_size() * SEQ * 2] * 2, rel=1e-3)
    before = job.migrator.window.state()[0]
    with torch.no_grad():
        job._forward(iter([0]), job.net)
    job.migrator.window.advance()
    assert (job.migrator.window.state()[0] <= before).all()
    megatron_patches.apply(**wanted, balance_move_cost=1e9)
    dear = Job(ep)
    for _ in range(3):
        dear.train_step()
    assert dear.migrator.moved == 0
    megatron_patches.revert()
    assert megatron_optimizer.get_megatron_optimizer is original
    return True


def apart(ep):
    """Covariances of micro-batches reach the planner, the same on all ranks, and a checkpoint has them."""
    initialize(ep)
    megatron_patches.apply(balance="slow", balance_interval=2, balance_apart=True)
    job, given = Job(ep), []
    planner = job.migrator.plan_with

    def plan_with(load, current):
        given.append(job.migrator.covariance)
        return planner(load, current)

    job.migrator.plan_with = plan_with
    for _ in range(4):
        job.train_step()
    assert given and all(joint.shape == (2, EXPERTS, EXPERTS) for joint in given)
    for joint in given:
        assert (joint == joint.swapaxes(1, 2)).all() and (np.diagonal(joint, axis1=1, axis2=2) > 0).any()
        # Every token chooses two experts: the loads of a micro-batch have one sum, so rows sum to nothing.
        np.testing.assert_allclose(joint.sum(axis=2), 0, atol=2e-2 * np.abs(joint).max() + EXPERTS)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ([joint.tolist() for joint in given], job.migrator.current.tolist()))
    assert all(one == everyone[0] for one in everyone)
    state = job.migrator.state()
    other = Job(ep)
    other.migrator.restore(state)
    groups = (job.migrator.layers[0].experts.ep_group, job.migrator.layers[0].experts.dp_group)
    assert (other.migrator.window.covariance(*groups) == job.migrator.window.covariance(*groups)).all()
    megatron_patches.revert()
    return True


def refusals(ep):
    """What cannot be moved is refused by the name of its flag, and slow balancing without an optimizer says so."""
    initialize(ep)
    megatron_patches.apply(balance="slow")
    with pytest.raises(ValueError, match="--moe-grouped-gemm"):
        check_supported(SimpleNamespace(moe_grouped_gemm=True), 1, "slow", clones=False)
    with pytest.raises(ValueError, match="--expert-tensor-parallel-size"):
        check_supported(SimpleNamespace(), 2, "slow", clones=False)
    check_supported(SimpleNamespace(gradient_accumulation_fusion=True), 1, "slow", clones=False)
    job = Job(ep)
    part = job.optimizer.chained_optimizers[0]
    for owner, name in (
        (part.config, "use_precision_aware_optimizer"),
        (part.config, "optimizer_cpu_offload"),
        (part.ddp_config, "overlap_param_gather"),
        (part.ddp_config, "use_megatron_fsdp"),
    ):
        setattr(owner, name, True)
        with pytest.raises(ValueError, match="--" + name.replace("_", "-")):
            OptimizerStates(job.optimizer)
        setattr(owner, name, False)
    with pytest.raises(ValueError, match="--optimizer"):
        OptimizerStates(SimpleNamespace(optimizer=object(), config=part.config))
    for manager in job.migrator.layers:
        manager.record = None
    with pytest.raises(RuntimeError, match="attach"):
        job.train_step()
    megatron_patches.revert()
    return True
