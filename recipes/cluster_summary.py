"""What a GPU recipe comes to, in words: parameters, layout, memory of the fullest GPU, predicted step time."""

from __future__ import annotations

from hybrid_ep.sim import clusters, models, step_time
from recipes import memory
from recipes.cluster import ClusterRun

_OVERLAP = 0.9  # of the exchange, behind the compute of another micro-batch: assumed, as for gradients


def describe(run: ClusterRun) -> str:
    """Parameters, layout, memory and predicted step time. ValueError where it does not fit."""
    model, need = run.architecture, memory.check_fits(run)
    return "\n".join([
        f"{run.recipe}: {model.total_params / 1e9:.2f} B parameters, {model.active_params / 1e9:.2f} B active "
        f"({model.source})",
        f"{run.num_hosts} hosts x {run.hardware.gpus_per_host} {run.hardware.gpu}: TP {run.tensor}, PP {run.pipeline} "
        f"x {run.virtual_pipeline}, EP {run.expert} in domains of {run.domain}, DP {run.data}; {run.precision}, "
        f"recompute {run.recompute}, {run.num_microbatches} micro-batches, balance {run.balance}"
        + (f" with {run.clones} spare slots a rank ({memory.clone_bytes(run):,} bytes)" if run.clones else ""),
        f"fullest GPU (pipeline rank {need.stage}), {memory.budget_bytes(run) / 1e9:.1f} GB to use; hybrid_ep "
        f"registers {need.buffers:,} bytes:", str(need), predict(run),
    ])


def predict(run: ClusterRun) -> str:
    """Step time by the performance model, with the assumptions it rests on; says so where the model cannot tell."""
    try:
        job = _job(run)
        step = step_time.step(job)
    except ValueError as error:
        return f"step time: no prediction ({error})"
    hidden = f"{job.overlap:.0%} of the exchange hidden" if run.overlap else "no exchange hidden"
    again = "" if run.recompute == "none" else (
        "all layers computed twice, " if run.recompute == "full" else "selective recompute counted as free, ")
    return (f"step time: {step.seconds:.2f} s, {step.tflops_per_gpu:.0f} TFLOP/s a GPU (model, not measured; assumes "
            f"{job.efficiency:.0%} of peak in compute, {again}{hidden}, no load imbalance)")


def _job(run: ClusterRun) -> step_time.Job:
    return step_time.Job(
        models.get(run.architecture.name), clusters.get(run.hardware.name), run.num_gpus, run.expert, run.pipeline,
        run.virtual_pipeline, run.tokens_per_rank, run.seq_length, run.num_microbatches, dtype=run.precision,
        dispatcher="a2a" if run.dispatcher == "alltoall" else run.dispatcher, num_sms=run.num_sms, tensor=run.tensor,
        recompute="full" if run.recompute == "full" else "none", overlap=_OVERLAP if run.overlap else 0.0)
