"""Clusters as data. Every number carries its unit, what kind of knowledge it is and where it comes from.

Kinds: `datasheet` (a maker's figure, or arithmetic on one), `published` (somebody's measurement, named),
`measured` (ours, named), `assumed` (nobody measured it for us; first to be replaced by a measurement),
`fitted` (chosen so that named published rows come out; at most three a GPU generation, see FITTED_FROM).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

KINDS = ("datasheet", "published", "measured", "assumed", "fitted")


class Quantity(NamedTuple):
    """A number that says what it is."""

    value: float
    unit: str
    kind: str
    source: str


def _datasheet(value: float, unit: str, source: str) -> Quantity:
    return Quantity(value, unit, "datasheet", source)


def _assumed(value: float, unit: str, source: str) -> Quantity:
    return Quantity(value, unit, "assumed", source)


# The published rows behind each fitted number. One rule for all: a number is chosen so that the row named here
# comes out, with everything else at its datasheet value; no other row is looked at.
FITTED_FROM = {
    ("hopper", "copy_ns"): "Hybrid-EP README, H100, 16 ranks, 4 SMs, dispatch bf16, kernel: 44.40 GB/s",
    ("hopper", "pull_us"): "Hybrid-EP README, H100, 16 ranks, 4 SMs, combine bf16, kernel: 52.00 GB/s",
    ("hopper", "skew_us"): "Hybrid-EP README, H100, 16 ranks, 16 SMs, dispatch bf16, kernel: 71.71 GB/s",
    ("blackwell", "copy_ns"): "Hybrid-EP README, B200, 8 ranks, 16 SMs, dispatch bf16, kernel: 734.95 GB/s",
    ("blackwell", "pull_us"): "Hybrid-EP README, GB200, 8 ranks, 16 SMs, combine bf16, kernel: 684.27 GB/s",
    ("blackwell", "nvlink_efficiency"): "Hybrid-EP README, GB200, 8 ranks, 32 SMs, dispatch bf16, kernel: 764.03 GB/s",
}


def _fitted(generation: str, name: str, value: float, unit: str) -> Quantity:
    return Quantity(value, unit, "fitted", FITTED_FROM[generation, name])


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates of links are one direction."""

    name: str
    generation: str
    num_sms: Quantity
    clock_ghz: Quantity
    bf16_tflops: Quantity  # dense
    fp8_tflops: Quantity  # dense
    hbm_gb_per_s: Quantity
    hbm_efficiency: Quantity
    hbm_gb: Quantity
    smem_kib: Quantity  # what one block may use
    store_bytes_per_clock: Quantity  # of an SM into the crossbar
    load_bytes_per_clock: Quantity  # of an SM out of the crossbar
    copy_ns: Quantity  # an SM's copy path is busy so long per row, beyond the row's bytes
    pull_us: Quantity  # a bulk load of a peer's row under load: issue to the stage being free again
    hbm_load_us: Quantity  # the same from this GPU's memory
    fence_us: Quantity  # a fence of system scope, behind stores to peers
    flag_us: Quantity  # a store to, or a look at, a flag in this GPU's memory
    nvlink_gb_per_s: Quantity
    nvlink_efficiency: Quantity
    nvlink_latency_us: Quantity
    launch_us: Quantity
    barrier_us: Quantity  # of the ranks of a node, in a kernel
    skew_us: Quantity  # nodes enter an operation so far apart; the kernel's time contains the wait

    @property
    def store_gb_per_s(self) -> float:
        """Of one SM, payload."""
        return self.store_bytes_per_clock.value * self.clock_ghz.value

    @property
    def load_gb_per_s(self) -> float:
        return self.load_bytes_per_clock.value * self.clock_ghz.value

    @property
    def has_mxfp8(self) -> bool:
        """Whether tensor cores multiply mxfp8, which came with Blackwell."""
        return self.generation != "hopper"

    @property
    def nvlink_rate(self) -> float:
        """GB/s of payload that stores of SMs have been seen to reach."""
        return self.nvlink_gb_per_s.value * self.nvlink_efficiency.value

    @property
    def hbm_rate(self) -> float:
        return self.hbm_gb_per_s.value * self.hbm_efficiency.value


@dataclass(frozen=True)
class Nic:
    """A rank's network card and the rail behind it."""

    name: str
    gb_per_s: Quantity
    efficiency: Quantity
    latency_us: Quantity  # post to visible at the peer, an empty rail
    post_us: Quantity  # a lane posts a message: its stores drained, the request written, the doorbell rung
    messages_per_us: Quantity
    mtu: Quantity
    header_bytes: Quantity  # of a packet

    @property
    def rate(self) -> float:
        return self.gb_per_s.value * self.efficiency.value


