"""The GPUs that recipes have layouts for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid_ep.cli import names
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import memory


@dataclass(frozen=True)
class Hardware:
    """gpus_per_host: processes of a Slurm node.
    ranks_per_nvlink_domain: GPUs that reach one another without a NIC."""

    name: str
    gpu: str
    gpus_per_host: int
    ranks_per_nvlink_domain: int
    source: str
    variant: str = ""
    """Whose layouts the recipes take here; empty: its own."""

    @property
    def layouts(self) -> str:
        return self.variant or self.name

    @property
    def memory_bytes(self) -> int:
        """Of one GPU's HBM as its data sheet counts, GB = 1e9."""
        return memory.hbm_bytes(clusters.get(self.name))

    @property
    def num_sms(self) -> int:
        return int(clusters.get(self.name).gpu.num_sms.value)

    @property
    def hopper(self) -> bool:
        return self.layouts == "h100_8x400g"


# Names are those of hybrid_ep.hardware.clusters, which knows their links.
HARDWARE = {
    h.name: h
    for h in (
        Hardware("h100_8x400g", "H100 SXM 80 GB", 8, 8, "NVIDIA H100 and DGX H100 data sheets"),
        Hardware("h200_8x400g", "H200 SXM 141 GB", 8, 8, "NVIDIA H200 data sheet", "h100_8x400g"),
        Hardware("h800_8x400g", "H800 SXM 80 GB", 8, 8, "as H100, with slower NVLink", "h100_8x400g"),
        Hardware("b200_8x400g", "B200 180 GB", 8, 8, "NVIDIA DGX B200 data sheet: 1,440 GB in 8 GPUs"),
        Hardware("b300_8x800g", "B300 288 GB", 8, 8, "NVIDIA DGX B300 data sheet: 2.3 TB in 8 GPUs", "b200_8x400g"),
        Hardware(
            "gb200_nvl72",
            "GB200 186 GB",
            4,
            72,
            "NVIDIA GB200 NVL72 data sheet: 13.4 TB in 72 GPUs, 4 GPUs a compute tray",
        ),
        Hardware(
            "gb300_nvl72",
            "GB300 278 GB",
            4,
            72,
            "NVIDIA GB300 NVL72 data sheet: 20 TB in 72 GPUs, 4 GPUs a compute tray",
            "gb200_nvl72",
        ),
    )
}


def layout(variants: dict[str, dict[str, Any]], hardware: Hardware) -> dict[str, Any]:
    """A recipe's choices for this hardware: those of the generation it takes its layouts from, then its own."""
    return {**variants[hardware.layouts], **(variants.get(hardware.name, {}) if hardware.variant else {})}


def get_hardware(name: str) -> Hardware:
    """ValueError lists what there is, and says who knows a cluster without layouts. Old names are understood."""
    name = names.OLD_CLUSTERS.get(name, name)
    others = "; simulate, report, tune and bench predict it" if name in clusters.CLUSTERS else ""
    if name not in HARDWARE:
        known = ", ".join(HARDWARE)
        raise ValueError(f"cluster={name!r}: recipes have no layouts for it, use one of {known}{others}")
    return HARDWARE[name]
