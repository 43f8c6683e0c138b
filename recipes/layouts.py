"""Which layout of a GPU recipe the performance model has as the fastest, among those that fit: tensor, pipeline and
expert sizes, virtual stages, recompute and SMs; hardware, batch, precision and all else stay the run's own.

A layout fits when `recipes.memory` says so, activations and buffers included. The step model knows no allocator, no
library's fused kernels and no fabric beyond a NIC's rate: a lead of a few per cent is none."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybrid_ep.perf import recommend, step_time

from . import memory
from .cluster import ClusterRun
from .cluster_summary import job_of

_TENSOR = (1, 2, 4, 8)
_PIPELINE = (1, 2, 4, 8, 16)
_VIRTUAL = (1, 2, 4, 8)
_FIELDS = ("tensor", "pipeline", "virtual_pipeline", "expert", "recompute", "num_sms", "pipeline_layout")
_CLOSE = 0.01  # of the fastest: the same to a model with residuals of several per cent


@dataclass(frozen=True)
class Layout:
    """One that fits. need_bytes: of the fullest GPU, of memory.budget_bytes(run). seconds: of a step, predicted."""

    run: ClusterRun
    need_bytes: int
    seconds: float

    def changes(self, run: ClusterRun) -> dict[str, Any]:
        """{field: value} that makes this layout of `run`."""
        return {name: getattr(self.run, name) for name in _FIELDS if getattr(self.run, name) != getattr(run, name)}

    def __str__(self) -> str:
        r = self.run
        return f"TP {r.tensor}, PP {r.pipeline} x {r.virtual_pipeline}, EP {r.expert}, recompute {r.recompute}"


def own(run: ClusterRun) -> Layout:
    """The run as it is. ValueError where it does not fit, or the model does not know it."""
    return Layout(run, memory.check_fits(run).total, step_time.step(job_of(run)).seconds)


def ranked(run: ClusterRun, most: int = 10, watch: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> list[Layout]:
    """The `most` fastest that fit, fastest first; of those within 1 % of the fastest the one that changes least. For
    each size the least recompute that fits, and the SMs that the model would take. watch: sees the layouts go by, for a
    progress bar. ValueError where nothing fits, or the model does not know model or hardware."""
    job_of(run)
    candidates = sorted(
        ((_bound(made), i, made, need) for i, (made, need) in enumerate(_fitting(run))), key=lambda c: c[:2]
    )
    found: list[Layout] = []
    for bound, _, made, need in watch(candidates):
        if len(found) >= most and bound > sorted(layout.seconds for layout in found)[most - 1]:
            continue
        job = job_of(made)
        job = recommend.tuned(job) if made.dispatcher == "hybrid_ep" else job
        found.append(Layout(replace(made, num_sms=job.num_sms), need, step_time.step(job).seconds))
    if not found:
        raise ValueError(f"num_hosts={run.num_hosts}: no layout of {run.recipe} fits {run.num_gpus} GPUs; take more")
    best = min(layout.seconds for layout in found)

    def order(layout: Layout) -> tuple[float, int, float]:
        close = layout.seconds <= best * (1 + _CLOSE)
        return (best if close else layout.seconds, len(layout.changes(run)) if close else 0, layout.seconds)

    return sorted(found, key=order)[:most]


def table(run: ClusterRun, watch: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> str:
    """The fastest that fit and the run as it is, and what --set makes the first of them."""
    found = ranked(run, watch=watch)
    best, room = found[0], memory.budget_bytes(run) / 1e9
    lines = [
        f"{run.recipe} on {run.num_gpus} x {run.hardware.gpu}, {run.precision}, global batch {run.global_batch_size}: "
        f"layouts that fit {room:.1f} GB",
        "by the model; nothing was measured, and a lead of a few per cent is none: within 1 % those that change least "
        "come first",
        f"  {'step s':>7}{'GB':>7}{'SMs':>5}  layout",
    ]
    rows = [(layout, "") for layout in found]
    try:
        rows.append((own(run), "  as it is"))
    except ValueError as error:
        lines.append(f"  as it is: {error}")
    for layout, note in rows:
        num_sms = layout.run.num_sms if layout.run.expert > 1 else "-"
        lines.append(f"  {layout.seconds:>7.2f}{layout.need_bytes / 1e9:>7.1f}{num_sms:>5}  {layout}{note}")
    changes = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in best.changes(run).items())
    lines.append(f"the first: {changes}" if changes else "the first is the run as it is")
    if best.run.expert == 1:
        lines.append("with EP 1 every GPU has all experts, and nothing is exchanged")
    return "\n".join(lines)


def _bound(run: ClusterRun) -> float:
    """Seconds of a step whose exchange costs nothing: none is faster."""
    return step_time.step(replace(job_of(run), overlap=1.0)).seconds


def _fitting(run: ClusterRun) -> Iterator[tuple[ClusterRun, int]]:
    """Each with the bytes of its fullest GPU."""
    budget = memory.budget_bytes(run)
    experts = [n for n in range(1, run.architecture.num_experts + 1) if _whole_domains(run, n)]
    for tensor, pipeline, virtual, expert in itertools.product(_TENSOR, _PIPELINE, _VIRTUAL, experts):
        for recompute in _recomputes(run):
            try:
                made = _derived(run, tensor, pipeline, virtual, expert, recompute)
                need = memory.per_gpu(made).total
            except ValueError:  # not a layout of this model on so many GPUs
                continue
            if need <= budget:
                yield made, need
                break  # more recompute is slower


def _whole_domains(run: ClusterRun, expert: int) -> bool:
    """Whether a group of so many ranks lies in one NVLink domain or fills several."""
    most = run.hardware.ranks_per_nvlink_domain
    return run.architecture.num_experts % expert == 0 and (expert <= most or expert % most == 0)


def _derived(run: ClusterRun, tensor: int, pipeline: int, virtual: int, expert: int, recompute: str) -> ClusterRun:
    """ValueError for what cannot be."""
    if tensor > run.hardware.gpus_per_host or (pipeline == 1 and virtual > 1):
        raise ValueError("tensor ranks talk too much for a NIC; one stage has no virtual ones")
    same = (pipeline, virtual) == (run.pipeline, run.virtual_pipeline)
    return run.derive(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        expert=expert,
        recompute=recompute,
        ranks_per_node=0,
        pipeline_layout=run.pipeline_layout if same else equal_chunks(run, pipeline * virtual),
    )


def equal_chunks(run: ClusterRun, chunks: int) -> str:
    """Megatron's layout of so many chunks, embedding, loss and multi-token prediction counted as a layer each; where
    the last has layers beside these, one of them is in the first, for the embedding multiplies nothing: so are Megatron
    Bridge's of DeepSeek-V3. "" where Megatron's own split does the same. ValueError where they do not divide."""
    model = run.architecture
    if chunks == 1 or not model.num_mtp_layers:
        return ""
    letters = "E" + "t" * model.num_layers + "m" * model.num_mtp_layers + "L"
    if len(letters) % chunks:
        raise ValueError(f"{len(letters)} layers, ends included, are not {chunks} equal chunks")
    size = len(letters) // chunks
    parts = [letters[i : i + size] for i in range(0, len(letters), size)]
    if parts[-1].startswith("t"):
        parts[0], parts[-1] = f"{parts[0]}t", parts[-1][1:]
    return "|".join(parts)


def _recomputes(run: ClusterRun) -> list[str]:
    """From the cheapest to the dearest, as far as the model and the run allow."""
    layer = ["layernorm", *(["mla_up_proj"] if run.architecture.mla else [])]
    layer += ["mlp"] if run.architecture.num_dense_layers else []
    return ["selective", *([] if run.overlap else [",".join([*layer, "moe"]), "full"])]
