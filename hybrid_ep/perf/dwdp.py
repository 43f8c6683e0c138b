"""Move weights instead of tokens (DWDP): every rank pulls the experts it lacks, layer by layer, while it computes.

    compute = kernels' fixed time + attention and what is dense + max(experts' FLOPs / rate, weights read / HBM)
    prefetch = weights of the missing experts / copy rate
    tokens moved:    T_DEP  = compute (own experts) + exchange + wait for the slowest
    weights moved:   T_DWDP = max(compute (all experts), prefetch) x contention

Two crossovers in tokens per rank: of bytes (moving weights takes as long as moving tokens), and of hiding (compute
covers the prefetch). Checked against the published roofline of DeepSeek-R1 on GB200, NVFP4, 4 ranks: its eight ratios
come out within 15 %, two of them fitted."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import efficiency
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
# Fitted: the rates with which the compute rows at 16,384 and at 32,768 tokens come out, of matrices (NVFP4) and of
# attention's scores and values; the other rows are the test.
MATRIX_TFLOPS, ATTENTION_TFLOPS = 4207.0, 1692.0
# Assumed: kernels of a layer, each of which takes at least as long as its launch (norms, router, rotation, casts).
KERNELS = 40
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


@dataclass(frozen=True)
class Rates:
    """TFLOPS of matrices and of attention, GB/s of copy engines."""

    matrix_tflops: float = MATRIX_TFLOPS
    attention_tflops: float = ATTENTION_TFLOPS
    copy_gb_per_s: float = COPY_GB_PER_S


PUBLISHED_RATES = Rates()


def weight_bytes(model: MoeModel, ranks: int, dtype: str) -> float:
    """Bytes of one layer's experts that are not at home on a rank of `ranks`."""
    return (model.experts - model.experts // ranks) * model.expert_params * element_bytes(dtype)


def token_bytes(model: MoeModel, ranks: int, dispatch_dtype: str, combine_dtype: str = "bf16") -> float:
    """Bytes a token and layer that leave its rank, there and back."""
    copies = distinct(ranks, model.experts, model.topk) * (1 - 1 / ranks)
    return copies * model.hidden * (element_bytes(dispatch_dtype) + element_bytes(combine_dtype))


def rates_of(model: MoeModel, cluster: Cluster, dtype: str) -> Rates:
    """The rates for another GPU and precision: matrices and attention as published training steps have the compute of
    such a model (`efficiency`), copy engines at the share of NVLink that they have in the published roofline."""
    if (cluster.gpu.name, dtype) == ("GB200", "nvfp4"):
        return PUBLISHED_RATES
    peak = cluster.gpu.bf16_tflops.value if dtype == "bf16" else cluster.gpu.fp8_tflops.value
    nvlink = clusters.get("gb200_nvl72").gpu.nvlink_gb_per_s.value
    rate = peak * efficiency.share_of_peak(model, cluster, dtype)
    return Rates(rate, rate, COPY_GB_PER_S / nvlink * cluster.gpu.nvlink_gb_per_s.value)


def compute_us(
    model: MoeModel, cluster: Cluster, tokens: int, experts: int, dtype: str = "nvfp4", rates: Rates = PUBLISHED_RATES
) -> tuple[float, float]:
    """(all but the experts, the experts) of a layer's forward of one sequence, on a rank that reads so many experts."""
    routed = 2.0 * model.topk * model.expert_params
    dense = 2 * model.moe_layer_params
    attention = model.attention_flops * tokens / 2
    fixed = KERNELS * cluster.gpu.launch_us.value
    others = fixed + tokens * (dense / rates.matrix_tflops + attention / rates.attention_tflops) / 1e6
    read = min(experts, tokens * model.topk) * model.expert_params * element_bytes(dtype)
    return others, max(tokens * routed / (rates.matrix_tflops * 1e6), read / (cluster.gpu.hbm_rate * 1e3))


def layer(
    model: MoeModel,
    cluster: Cluster,
    tokens: int,
    ranks: int,
    dtype: str = "nvfp4",
    *,
    fetched: float | None = None,
    rates: Rates = PUBLISHED_RATES,
) -> Layer:
    """One layer of a prefill of `tokens` per rank, one sequence. fetched: experts that are pulled before it, by default
    all that are at home elsewhere. ValueError for ranks that do not divide experts."""
    if tokens < 1:
        raise ValueError(f"tokens={tokens} must be at least 1")
    if ranks < 2 or model.experts % ranks:
        raise ValueError(f"ranks={ranks} must divide the {model.experts} experts and be at least 2")
    prefetch = _pull_us(model, model.experts - model.experts // ranks if fetched is None else fetched, dtype, rates)
    exchange = tokens * token_bytes(model, ranks, dtype) / (cluster.gpu.nvlink_rate * 1e3)
    own = sum(compute_us(model, cluster, tokens, model.experts // ranks, dtype, rates))
    dep = own * (1 + SYNC_CV * expected_max(ranks)) + exchange
    whole = sum(compute_us(model, cluster, tokens, model.experts, dtype, rates))
    return Layer(tokens, whole, prefetch, exchange, dep, max(whole, prefetch) * CONTENTION)


def _pull_us(model: MoeModel, experts: float, dtype: str, rates: Rates) -> float:
    """Microseconds for which so many experts of a layer are under way by copy engines."""
    return experts * model.expert_params * element_bytes(dtype) / (rates.copy_gb_per_s * 1e3)


@dataclass(frozen=True)
class Choice:
    """What moves, and microseconds of a layer for either, forward and (in training) backward."""

    move: str
    tokens_us: float
    weights_us: float


def choose(
    model: MoeModel,
    cluster: Cluster,
    tokens: int,
    ranks: int,
    dtype: str,
    *,
    training: bool,
    micro_batches: int = 1,
    held: int | None = None,
    group: int | None = None,
    resident: bool = False,
    rates: Rates | None = None,
) -> Choice:
    """Whether tokens or weights should move for micro-batches of `tokens` per rank: the faster of the two.

    training: the backward computes twice the forward, exchanges as much and gathers the weights again; gradients go
    home once in fp32, shared by the micro-batches of a step, with nothing beside them. group: ranks that hold all
    experts among them, by default all. held: experts that a rank has without fetching, by default its share in its
    group; copies of others are pulled once a step, and the rest of a layer from the other members. resident: buffers
    hold all layers, so that the rest is pulled once, too. rates: `rates_of` when None. ValueError for a `group` that
    does not divide ranks, and for `held` that is not from that share to all."""
    known = rates_of(model, cluster, dtype) if rates is None else rates
    at_home = model.experts // ranks
    held = _held(model, ranks, group, held)
    each_time = 0 if resident else model.experts - held
    once = (model.experts if resident else held) - at_home
    at = layer(model, cluster, tokens, ranks, dtype, fetched=each_time + once / micro_batches, rates=known)
    if not training:
        times = at.dep_us, at.dwdp_us
    else:
        wait = 1 + SYNC_CV * expected_max(ranks)
        own = sum(compute_us(model, cluster, tokens, at_home, dtype, known))
        home = weight_bytes(model, ranks, dtype) / element_bytes(dtype) * 4 / (known.copy_gb_per_s * 1e3)
        back = max(2 * at.compute_us, _pull_us(model, each_time, dtype, known)) * CONTENTION
        times = 3 * own * wait + 2 * at.exchange_us, at.dwdp_us + back + home / micro_batches
    return Choice("weights" if times[1] < times[0] else "tokens", *times)


def _held(model: MoeModel, ranks: int, group: int | None, held: int | None) -> int:
    """What a rank has without fetching. ValueError as for `choose`."""
    group = ranks if group is None else group
    if group < 1 or ranks % group:
        raise ValueError(f"group={group} must divide the {ranks} ranks")
    share = -(-model.experts // group)
    held = share if held is None else held
    if not share <= held <= model.experts:
        raise ValueError(
            f"held={held} must be from {share} (a rank's share in a group of {group}) to {model.experts} (all)"
        )
    return held


def memory_bytes(
    model: MoeModel,
    ranks: int,
    layers: int,
    dtype: str,
    *,
    training: bool,
    buffers: int = 2,
    held: int | None = None,
    group: int | None = None,
) -> float:
    """What moving the weights of so many layers takes of a rank, beside its parameters: registered experts, copies of
    others, buffers, and in training fp32 gradients of others. group, held: as for `choose`; ValueError, too."""
    at_home, held = model.experts // ranks, _held(model, ranks, group, held)
    experts = layers * held + max(2, min(buffers, layers)) * (model.experts - held)
    gradients = layers * (model.experts - at_home) if training else 0
    return model.expert_params * (experts * element_bytes(dtype) + gradients * 4)


def byte_crossover(model: MoeModel, ranks: int, dtype: str, *, training: bool = False) -> float:
    """Tokens per rank above which moving the weights moves fewer bytes: inference (weights once, tokens there and
    back), or training (gather, gather again, reduce the gradients: 3 times; tokens four times, bf16)."""
    weights = weight_bytes(model, ranks, dtype)
    if training:
        return 3 * weights / (2 * token_bytes(model, ranks, "bf16"))
    return weights / token_bytes(model, ranks, dtype)


def hiding_crossover(
    model: MoeModel, cluster: Cluster, ranks: int, dtype: str = "nvfp4", rates: Rates = PUBLISHED_RATES
) -> int:
    """Fewest tokens per rank at which compute covers the prefetch."""
    low, high = 1, 2
    while (at := layer(model, cluster, high, ranks, dtype, rates=rates)).compute_us < at.prefetch_us:
        low, high = high, high * 2
        if high > 1 << 30:
            raise ValueError(f"no number of tokens hides the weights of {model.name} over {ranks} ranks")
    while high - low > 1:
        middle = (low + high) // 2
        at = layer(model, cluster, middle, ranks, dtype, rates=rates)
        low, high = (middle, high) if at.compute_us < at.prefetch_us else (low, middle)
    return high
