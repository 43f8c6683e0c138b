"""Checkpoints of a run: one file a rank, loaded with weights_only, complete enough to continue bit for bit.

    checkpoint/step_000200/rank_0.pt ...     what rank 0 keeps, by logical name; schedule, random states
    checkpoint/latest                        the name of the folder to resume from

Names are logical: an expert is called by its id wherever it lives, an optimizer shard by the elements it covers. So a
run continues at any expert-parallel size, on any number of ranks, with balancing on or off. On the ranks it was written
by it continues bit for bit; on another number of ranks the batches differ, and random states start afresh.

A folder appears under its final name only when every rank has written its file, and `latest` is replaced
atomically: an interruption at any moment leaves the previous checkpoint in force.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_patches.optimizer_state import MAIN, OptimizerStates

from .model import logical_experts

FORMAT = 2
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LOCAL_EXPERT = re.compile(r"(.*)\.experts\.local_experts\.(\d+)\.(.*)")


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
    migrator = getattr(optimizer, "hybrid_ep_migrator", None)
    balance = migrator.state() if migrator is not None else None  # first: experts under way arrive
    state = {
        "format": FORMAT,
        "step": step,
        "num_ranks": dist.get_world_size(),
        "model": {entry.name: entry.tensor.detach() for entry in entries(model) if entry.is_ours},
        "optimizer": _shards(model, OptimizerStates(optimizer)),
        "scheduler": scheduler.state_dict(),
        "random": _random_state(),
        "balance": balance,
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
    """Restores this rank from the checkpoint in force, in place; returns the number of steps done.

    Files are mapped, not read: a rank touches what it needs of them.
    """
    step = latest_step(folder)
    if step is None:
        raise ValueError(f"{folder}: holds no checkpoint; start a new run")
    path = folder / f"step_{step:06d}"
    files = _open_all(path)
    mine = files[dist.get_rank()] if len(files) == dist.get_world_size() else None
    migrator = getattr(optimizer, "hybrid_ep_migrator", None)
    if migrator is not None and mine is not None and mine["balance"] is not None:
        migrator.restore(mine["balance"])  # first: names below say who lives where
    saved = {name: tensor for file in files for name, tensor in file["model"].items()}
    tensors = {entry.name: entry.tensor for entry in entries(model)}
    parameters = {entry.name for entry in entries(model) if entry.owner is not None}
    elsewhere = {name for name in saved if _EXPERT.search(name)}  # experts of other ranks
    odd = sorted((tensors.keys() - saved.keys()) | (saved.keys() - tensors.keys() - elsewhere))
    odd = odd or [
        name
        for name, tensor in tensors.items()
        if tensor.shape != saved[name].shape or (name in parameters and tensor.dtype != saved[name].dtype)
    ]
    if odd:
        raise ValueError(f"{path}: not the parameters of this model (e.g. {odd[0]}); resume its own run")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.dtype != saved[name].dtype:  # Megatron widens the router's buffers of a bf16 model as it trains
                tensor.data = tensor.data.to(saved[name].dtype)
            tensor.copy_(saved[name])
        _restore_shards(path, model, OptimizerStates(optimizer), files)
    scheduler.num_steps = 0  # Megatron adds the saved count to what is there
    scheduler.load_state_dict(files[0]["scheduler"])
    if mine is not None:
        _restore_random(mine["random"])
    return step


def _open_all(path: Path) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = []
    while not files or len(files) < files[0]["num_ranks"]:
        name = path / f"rank_{len(files)}.pt"
        try:
            state = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
        except FileNotFoundError:
            raise ValueError(f"{name}: missing; the checkpoint is damaged, start a new run") from None
        if state["format"] != FORMAT:
            raise ValueError(
                f"{name}: format {state['format']}, but this version reads format {FORMAT}; start a new "
                "run, or resume with the version that wrote it"
            )
        files.append(state)
    return files


class Entry(NamedTuple):
    """A parameter or buffer by its logical name. An expert's matrix may be a part of a parameter that stacks several:
    its elements are those of `owner` from `offset` on. owner: None for a buffer. is_ours: this rank writes it."""

    name: str
    tensor: torch.Tensor
    is_ours: bool
    owner: torch.nn.Parameter | None
    offset: int = 0


def entries(model: torch.nn.Module) -> Iterator[Entry]:
    """Every parameter and buffer of this rank; one rank writes for all that hold the same."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "token_dispatcher")}
    stacked = {
        id(p)
        for layer in layers.values()
        if hasattr(layer.experts, "expert_weights")
        for p in layer.experts.parameters()
    }
    dense_is_ours = dist.get_rank() == 0
    for name, parameter in model.named_parameters():
        match = _LOCAL_EXPERT.fullmatch(name)
        if match is not None:
            layer = layers[match[1]]
            expert = logical_experts(layer)[int(match[2])]
            logical = f"{match[1]}.experts.{expert}.{match[3]}"
            yield Entry(logical, parameter, layer.experts.dp_group.rank() == 0, parameter)
        elif id(parameter) not in stacked:
            yield Entry(name, parameter, dense_is_ours, parameter)
    for name, buffer in model.named_buffers():
        yield Entry(name, buffer, dense_is_ours, None)
    for name, layer in layers.items():
        for local, expert in enumerate(logical_experts(layer) if hasattr(layer.experts, "expert_weights") else ()):
            for own, view in layer.experts.expert_weights(local).items():
                owner = next(
                    p
                    for p in layer.experts.parameters()
                    if p.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
                    and 0 <= view.storage_offset() - p.storage_offset() < p.numel()
                )
                yield Entry(
                    f"{name}.experts.{expert}.{own}",
                    view,
                    layer.experts.dp_group.rank() == 0,
                    owner,
                    view.storage_offset() - owner.storage_offset(),
                )


