"""Move weights instead of tokens (DWDP): every rank pulls the experts it lacks, layer by layer, while it computes.

    prefetch = weights of the missing experts / copy rate            compute = max(FLOPs / rate, weights read / HBM)
    tokens moved:    T_DEP  = compute + exchange + wait for the slowest
    weights moved:   T_DWDP = max(both) x contention

Two crossovers in tokens per rank: of bytes (moving weights takes as long as moving tokens), and of hiding (compute
covers the prefetch). Checked against the published roofline of DeepSeek-R1 on GB200, NVFP4, 4 ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf.models import MoeModel
from hybrid_ep.perf.order_statistics import expected_max
from hybrid_ep.perf.routing import distinct
from hybrid_ep.perf.shape import element_bytes

# Published: TensorRT-LLM DWDP (arXiv 2604.01621), DeepSeek-R1, GB200, NVFP4, batch 1, by input length.
PUBLISHED_COMPUTE_OVER_PREFETCH = {1024: 0.19, 8192: 0.62, 16384: 1.52, 32768: 4.77}
PUBLISHED_DEP_OVER_DWDP = {1024: 0.10, 8192: 0.73, 16384: 1.27, 32768: 1.17}
# Published beside them: 192 experts of 58 layers pulled in 429 ms; prefetch and compute slow each other by a tenth.
COPY_GB_PER_S = 643.0
CONTENTION = 1.1
PUBLISHED_GROUP = 4
# Fitted: the compute rate with which the row at 32,768 tokens comes out (the other three rows are the test).
COMPUTE_TFLOPS = 2405.0
# The exposed wait of expert parallelism for its slowest rank, published: 161.9 of 1319.85 ms.
SYNC_CV = 161.9 / 1319.85 / expected_max(PUBLISHED_GROUP)


@dataclass(frozen=True)
class Layer:
    """Microseconds of one MoE layer's forward at `tokens` per rank."""

    tokens: int
    compute_us: float
    prefetch_us: float
    exchange_us: float
    dep_us: float
    dwdp_us: float


def weight_bytes(model: MoeModel, ranks: int, dtype: str) -> float:
    """Bytes of one layer's experts that a rank of `ranks` lacks."""
    return (model.experts - model.experts // ranks) * model.expert_params * element_bytes(dtype)


def token_bytes(model: MoeModel, ranks: int, dispatch_dtype: str, combine_dtype: str = "bf16") -> float:
    """Bytes a token and layer that leave its rank, there and back."""
    copies = distinct(ranks, model.experts, model.topk) * (1 - 1 / ranks)
    return copies * model.hidden * (element_bytes(dispatch_dtype) + element_bytes(combine_dtype))


def layer(
    model: MoeModel,
    cluster: Cluster,
    tokens: int,
    ranks: int,
    dtype: str = "nvfp4",
    *,
    tflops: float = COMPUTE_TFLOPS,
    copy_gb_per_s: float = COPY_GB_PER_S,
) -> Layer:
    """One layer of a prefill of `tokens` per rank, one sequence. ValueError for ranks that do not divide experts."""
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    if ranks < 2 or model.experts % ranks:
        raise ValueError(f"ranks={ranks} must divide the {model.experts} experts and be at least 2")
    flops = tokens * (2e9 * model.active / model.num_layers + model.attention_flops * tokens / 2)
    arithmetic = flops / (tflops * 1e6)
    expert = model.expert_params * element_bytes(dtype)
    hbm = cluster.gpu.hbm_rate * 1e3

    def compute(experts: int) -> float:
        return max(arithmetic, min(experts, tokens * model.topk) * expert / hbm)

    prefetch = weight_bytes(model, ranks, dtype) / (copy_gb_per_s * 1e3)
    exchange = tokens * token_bytes(model, ranks, dtype) / (cluster.gpu.nvlink_rate * 1e3)
    dep = compute(model.experts // ranks) * (1 + SYNC_CV * expected_max(ranks)) + exchange
    whole = compute(model.experts)
    return Layer(tokens, whole, prefetch, exchange, dep, max(whole, prefetch) * CONTENTION)


def byte_crossover(model: MoeModel, ranks: int, dtype: str, *, training: bool = False) -> float:
    """Tokens per rank above which moving the weights moves fewer bytes: inference (weights once, tokens there and
    back), or training (gather, gather again, reduce the gradients: 3 times; tokens four times, bf16)."""
    weights = weight_bytes(model, ranks, dtype)
    if training:
        return 3 * weights / (2 * token_bytes(model, ranks, "bf16"))
    return weights / token_bytes(model, ranks, dtype)


def hiding_crossover(model: MoeModel, cluster: Cluster, ranks: int, dtype: str = "nvfp4", **rates: float) -> int:
    """Fewest tokens per rank at which compute covers the prefetch."""
    low, high = 1, 2
    while (at := layer(model, cluster, high, ranks, dtype, **rates)).compute_us < at.prefetch_us:
        low, high = high, high * 2
        if high > 1 << 30:
            raise ValueError(f"no number of tokens hides the weights of {model.name} over {ranks} ranks")
    while high - low > 1:
        middle = (low + high) // 2
        at = layer(model, cluster, middle, ranks, dtype, **rates)
        low, high = (middle, high) if at.compute_us < at.prefetch_us else (low, middle)
    return high
