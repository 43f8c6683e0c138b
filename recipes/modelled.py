"""What the step model is asked about a GPU recipe's run."""

from __future__ import annotations

from hybrid_ep.cli import names
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import job_fields, models, step_time
from hybrid_ep.perf.models import MoeModel

from .cluster import ClusterRun

_OVERLAP = 0.9  # of the exchange, behind the compute of another micro-batch: assumed, as for gradients


def job_of(run: ClusterRun, model: MoeModel | None = None) -> step_time.Job:
    """What the step model is asked. model: in place of the published one. ValueError where it does not know model or
    cluster."""
    return step_time.Job(
        model or models.get(run.architecture.name),
        clusters.get(run.hardware.name),
        run.num_gpus,
        run.expert,
        run.pipeline,
        run.virtual_pipeline,
        run.tokens_per_rank,
        run.seq_length,
        run.num_microbatches,
        dtype=run.precision,
        dispatch_dtype=run.dispatch_dtype,
        dispatcher=names.modelled_dispatcher(run.dispatcher),
        num_sms=run.num_sms,
        layout=run.pipeline_layout,
        tensor=run.tensor,
        recompute=job_fields.modelled_recompute(run.recompute),
        overlap=_OVERLAP if run.overlap else 0.0,
        cv_slow=step_time.CV_SLOW,
        moments=run.moments,
        fp8_params="yes" if run.keeps_fp8_params else "no",
        recompute_modules=run.recompute_modules,
    )
