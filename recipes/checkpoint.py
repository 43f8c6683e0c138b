"""Checkpoints of a run: one file a rank, loaded with weights_only, complete enough to continue bit for bit.

    checkpoint/step_000200/rank_0.pt ...     parameters, buffers, optimizer shard, scheduler, random states
    checkpoint/latest                        the name of the folder to resume from

A folder appears under its final name only when every rank has written its file, and `latest` is replaced
atomically: an interruption at any moment leaves the previous checkpoint in force.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

FORMAT = 1


def latest_step(folder: Path) -> int | None:
    """Step of the checkpoint in force, None where there is none. ValueError if `latest` is damaged."""
    pointer = folder / "latest"
    if not pointer.is_file():
        return None
    name = pointer.read_text().strip()
    step = name.removeprefix("step_")
    if not (name.startswith("step_") and step.isdigit() and (folder / name).is_dir()):
        raise ValueError(f"{pointer}={name!r}: does not name a checkpoint; write the name of one in {folder}")
    return int(step)


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Writes and publishes the state after `step` steps. Collective over all ranks."""
    final = folder / f"step_{step:06d}"
    staging = folder / f".{final.name}"
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    state = {
        "format": FORMAT,
        "step": step,
        "num_ranks": dist.get_world_size(),
        "model": {name: tensor.detach() for name, tensor in _named_tensors(model)},
        "optimizer": [_inner_state(inner) for inner in _inner_optimizers(optimizer)],
        "scheduler": scheduler.state_dict(),
        "random": _random_state(),
    }
    with open(staging / f"rank_{rank}.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    if rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        pointer = folder / ".latest"
        pointer.write_text(final.name + "\n")
        pointer.replace(folder / "latest")
        for old in folder.glob("step_*"):
            if old != final:
                shutil.rmtree(old)
    dist.barrier()


def load(folder: Path, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> int:
    """Restores this rank from the checkpoint in force, in place; returns the number of steps done."""
    step = latest_step(folder)
    if step is None:
        raise ValueError(f"{folder}: holds no checkpoint; start a new run")
    path = folder / f"step_{step:06d}" / f"rank_{dist.get_rank()}.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["format"] != FORMAT or state["num_ranks"] != dist.get_world_size():
        raise ValueError(
            f"{path}: format {state['format']} of {state['num_ranks']} ranks, but this job reads "
            f"format {FORMAT} with {dist.get_world_size()} ranks; resume with the same layout and version"
        )
    tensors = dict(_named_tensors(model))
    if tensors.keys() != state["model"].keys():
        odd = sorted(tensors.keys() ^ state["model"].keys())
        raise ValueError(f"{path}: not the parameters of this model (e.g. {odd[0]}); resume its own run")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(state["model"][name])
        for inner, saved in zip(_inner_optimizers(optimizer), state["optimizer"], strict=True):
            _restore_inner(inner, saved)
    scheduler.num_steps = 0  # Megatron adds the saved count to what is there
    scheduler.load_state_dict(state["scheduler"])
    _restore_random(state["random"])
    return step


def _named_tensors(model: torch.nn.Module):
    yield from model.named_parameters()
    yield from model.named_buffers()


def _inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers under Megatron's, with this rank's shards: dense parameters, then experts."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def _inner_state(inner: torch.optim.Optimizer) -> dict[str, Any]:
    # The main parameters are views of the model in fp32 and copies of it in bf16: saving them covers both.
    main = [[parameter.detach() for parameter in group["params"]] for group in inner.param_groups]
    return {"state": inner.state_dict(), "main": main}


def _restore_inner(inner: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    inner.load_state_dict(saved["state"])
    for group, tensors in zip(inner.param_groups, saved["main"], strict=True):
        for parameter, tensor in zip(group["params"], tensors, strict=True):
            parameter.copy_(tensor)


def _random_state() -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }


def _restore_random(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    get_cuda_rng_tracker().set_states(state["megatron"])