def _shards(model: torch.nn.Module, states: OptimizerStates) -> dict[str, Any]:
    """What this rank keeps for each parameter. In fp32 the parameters are their own main copies."""
    found = {}
    for name, tensor, _, owner, offset in entries(model):
        if owner is None:
            continue
        part = states.shard(owner).part(offset, tensor.numel())
        if part.end > part.start:
            found[name] = {"start": part.start, "end": part.end, "tensors": part.tensors, "scalars": part.scalars}
    return found


def _restore_shards(path: Path, model: torch.nn.Module, states: OptimizerStates, files: list[dict[str, Any]]) -> None:
    """Cuts this rank's shards out of those that were saved, however they were cut then."""
    saved: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for name, part in file["optimizer"].items():
            saved.setdefault(name, []).append(part)
    by_owner: dict[int, list[Entry]] = {}
    for entry in entries(model):
        if entry.owner is not None:
            by_owner.setdefault(id(entry.owner), []).append(entry)
    for of_owner in by_owner.values():
        owner = of_owner[0].owner
        assert owner is not None  # entries without one were left out above
        shard = states.shard(owner)
        if shard.end == shard.start:
            continue
        pieces: dict[str, list[torch.Tensor]] = {}
        scalars: dict[str, Any] = {}
        for name, tensor, _, _, offset in sorted(of_owner, key=lambda entry: entry.offset):
            first, last = max(shard.start, offset), min(shard.end, offset + tensor.numel())
            parts = saved.get(name, []) if last > first else []
            for kind in sorted({kind for part in parts for kind in part["tensors"]}):
                pieces.setdefault(kind, []).append(_cut(path, name, kind, parts, first - offset, last - offset))
            scalars = parts[0]["scalars"] if parts else scalars
        joined = {kind: torch.cat(of_kind) for kind, of_kind in pieces.items()}
        if MAIN in joined:
            shard.tensors[MAIN].copy_(joined.pop(MAIN))
        states.set_state(owner, joined, scalars)


def _cut(path: Path, name: str, kind: str, parts: list[dict[str, Any]], start: int, end: int) -> torch.Tensor:
    """Elements [start, end) of a parameter's state, out of saved ranges that cover them."""
    result: torch.Tensor | None = None
    missing = torch.ones(end - start, dtype=torch.bool, device="cpu")
    for part in parts:
        first, last = max(start, part["start"]), min(end, part["end"])
        if first < last:
            source = part["tensors"][kind]
            result = torch.empty(end - start, dtype=source.dtype, device="cpu") if result is None else result
            result[first - start : last - start] = source[first - part["start"] : last - part["start"]]
            missing[first - start : last - start] = False
    if result is None or missing.any():
        raise ValueError(f"{path}: {kind} of {name} lacks elements; the checkpoint is damaged, start a new run")
    return result


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
