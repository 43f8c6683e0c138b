"""What share of a GPU's peak the compute of a training step reaches: fitted to published steps, by GPU and precision.

Nobody published it by itself; it is what is left when the exchange, the bubble and the rest of `step_time` are taken
off. `training` has the rows, fits every number again and says how far the rows that were held out are off."""

from __future__ import annotations

from typing import NamedTuple

from hybrid_ep.hardware.clusters import Cluster

# (GPU, precision of the GEMMs): geometric mean over half of its published rows. mxfp8 counts as fp8.
FITTED = {
    ("H100", "bf16"): 0.2758,
    ("H100", "fp8"): 0.3032,
    ("GB200", "bf16"): 0.4236,
    ("GB200", "fp8"): 0.2109,
    ("B200", "fp8"): 0.1085,
    ("B300", "fp8"): 0.1583,
}
# GPUs of which no step was published in a precision, and whose number is taken: where both have one in fp8, scaled as
# these are to each other, or a GPU that reaches half of the other's share in fp8 would seem twice as fast in bf16.
STANDS_IN = {
    ("H200", "bf16"): "H100",
    ("H200", "fp8"): "H100",
    ("H800", "bf16"): "H100",
    ("H800", "fp8"): "H100",
    ("B200", "bf16"): "GB200",
    ("B300", "bf16"): "GB200",
    ("GB300", "bf16"): "GB200",
    ("GB300", "fp8"): "GB200",
}


class Efficiency(NamedTuple):
    """share: of the peak. source: in words, for the line that uses it."""

    share: float
    source: str


def gpu_word(cluster: Cluster) -> str:
    """H100 of "H100 SXM5"."""
    return cluster.gpu.name.split()[0].upper()


def precision_class(dtype: str) -> str:
    """bf16 or fp8."""
    return "bf16" if dtype == "bf16" else "fp8"


def of(cluster: Cluster, dtype: str) -> Efficiency:
    """ValueError where no GPU stands in."""
    gpu, precision = gpu_word(cluster), precision_class(dtype)
    other = STANDS_IN.get((gpu, precision), gpu)
    if (other, precision) not in FITTED:
        raise ValueError(
            f"cluster={cluster.name!r}: no published step of {gpu} in {precision} to take the efficiency "
            "from; give efficiency"
        )
    said, share = f"as published steps of {other} in {precision} have it", FITTED[other, precision]
    if other == gpu:
        return Efficiency(share, said)
    said += f", for want of any of {gpu}"
    if precision == "bf16" and (gpu, "fp8") in FITTED:
        share *= FITTED[gpu, "fp8"] / FITTED[other, "fp8"]
        said += ", times what it reaches of their share in fp8"
    return Efficiency(share, said)
