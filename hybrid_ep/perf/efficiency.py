"""What the compute of a training step takes beside its exchange: four numbers for all models and GPUs.

    matrix products     FLOPs / (peak of their precision x gemm); attention's scores and values, and the output layer,
                        are bf16 always
    everything between  passes x bytes of a layer's tensors / HBM: norms, rotation, activation, residuals, permutes
    launches            layer_us_x86 or layer_us_grace of every layer and micro-batch, forward and backward, whatever
                        its tokens: kernels that a host issues one by one, and what it waits for between them; nothing
                        in a CUDA graph of whole iterations

Nobody published them by themselves: `training` fits them to published steps and says how far the steps that were
held out are off. Half of peak for all matrix products and no more than that, as one would guess, misses by a factor."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
FITTED = Compute(gemm=0.5406, passes=7.445, layer_us_x86=3311, layer_us_grace=626.1)


class PerToken(NamedTuple):
    """Microseconds of a token, forward and backward, launches left out. expert_gemms, expert_tensors, moe_others: a
    MoE layer's products of experts, the tensors around these, all else; dense_layer: a layer without experts;
    mtp_more: what a layer of multi-token prediction has beyond a MoE layer; head: a pass of the output layer."""

    expert_gemms: float
    expert_tensors: float
    moe_others: float
    dense_layer: float
    mtp_more: float
    head: float

    def of(self, model: MoeModel) -> float:
        """Of all layers of a model and its output layer, without multi-token prediction."""
        moe = self.expert_gemms + self.expert_tensors + self.moe_others
        return model.moe_layers * moe + (model.num_layers - model.moe_layers) * self.dense_layer + self.head


class Load(NamedTuple):
    """What a token brings whatever the fitted numbers are, forward and backward. FLOPs: of a MoE layer's products of
    experts, its other products, those of a layer without experts, what multi-token prediction has beyond a MoE layer,
    attention's scores and values, a pass of the output layer. *_us: one crossing of HBM by the tensors around experts'
    products, by those of a layer, by the logits. peak, peak_bf16: TFLOPS of layers, of attention and the output."""

    experts: float
    moe_others: float
    dense_layer: float
    mtp_more: float
    attention: float
    head: float
    expert_tensors_us: float
    layer_us: float
    logits_us: float
    peak: float
    peak_bf16: float

    @classmethod
    def of(cls, model: MoeModel, cluster: Cluster, dtype: str, sequence: int) -> Load:
        bf16, fp8 = cluster.gpu.bf16_tflops.value, cluster.gpu.fp8_tflops.value
        return cls(
            6 * model.expert_params * model.topk,
            6 * model.moe_layer_params,
            6 * model.dense_layer_params,
            6 * model.mtp_params,
            3 * model.attention_flops * sequence / 2,
            6 * model.head_params,
            hbm_us(cluster, 2 * (model.topk * (3 * model.hidden + 4 * model.expert_hidden))),
            hbm_us(cluster, 2 * (10 * model.hidden)),
            hbm_us(cluster, 2 * model.vocab),
            bf16 if dtype == "bf16" else fp8,
            bf16,
        )

    def products(self, rate: float, bf16: float) -> PerToken:
        """Matrix products alone. rate, bf16: FLOPs a microsecond, of layers, of attention and the output layer."""
        attention = self.attention / bf16
        return PerToken(
            self.experts / rate,
            0.0,
            self.moe_others / rate + attention,
            self.dense_layer / rate + attention,
            self.mtp_more / rate,
            self.head / bf16,
        )

    def at(self, fitted: Compute) -> PerToken:
        """Products and the tensors between them. Unpacked, for a fit asks some hundred thousand times."""
        experts, others, dense, mtp_more, attention, head, around_us, layer_us, logits_us, peak, peak_bf16 = self
        passes = fitted.passes
        rate, bf16, wide = peak * fitted.gemm * 1e6, peak_bf16 * fitted.gemm * 1e6, passes * layer_us
        attention /= bf16
        return PerToken(
            experts / rate,
            passes * around_us,
            others / rate + attention + wide,
            dense / rate + attention + wide,
            mtp_more / rate,
            head / bf16 + passes * logits_us,
        )


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
    return layer_us_beside(host_word(cluster), fitted)


def layer_us_beside(host: str, fitted: Compute | None = None) -> float:
    """The same beside a CPU of this `host_word`."""
    fitted = fitted or FITTED
    return fitted.layer_us_grace if host == "Grace" else fitted.layer_us_x86


def with_layer_us(host: str, us: float) -> Compute:
    """`FITTED`, but for launches of a layer beside a CPU of this `host_word`, microseconds."""
    return replace(FITTED, **{"layer_us_grace" if host == "Grace" else "layer_us_x86": us})


def per_token(model: MoeModel, cluster: Cluster, dtype: str, sequence: int, fitted: Compute | None = None) -> PerToken:
    """What a token costs at the fitted numbers. dtype: of the layers' matrix products; the output layer's are bf16, as
    Megatron has them unless --fp8-output-proj is given, and so are the tensors between products.

    A layer's tensors: ten as wide as the model (norms, queries, keys, values, attention, residuals), and for each of a
    token's experts three so wide and four as wide as the expert (rows in and out, gate, up, their product). The output
    layer's: one as wide as the vocabulary."""
    return Load.of(model, cluster, dtype, sequence).at(fitted or FITTED)


def at_share(model: MoeModel, cluster: Cluster, dtype: str, sequence: int, share: float) -> PerToken:
    """What a token costs where all its FLOPs run at this share of the peak of `dtype` and nothing lies between them."""
    peak = cluster.gpu.bf16_tflops if dtype == "bf16" else cluster.gpu.fp8_tflops
    rate = peak.value * share * 1e6
    return Load.of(model, cluster, dtype, sequence).products(rate, rate)


def share_of_peak(model: MoeModel, cluster: Cluster, dtype: str, sequence: int = 4096) -> float:
    """What all compute reaches of the peak of its precision where launches cost nothing."""
    peak = (cluster.gpu.bf16_tflops if dtype == "bf16" else cluster.gpu.fp8_tflops).value * 1e6
    return model.train_flops_per_token(sequence) / peak / per_token(model, cluster, dtype, sequence).of(model)