@dataclass(frozen=True)
class Cluster:
    """`ranks_per_node`: GPUs of one NVLink domain; `nic` is per GPU."""

    name: str
    summary: str
    gpu: Gpu
    nic: Nic
    ranks_per_node: int

    def quantities(self) -> Iterator[tuple[str, Quantity]]:
        """Every number with its dotted name."""
        for part, thing in (("gpu", self.gpu), ("nic", self.nic)):
            for field in fields(thing):
                value = getattr(thing, field.name)
                if isinstance(value, Quantity):
                    yield f"{part}.{field.name}", value


_HBM_EFFICIENCY = Quantity(0.896, "", "measured", "device-to-device copy on one H200: 4.3 of 4.8 TB/s")
_PORT = "width of the SM's crossbar port; checked by the published 4-SM rows, to be replaced by a one-SM copy test"
_LATENCY = "order of published NVLink round trips; enters only fill and drain"
_LAUNCH = "a kernel in a busy stream: about 5 us from the previous one's end"
_BARRIER = Quantity(6.5, "us", "published", "NCCL device API, barrier of 8 GB200 over NVLink: 6.5 to 13 us")

_H100 = Gpu(
    name="H100 SXM5",
    generation="hopper",
    num_sms=_datasheet(132, "SMs", "NVIDIA H100 datasheet"),
    clock_ghz=_datasheet(1.83, "GHz", "989.4 TFLOPS dense bf16 / (132 SMs x 4096 FLOP/clock)"),
    bf16_tflops=_datasheet(989.4, "TFLOPS", "NVIDIA H100 datasheet, dense"),
    fp8_tflops=_datasheet(1978.9, "TFLOPS", "NVIDIA H100 datasheet, dense"),
    hbm_gb_per_s=_datasheet(3350, "GB/s", "NVIDIA H100 datasheet"),
    hbm_efficiency=_HBM_EFFICIENCY,
    hbm_gb=_datasheet(80, "GB", "NVIDIA H100 datasheet"),
    smem_kib=_datasheet(227, "KiB", "CUDA programming guide, compute capability 9.0"),
    store_bytes_per_clock=_assumed(32, "B/clock", _PORT),
    load_bytes_per_clock=_assumed(64, "B/clock", _PORT),
    copy_ns=_fitted("hopper", "copy_ns", 51.09, "ns"),
    pull_us=_fitted("hopper", "pull_us", 1.337, "us"),
    hbm_load_us=_assumed(1.0, "us", "loaded HBM latency of 0.8 to 1.2 us"),
    fence_us=_assumed(0.8, "us", "MEMBAR.SYS: the acknowledgement of a store over NVLink"),
    flag_us=_assumed(0.5, "us", "one trip to the L2 cache"),
    nvlink_gb_per_s=_datasheet(450, "GB/s", "NVLink 4: 18 links x 25 GB/s"),
    nvlink_efficiency=Quantity(380 / 450, "", "published", "DeepEP developers: stores reach about 380 of 450 GB/s"),
    nvlink_latency_us=_assumed(1.0, "us", _LATENCY),
    launch_us=_assumed(5.0, "us", _LAUNCH),
    barrier_us=_BARRIER,
    skew_us=_fitted("hopper", "skew_us", 248.9, "us"),
)
_H200 = replace(
    _H100,
    name="H200 SXM",
    hbm_gb_per_s=_datasheet(4800, "GB/s", "NVIDIA H200 datasheet"),
    hbm_gb=_datasheet(141, "GB", "NVIDIA H200 datasheet"),
)
_H800 = replace(
    _H100,
    name="H800",
    nvlink_gb_per_s=_datasheet(200, "GB/s", "H800: NVLink 400 GB/s both ways"),
    nvlink_efficiency=Quantity(0.8, "", "published", "DeepEP documentation: about 160 of 200 GB/s"),
)
_B200 = replace(
    _H100,
    name="B200",
    generation="blackwell",
    num_sms=_datasheet(148, "SMs", "NVIDIA B200: 148 SMs"),
    clock_ghz=_datasheet(1.856, "GHz", "2250 TFLOPS dense bf16 / (148 SMs x 8192 FLOP/clock)"),
    bf16_tflops=_datasheet(2250, "TFLOPS", "NVIDIA HGX B200 datasheet, dense"),
    fp8_tflops=_datasheet(4500, "TFLOPS", "NVIDIA HGX B200 datasheet, dense"),
    hbm_gb_per_s=_datasheet(7700, "GB/s", "NVIDIA HGX B200 datasheet: 62 TB/s for 8"),
    hbm_gb=_datasheet(180, "GB", "NVIDIA HGX B200 datasheet: 1440 GB for 8"),
    copy_ns=_fitted("blackwell", "copy_ns", 36.38, "ns"),
    pull_us=_fitted("blackwell", "pull_us", 3.2, "us"),
    nvlink_gb_per_s=_datasheet(900, "GB/s", "NVLink 5: 18 links x 50 GB/s"),
    nvlink_efficiency=_fitted("blackwell", "nvlink_efficiency", 0.7579, ""),
)
_GB200 = replace(
    _B200,
    name="GB200",
    clock_ghz=_datasheet(2.06, "GHz", "2500 TFLOPS dense bf16 / (148 SMs x 8192 FLOP/clock)"),
    bf16_tflops=_datasheet(2500, "TFLOPS", "NVIDIA GB200 NVL72 datasheet: 180 PFLOPS dense for 72"),
    fp8_tflops=_datasheet(5000, "TFLOPS", "NVIDIA GB200 NVL72 datasheet: 360 PFLOPS dense for 72"),
    hbm_gb_per_s=_datasheet(8000, "GB/s", "NVIDIA GB200 NVL72 datasheet: 576 TB/s for 72"),
    hbm_gb=_datasheet(186, "GB", "NVIDIA GB200 NVL72 datasheet: 13.4 TB for 72"),
)

