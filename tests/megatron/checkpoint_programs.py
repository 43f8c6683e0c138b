"""What the ranks of the checkpoint tests do: save while experts are with other owners, load in other layouts, go on."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from slow_programs import Job, difference, initialize, shuffled, train
from torch.distributed.checkpoint.api import CheckpointException

import megatron_patches
from hybrid_ep.errors import DeadlineError
from megatron_patches import balance_slow
from megatron_patches.balance_move import Move, Mover
from recipes import checkpoint


class NoSchedule:
    """A scheduler without a say."""

    num_steps = 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def continued(folder, ep, balance="off", steps=2, grouped=False, **options):
    """Load the checkpoint in another layout: (losses of the next steps, state as loaded, state at the end)."""
    parallel_state.destroy_model_parallel()
    initialize(ep)
    wanted = {"balance_interval": 1, "layer_updates_per_iter": 2} if balance == "slow" else {}
    megatron_patches.apply(balance=balance, timeout_s=60.0, grouped_gemm=grouped, **wanted)
    job = Job(ep, **options)
    job.step = checkpoint.load(folder, job.model, job.optimizer, NoSchedule())
    if balance == "slow":
        job.migrator.plan_with = shuffled(2)
    loaded = job.logical()
    losses = [job.train_step() for _ in range(steps)]
    state = job.logical()
    megatron_patches.revert()
    return losses, loaded, state


def save_and_load(folder, options):
    """Trained with moves at EP4, loaded at EP2 and EP1 without balancing, at EP4 with clones, at EP4 with moves.

    Stacked experts (grouped=True) are read by single ones, too.
    """
    folder = Path(folder)
    initialize(4)
    _, state, job = train(4, "slow", plan_with=shuffled(1), **options)
    assert not any(manager.owners.is_identity for manager in job.migrator.layers)
    checkpoint.save(folder, job.step, job.model, job.optimizer, NoSchedule())
    grouped = options.get("grouped", False)
    megatron_patches.apply(balance="slow", balance_interval=1, layer_updates_per_iter=2, grouped_gemm=grouped)
    job.migrator.plan_with = shuffled(2)
    expected = [job.train_step() for _ in range(2)], job.logical()
    megatron_patches.revert()
    for ep, balance in ((2, "off"), (1, "off"), (4, "exact")):
        losses, loaded, _ = continued(folder, ep, balance, **{**options, "grouped": grouped and ep != 2})
        assert difference(([], state), ([], loaded)) is None, (ep, balance, difference(([], state), ([], loaded)))
        precise = 2e-2 if options.get("dtype") == "bf16" else 1e-5
        same = losses[0] == expected[0][0] or losses[0] == pytest.approx(expected[0][0], rel=1e-6) and grouped
        assert same or balance == "exact", "the first losses have the same bits"
        for mine, reference in zip(losses, expected[0], strict=True):
            assert mine == pytest.approx(reference, rel=precise), (ep, balance)
    losses, _, state = continued(folder, 4, "slow", **options)
    assert difference((losses, state), expected) is None, "resumed with its owners, it is the same run"
    return True


def names_in_megatrons_checkpoints(ep):
    """Sharded state dicts of moved experts carry logical offsets; optimizers refuse until experts are
    back with their first owners."""
    initialize(ep)
    for grouped in (False, True):
        names_of_moved_experts(ep, grouped)
    return True


def names_of_moved_experts(ep, grouped):
    megatron_patches.apply(balance="slow", balance_interval=1, layer_updates_per_iter=2, grouped_gemm=grouped)
    job = Job(ep)
    job.migrator.plan_with = shuffled(5)
    before = _offsets(job)
    job.train_step()
    job.migrator.finish()
    moved = _offsets(job)
    assert {k: v[0] for k, v in before.items()} != {k: v[0] for k, v in moved.items()}
    for (layer, local), (expert, _) in moved.items():
        assert expert == job.migrator.layers[layer].owners.experts_of(dist.get_rank() % ep)[local], (layer, local)
    assert [v[1] for v in before.values()] == [v[1] for v in moved.values()]
    with pytest.raises(ValueError, match="identity_owners"):
        job.optimizer.state_dict()
    state = job.logical()
    with balance_slow.identity_owners():
        assert _offsets(job) == before and difference(([], state), ([], job.logical())) is None
        job.optimizer.state_dict()
    saved = balance_slow.save_wrapper(lambda what: (what, _offsets(job)))("args")  # Megatron-LM's save_checkpoint
    assert saved == ("args", before)
    assert _offsets(job) == moved and difference(([], state), ([], job.logical())) is None
    megatron_patches.revert()


def _offsets(job):
    """{(layer, local expert): (expert in the global tensor, global shape)} of the experts' second matrices here."""
    found = {}
    for key, value in job.model.sharded_state_dict().items():
        parts = []
        if key.endswith(".mlp.experts.weight2"):
            parts = list(enumerate(value.build()))
        elif ".local_experts." in key and isinstance(value, ShardedTensor):
            parts = [(int(key.split("local_experts.")[1].split(".")[0]), value)]
        for local, part in parts:
            found[int(key.split(".")[2]), local] = part.global_offset[-3], part.global_shape
    assert len(found) == sum(len(mine) for mine in (m.owners.experts_of(0) for m in job.migrator.layers))
    return found


