"""What the compute of a training step takes beside its exchange: four numbers for all models and GPUs.

    matrix products     FLOPs / (peak of their precision x gemm); attention's scores and values are bf16 always
    everything between  passes x bytes of a layer's tensors / HBM: norms, rotation, activation, residuals, permutes
    launches            layer_us_x86 or layer_us_grace of every layer and micro-batch, forward and backward, whatever
                        its tokens: kernels that a host issues one by one, and what it waits for between them; nothing
                        in a CUDA graph of whole iterations

Nobody published them by themselves: `training` fits them to published steps and says how far the steps that were
held out are off. Half of peak for all matrix products and no more than that, as one would guess, misses by a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf.costs import hbm_us
from hybrid_ep.perf.models import MoeModel


@dataclass(frozen=True)
class Compute:
    """gemm: share of the GPU's dense peak. passes: how often a tensor crosses memory in a forward and a backward.
    layer_us_*: by the CPU beside the GPUs."""

    gemm: float
    passes: float
    layer_us_x86: float
    layer_us_grace: float


# Written by `scripts/make_tables.py --fit`.
FITTED = Compute(gemm=0.5674, passes=8.866, layer_us_x86=4762, layer_us_grace=155.7)


class PerToken(NamedTuple):
    """Microseconds of a token through all layers of a model, forward and backward, launches left out."""

    expert_gemms: float
    expert_tensors: float
    others: float


def gpu_word(cluster: Cluster) -> str:
    """H100 of "H100 SXM5"."""
    return cluster.gpu.name.split()[0].upper()


def host_word(cluster: Cluster) -> str:
    """The CPU beside the GPUs: Grace beside a GB200 or GB300, x86 elsewhere."""
    return "Grace" if gpu_word(cluster).startswith("GB") else "x86"


def precision_class(dtype: str) -> str:
    """bf16 or fp8, which mxfp8 and fp8 in blocks are."""
    return "bf16" if dtype == "bf16" else "fp8"


def layer_us(cluster: Cluster, fitted: Compute | None = None) -> float:
    """Launches of one layer and micro-batch, forward and backward, microseconds."""
    fitted = fitted or FITTED
    return fitted.layer_us_grace if host_word(cluster) == "Grace" else fitted.layer_us_x86


def per_token(model: MoeModel, cluster: Cluster, dtype: str, sequence: int, fitted: Compute | None = None) -> PerToken:
    """What a token costs at the fitted numbers. dtype: of the matrix products; tensors between them are bf16.

    A layer's tensors: ten as wide as the model (norms, queries, keys, values, attention, residuals), and for each of a
    token's experts three so wide and four as wide as the expert (rows in and out, gate, up, their product)."""
    fitted = fitted or FITTED
    bf16, fp8 = (peak.value * fitted.gemm * 1e6 for peak in (cluster.gpu.bf16_tflops, cluster.gpu.fp8_tflops))
    rate = bf16 if dtype == "bf16" else fp8
    experts = 6 * model.expert_params * model.topk * model.moe_layers
    attention = 3 * model.num_layers * model.attention_flops * sequence / 2
    dense = model.train_flops_per_token(sequence) - experts - attention
    wide = 2 * 10 * model.hidden * model.num_layers
    copies = 2 * model.topk * (3 * model.hidden + 4 * model.expert_hidden) * model.moe_layers
    return PerToken(
        experts / rate,
        fitted.passes * hbm_us(cluster, copies),
        dense / rate + attention / bf16 + fitted.passes * hbm_us(cluster, wide),
    )


def share_of_peak(model: MoeModel, cluster: Cluster, dtype: str, sequence: int = 4096) -> float:
    """What all compute reaches of the peak of its precision where launches cost nothing."""
    peak = (cluster.gpu.bf16_tflops if dtype == "bf16" else cluster.gpu.fp8_tflops).value * 1e6
    return model.train_flops_per_token(sequence) / peak / sum(per_token(model, cluster, dtype, sequence))