_B300 = replace(_B200, name="B300", hbm_gb=_datasheet(287, "GB", "NVIDIA DGX B300 datasheet: 2.3 TB for 8"))

# What its datasheet has otherwise than that of GB200; exchanges are bound by nothing else that it changed.
_GB300 = replace(_GB200, name="GB300", hbm_gb=_datasheet(277, "GB", "NVIDIA GB300 NVL72 datasheet: 20 TB for 72"))

_CX7 = Nic(
    name="ConnectX-7 400G",
    gb_per_s=_datasheet(50, "GB/s", "400 Gb/s"),
    efficiency=Quantity(
        0.922,
        "",
        "published",
        "DeepEP V2 README, SM90, 32 ranks, 6 SMs: 61 GB/s logical = 45.75 of rows, 46.1 with headers",
    ),
    latency_us=_assumed(5.0, "us", "device-initiated put and signal through one switch; enters only fill and drain"),
    post_us=_assumed(2.0, "us", "a drained store (1 us) and a device-side post (1 us); enters once a chunk"),
    messages_per_us=_datasheet(330, "messages/us", "ConnectX-7 datasheet: 330 to 370 million messages/s"),
    mtu=_datasheet(4096, "B", "InfiniBand"),
    header_bytes=_datasheet(30, "B", "InfiniBand: LRH 8, BTH 12, ICRC 4, VCRC 2, RETH on the first packet"),
)
_CX8 = replace(_CX7, name="ConnectX-8 800G", gb_per_s=_datasheet(100, "GB/s", "800 Gb/s"))

CLUSTERS = {
    c.name: c
    for c in (
        Cluster("h100_8x400g", "8 H100 a node, one 400 Gb/s NIC a GPU", _H100, _CX7, 8),
        Cluster("h200_8x400g", "8 H200 a node, one 400 Gb/s NIC a GPU", _H200, _CX7, 8),
        Cluster("h800_8x400g", "8 H800 a node, one 400 Gb/s NIC a GPU", _H800, _CX7, 8),
        Cluster("b200_8x400g", "8 B200 a node, one 400 Gb/s NIC a GPU", _B200, _CX7, 8),
        Cluster("b300_8x800g", "8 B300 (as B200 here) a node, one 800 Gb/s NIC a GPU", _B300, _CX8, 8),
        Cluster("gb200_nvl36", "36 GB200 in one NVLink domain, one 400 Gb/s NIC a GPU", _GB200, _CX7, 36),
        Cluster("gb200_nvl72", "72 GB200 in one NVLink domain, one 400 Gb/s NIC a GPU", _GB200, _CX7, 72),
        Cluster(
            "gb300_nvl72", "72 GB300 (as GB200 here) in one NVLink domain, one 800 Gb/s NIC a GPU", _GB300, _CX8, 72
        ),
    )
}


def with_article(gpu: str) -> str:
    """A GPU's name behind "a" or "an": its first letter is read by itself, as an H100 and a B200."""
    return f"{'an' if gpu[0] in 'AEFHILMNORSX' else 'a'} {gpu}"


def get(name: str) -> Cluster:
    """The cluster of that name; ValueError lists those there are."""
    if name not in CLUSTERS:
        raise ValueError(f"cluster={name!r}: use one of {', '.join(CLUSTERS)}")
    return CLUSTERS[name]