def megatrons_own(folder, dispatcher, sharding):
    """Megatron's own checkpoint of the distributed optimizer, saved at EP2: {EP: what loading it there ends in}.

    With its alltoall, without any patch of ours, and with our dispatcher.
    """
    if dispatcher == "flex":
        megatron_patches.apply(timeout_s=60.0)
    multiprocessing.current_process().daemon = False  # Megatron's writer starts a process of its own
    options, outcomes = {"after": {"moe_token_dispatcher_type": dispatcher}}, {}
    initialize(2)
    saved = Job(2, **options)
    saved.train_step()
    dist_checkpointing.save(_sharded(saved, sharding), folder)
    state = saved.logical()
    for ep in (2, 1):
        parallel_state.destroy_model_parallel()
        initialize(ep)
        try:
            different = difference(([], _load(folder, Job(ep, **options), sharding)), ([], state))
            outcomes[ep] = different or "same"
        except CheckpointException as error:  # torch's, by rank; no subclass of Exception
            outcomes[ep] = str(error)
    for writer in multiprocessing.active_children():  # Megatron leaves it running
        writer.terminate()
    return outcomes


def _sharded(job, sharding, is_loading=False):
    model = job.model.sharded_state_dict()
    options = {"metadata": {"distrib_optim_sharding_type": sharding}, "is_loading": is_loading}
    return {"model": model, "optimizer": job.optimizer.sharded_state_dict(dict(model), **options)}


def _load(folder, job, sharding):
    job.train_step()  # without Transformer Engine or Apex, Megatron's optimizer describes only state that exists
    state = dist_checkpointing.load(_sharded(job, sharding, is_loading=True), folder)
    job.model.load_state_dict(state["model"])
    with torch.no_grad():  # fp32 parameters are their own main parameters
        job.optimizer.load_state_dict(state["optimizer"])
    return job.logical()


def _moving_job(ep, timeout_s):
    initialize(ep)
    megatron_patches.apply(balance="slow", balance_interval=1000, timeout_s=timeout_s)
    job = Job(ep)
    job.train_step()
    return job, dict(enumerate(shuffled(7)(None, job.migrator.current)))


def failed_move(ep):
    """One rank cannot prepare: all raise, nothing has changed anywhere, and the next move succeeds."""
    job, changes = _moving_job(ep, 30.0)
    state, owners, prepare = job.logical(), job.migrator.current, Mover.prepare

    def out_of_memory(self, wanted):
        prepare(self, wanted)
        raise MemoryError("no staging memory")

    Mover.prepare = out_of_memory if dist.get_rank() == ep - 1 else prepare
    with pytest.raises(RuntimeError, match="no expert was moved"):
        job.migrator.move(changes)
    assert (job.migrator.current == owners).all() and difference(([], state), ([], job.logical())) is None
    Mover.prepare = prepare
    job.migrator.move(changes)
    assert (job.migrator.current != owners).any() and difference(([], state), ([], job.logical())) is None
    megatron_patches.revert()
    return True


def killed_in_a_move(ep):
    """The last rank dies when all are about to move experts; the others report what they waited for, unchanged."""
    job, changes = _moving_job(ep, 3.0)
    before = [p.detach().clone() for p in job.model.parameters()]
    job.migrator.move({})
    dist.barrier()
    if dist.get_rank() == ep - 1:
        Mover.prepare = lambda self, wanted: os.kill(os.getpid(), signal.SIGKILL)
    owners = job.migrator.current
    try:
        job.migrator.move(changes)
    except DeadlineError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))
        raise AssertionError(f"unchanged: {same and (job.migrator.current == owners).all()}, {error.site}") from error


def killed_under_way(ep):
    """The last rank dies when all have agreed to move and before it sends; the others say so in their next forward."""
    job, changes = _moving_job(ep, 3.0)
    dist.barrier()
    if dist.get_rank() == ep - 1:
        Move.start = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    job.migrator.begin(changes)
    try:
        job.train_step()
    except DeadlineError as error:
        raise AssertionError(f"site: {error.site}") from error
