"""Which layout of a GPU recipe the performance model has as the fastest, among those that fit: tensor, pipeline and
expert sizes, virtual stages, sequences of a micro-batch, recompute and SMs; hardware, global batch, precision and all
else stay the run's own.

A layout fits when `recipes.memory` says so, activations and buffers included. The step model knows no allocator, no
library's fused kernels and no fabric beyond a NIC's rate: a lead of a few per cent is none."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_ep.perf import job_fields, model, peers, recommend, stages, step_time

from . import memory
from .cluster import ClusterRun
from .modelled import job_of

_TENSOR = (1, 2, 4, 8)
_PIPELINE = (1, 2, 4, 8, 16)
_VIRTUAL = (1, 2, 4, 8)
SEQUENCES = (1, 2, 4, 8)  # of a micro-batch
FIELDS = (
    "tensor",
    "pipeline",
    "virtual_pipeline",
    "expert",
    "micro_batch_size",
    "recompute",
    "num_sms",
    "pipeline_layout",
)
_CLOSE = 0.01  # of the fastest: the same to a model with residuals of several per cent


@dataclass(frozen=True)
class Layout:
    """One that fits. need_bytes: of the fullest GPU, of memory.budget_bytes(run). seconds: of a step, predicted."""

    run: ClusterRun
    need_bytes: int
    seconds: float

    def changes(self, run: ClusterRun) -> dict[str, Any]:
        """{field: value} that makes this layout of `run`."""
        return {name: getattr(self.run, name) for name in FIELDS if getattr(self.run, name) != getattr(run, name)}

    def as_json(self, run: ClusterRun) -> dict[str, Any]:
        """set: what makes it of `run`."""
        fields = {name: getattr(self.run, name) for name in FIELDS}
        return {"step_s": self.seconds, "need_bytes": self.need_bytes, **fields, "set": self.changes(run)}

    def __str__(self) -> str:
        r = self.run
        sizes = f"TP {r.tensor}, PP {r.pipeline} x {r.virtual_pipeline}, EP {r.expert}, MBS {r.micro_batch_size}"
        return f"{sizes}, recompute {r.recompute}"


def own(run: ClusterRun) -> Layout:
    """The run as it is. ValueError where it does not fit, or the model does not know it."""
    return Layout(run, memory.check_fits(run).total, step_time.step(job_of(run)).seconds)


def ranked(
    run: ClusterRun,
    most: int = 10,
    watch: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    sequences: Sequence[int] = SEQUENCES,
) -> list[Layout]:
    """The `most` fastest that fit, fastest first; of those within 1 % of the fastest the one that changes least. For
    each size the least recompute that fits, and the SMs that the model would take. watch: sees the layouts go by, for a
    progress bar. sequences: sizes of a micro-batch, beside the run's own. ValueError where nothing fits, or the model
    does not know model or hardware."""
    job_of(run)
    candidates = sorted(
        ((_bound(made), i, made, need) for i, (made, need) in enumerate(_fitting(run, sequences))), key=lambda c: c[:2]
    )
    found: list[Layout] = []
    for bound, _, made, need in watch(candidates):
        fastest = sorted(layout.seconds for layout in found)
        if len(found) >= most and bound > max(fastest[most - 1], fastest[0] * (1 + _CLOSE)):
            continue
        found.append(_timed(made, need))
    if not found:
        raise ValueError(f"num_hosts={run.num_hosts}: no layout of {run.recipe} fits {run.num_gpus} GPUs; take more")
    best = min(layout.seconds for layout in found)

    def order(layout: Layout) -> tuple[float, int, float]:
        close = layout.seconds <= best * (1 + _CLOSE)
        return (best if close else layout.seconds, len(layout.changes(run)) if close else 0, layout.seconds)

    return sorted(found, key=order)[:most]


def table(run: ClusterRun, watch: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> tuple[str, dict[str, Any]]:
    """The fastest that fit and the run as it is, and what --set makes the first of them: for people and for
    programs."""
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
    mine, why_not = None, ""
    try:
        mine = own(run)
        rows.append((mine, "  as it is"))
    except ValueError as error:
        why_not = str(error)
        lines.append(f"  as it is: {error}")
    for layout, note in rows:
        num_sms = layout.run.num_sms if layout.run.expert > 1 else "-"
        lines.append(f"  {layout.seconds:>7.2f}{layout.need_bytes / 1e9:>7.1f}{num_sms:>5}  {layout}{note}")
    changes = set_words(best.changes(run))
    lines.append(f"the first: {changes}" if changes else "the first is the run as it is")
    if best.run.expert == 1:
        lines.append("with EP 1 every GPU has all experts, and nothing is exchanged")
    document = {
        "schema": "hybrid_ep.layouts/1",
        "simulated": True,
        "recipe": run.recipe,
        "cluster": run.hardware.name,
        "gpus": run.num_gpus,
        "precision": run.precision,
        "global_batch_size": run.global_batch_size,
        "budget_bytes": memory.budget_bytes(run),
        "layouts": [layout.as_json(run) for layout in found],
        "as_it_is": mine and mine.as_json(run),
        "as_it_is_why_not": why_not or None,
    }
    return "\n".join(lines), document


def with_larger_micro_batches(run: ClusterRun) -> list[Layout]:
    """The run with each larger micro-batch that fits, each with the least recompute, from the run's own on, that it
    fits with, and with the SMs that the model would take for it: what `ranked` says of these."""
    found: dict[int, tuple[ClusterRun, int]] = {}
    for base in [run, *(run.derive(recompute=more) for more in _more_recomputes(run))]:
        for made, need in _sequences(base, SEQUENCES):
            if made.micro_batch_size > run.micro_batch_size:
                found.setdefault(made.micro_batch_size, (made, need))
    return [_timed(made, need) for made, need in found.values()]


def _more_recomputes(run: ClusterRun) -> list[str]:
    """Those of `_recomputes` that make more again than the run does."""
    order = [*map(job_fields.modelled_recompute, _recomputes(run))]
    own = job_fields.modelled_recompute(run.recompute)
    return _recomputes(run)[order.index(own) + 1 :] if own in order else []


def _timed(run: ClusterRun, need: int) -> Layout:
    job = job_of(run)
    job = recommend.tuned(job) if run.dispatcher == "hybrid_ep" else job
    return Layout(replace(run, num_sms=job.num_sms), need, step_time.step(job).seconds)


def set_words(changes: dict[str, Any]) -> str:
    """The words of `launch` that make the changes."""
    return " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in changes.items())


def _bound(run: ClusterRun) -> float:
    """Seconds of a step that none is faster than: its links have nothing but rows to carry; with recompute, if that is
    more, its exchange costs nothing."""
    job = job_of(run)
    links = sum(peers.links_us(op, job.shape, job.cluster) for op in model.OPS) if job.ep > 1 else 0.0
    once = step_time.step(replace(job, recompute="none", recompute_modules=()), step_time.Layer(links)).seconds
    if job.recompute == "none":
        return once
    # the dispatcher that is timed at once, where no time counts
    return max(once, step_time.step(replace(job, overlap=1.0, dispatcher="a2a")).seconds)


def _sequences(run: ClusterRun, sizes: Iterable[int]) -> Iterator[tuple[ClusterRun, int]]:
    """The run with every micro-batch of `sizes` that divides the batch and fits, and the bytes of its fullest GPU."""
    budget = memory.budget_bytes(run)
    for size in sorted(sizes):
        try:
            made = run.derive(micro_batch_size=size)
            need = memory.per_gpu(made).total
        except ValueError:  # no part of the batch, or fewer micro-batches than stages
            continue
        if need > budget:
            return  # a larger one needs more
        yield made, need


def _fitting(run: ClusterRun, sequences: Sequence[int]) -> Iterator[tuple[ClusterRun, int]]:
    """Each with the bytes of its fullest GPU; a size of micro-batch with the least recompute that it fits with."""
    experts = [n for n in range(1, run.architecture.num_experts + 1) if _whole_domains(run, n)]
    for tensor, pipeline, virtual, expert in itertools.product(_TENSOR, _PIPELINE, _VIRTUAL, experts):
        known: set[int] = set()
        for recompute in _recomputes(run):
            try:
                base = _derived(run, tensor, pipeline, virtual, expert, recompute)
            except ValueError:  # not a layout of this model on so many GPUs
                continue
            for made, need in _sequences(base, {run.micro_batch_size, *sequences}):
                if made.micro_batch_size not in known:  # more recompute is slower
                    known.add(made.micro_batch_size)
                    yield made, need


def _whole_domains(run: ClusterRun, expert: int) -> bool:
    """Whether a group of so many ranks lies in one NVLink domain or fills several."""
    most = run.hardware.ranks_per_nvlink_domain
    return run.architecture.num_experts % expert == 0 and (expert <= most or expert % most == 0)


def _derived(run: ClusterRun, tensor: int, pipeline: int, virtual: int, expert: int, recompute: str) -> ClusterRun:
    """ValueError for what cannot be."""
    if tensor > run.hardware.gpus_per_host or (pipeline == 1 and virtual > 1):
        raise ValueError("tensor ranks talk too much for a NIC; one stage has no virtual ones")
    model = run.architecture
    same = (pipeline, virtual) == (run.pipeline, run.virtual_pipeline)
    return run.derive(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        expert=expert,
        recompute=recompute,
        micro_batch_size=1,
        ranks_per_node=0,
        pipeline_layout=run.pipeline_layout
        if same
        else stages.equal_layout(model.num_layers, model.num_mtp_layers, pipeline * virtual),
    )


def _recomputes(run: ClusterRun) -> list[str]:
    """From the cheapest to the dearest, as far as the model and the run allow."""
    layer = ["layernorm", *(["mla_up_proj"] if run.architecture.mla else [])]
    layer += ["mlp"] if run.architecture.num_dense_layers else []
    return ["selective", *([] if run.overlap else [",".join([*layer, "moe"]), "full"])]
