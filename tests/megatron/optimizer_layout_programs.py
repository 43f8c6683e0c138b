"""A checkpoint of Megatron's distributed optimizer, saved at EP2 and loaded at EP2 and at EP1, by any dispatcher.

Runs inside `parity_world.run_world`; no code of ours is between Megatron's optimizer and its checkpoint."""

import multiprocessing
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from slow_programs import Job, initialize

import megatron_patches


def reload(kind, folder):
    """{EP size: "loaded" or what Megatron says} for a checkpoint that was saved at EP2."""
    folder = Path(folder) / kind
    multiprocessing.current_process()._config["daemon"] = False  # Megatron's writer starts a process of its own
    _save(kind, folder)
    return {ep: _load(kind, folder, ep) for ep in (2, 1)}


def _job(kind, ep):
    initialize(ep)
    if kind == "ours":
        megatron_patches.apply(timeout_s=60.0)
    return Job(ep, after={"moe_token_dispatcher_type": "alltoall"} if kind == "alltoall" else None)


def _state(job, is_loading):
    model = job.model.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True,
                "distrib_optim_fully_reshardable_mem_efficient": False, "singleton_local_shards": False,
                "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {"model": model,
            "optimizer": job.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)}


def _save(kind, folder):
    job = _job(kind, 2)
    job.train_step()
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(_state(job, is_loading=False), str(folder))
    _end()


def _load(kind, folder, ep):
    job = _job(kind, ep)
    try:
        state = dist_checkpointing.load(_state(job, is_loading=True), str(folder))
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
        job.train_step()
        return "loaded"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _end()


def _end():
    megatron_patches.revert()
    parallel_state.destroy_model_parallel()
