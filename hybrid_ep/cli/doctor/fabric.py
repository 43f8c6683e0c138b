"""Checks of NICs for RDMA, of the GPU that each is next to, and of what the NVIDIA driver allows them
(`hybrid_ep.hardware.fabric` reads the first two)."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from hybrid_ep.cli.doctor.finding import FAIL, OK, SKIP, WARN, Found
from hybrid_ep.cli.outputs import count
from hybrid_ep.hardware.fabric import NEAR, ROOT, gpus, nics, rails, text

DMABUF_KERNEL = (5, 12)  # the first Linux whose RDMA stack registers dma-buf memory


def check_nics(root: Path = ROOT) -> Found:
    found = nics(root)
    if not found:
        status = WARN if gpus(root) else SKIP
        remedy = (
            "needed across nodes: install the NIC's driver (rdma-core, MLNX_OFED or DOCA); in containers pass "
            "/dev/infiniband through"
            if status == WARN
            else ""
        )
        yield status, "no RDMA NIC (/sys/class/infiniband is empty)", remedy
    for nic in found:
        for port in nic.ports:
            rate, layer = port.rate or "rate unknown", port.layer or "link layer unknown"
            what = f"{nic.name} port {port.number}: {port.state}, {rate}, {layer}"
            if port.state == "ACTIVE":
                yield OK, what
            else:
                yield (
                    WARN,
                    what,
                    (
                        f"ibstat {nic.name}; cable, switch port, and on InfiniBand a subnet manager; a rail "
                        "that is down is chosen by nobody"
                    ),
                )


def check_pairs(root: Path = ROOT) -> Found:
    """Every GPU and the NIC of its rail."""
    found = rails(root)
    if not found:
        active = sum(nic.active is not None for nic in nics(root))
        yield SKIP, f"{count(len(gpus(root)), 'GPU')} and {count(active, 'active NIC')}: nothing to pair"
        return
    users: dict[str, list[int]] = {}
    for index, rail in enumerate(found):
        users.setdefault(rail.nic.name, []).append(index)
        what = f"GPU {index} ({rail.gpu.address}) - {rail.nic.name}, {NEAR[rail.far]}"
        if rail.far == len(NEAR) - 1:
            yield WARN, what, "its rail crosses the sockets' link; is a NIC of this socket down or hidden?"
        else:
            yield OK, what
    shared = {name: indices for name, indices in users.items() if len(indices) > 1}
    if shared:
        what = "; ".join(f"{name} serves GPUs {indices}" for name, indices in shared.items())
        yield WARN, f"rails are shared: {what}", "their GPUs divide its bandwidth; one NIC a GPU is what rails assume"


def check_gpudirect(root: Path = ROOT, release: str = "") -> Found:
    """Whether a NIC may read and write GPU memory: by nvidia_peermem, or by dma-buf."""
    version = text(root / "proc/driver/nvidia/version")
    if not version:
        yield SKIP, "no NVIDIA driver: nothing to let a NIC at"
        return
    kernel = tuple(int(n) for n in re.findall(r"\d+", release or platform.release())[:2])
    if (root / "sys/module/nvidia_peermem").is_dir():
        yield OK, "nvidia_peermem is loaded"
    elif "Open Kernel Module" in version and kernel >= DMABUF_KERNEL:
        yield OK, f"dma-buf: open kernel modules on Linux {kernel[0]}.{kernel[1]}"
    elif nics(root):
        yield (
            FAIL,
            "no nvidia_peermem, and no dma-buf (open kernel modules on Linux >= 5.12)",
            ("modprobe nvidia_peermem, or install the driver's open kernel modules"),
        )
    else:
        yield OK, "neither nvidia_peermem nor dma-buf, and no NIC that would need it"


def check_driver(root: Path = ROOT) -> Found:
    """Settings of the driver that GPU-initiated RDMA (IBGDA) needs."""
    version = text(root / "proc/driver/nvidia/version")
    if not version:
        yield SKIP, "no NVIDIA driver"
        return
    number = re.search(r"(?:Module|x86_64|aarch64)\s+(\d+\.\d+[.\d]*)", version)
    what = f"NVIDIA driver {number[1] if number else 'of an unknown version'}"
    parameters = text(root / "proc/driver/nvidia/params")
    missing = []
    if not re.search(r"^EnableStreamMemOPs: 1$", parameters, re.M):
        missing.append("NVreg_EnableStreamMemOPs=1")
    if "PeerMappingOverride=1" not in parameters:
        missing.append('NVreg_RegistryDwords="PeerMappingOverride=1;"')
    if missing and nics(root):
        yield (
            WARN,
            f"{what} without {', '.join(missing)}",
            (
                f"GPU-initiated RDMA may not start: put 'options nvidia {' '.join(missing)}' into "
                "/etc/modprobe.d/nvidia.conf, rebuild the initramfs, reboot; or "
                "install gdrcopy for the CPU-assisted mode"
            ),
        )
    else:
        yield OK, what
