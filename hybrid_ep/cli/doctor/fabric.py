"""NICs for RDMA, the GPU that each is next to, and what the NVIDIA driver allows them: read from sysfs and procfs.

Functions take the root of the file system, so that tests show them machines that are not there.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from hybrid_ep.cli.doctor.finding import FAIL, OK, SKIP, WARN, Found
from hybrid_ep.cli.outputs import count

ROOT = Path("/")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
DMABUF_KERNEL = (5, 12)  # the first Linux whose RDMA stack registers dma-buf memory

# How far a NIC is from a GPU, nearest first.
NEAR = ("behind one PCIe switch", "on one root complex", "on one NUMA node", "across sockets")


@dataclass(frozen=True)
class Nic:
    """name: as ibv_devices says; path: PCI addresses from the root port down; numa: node or -1; ports: state, rate."""

    name: str
    path: tuple[str, ...]
    numa: int
    ports: tuple[tuple[int, str, str, str], ...]  # number, state, rate, link layer


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _pci_path(device: Path) -> tuple[str, ...]:
    """(root complex, bridges..., function) of a device's real path in sysfs."""
    parts = device.resolve().parts
    return tuple(part for part in parts if part.startswith("pci") or _ADDRESS.fullmatch(part))


def _numa(device: Path) -> int:
    text = _text(device / "numa_node")
    return int(text) if text.lstrip("-").isdigit() else -1


def nics(root: Path = ROOT) -> list[Nic]:
    """All RDMA devices, by name."""
    found = []
    for entry in sorted((root / "sys/class/infiniband").glob("*")):
        ports = []
        for port in sorted((entry / "ports").glob("*"), key=lambda p: int(p.name)):
            state = _text(port / "state").partition(": ")[2]
            ports.append((int(port.name), state or "unknown", _text(port / "rate"), _text(port / "link_layer")))
        found.append(Nic(entry.name, _pci_path(entry / "device"), _numa(entry / "device"), tuple(ports)))
    return found


def gpus(root: Path = ROOT) -> list[tuple[str, tuple[str, ...], int]]:
    """(PCI address, path, NUMA node) of every GPU that the NVIDIA driver has."""
    found = []
    for entry in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        device = root / "sys/bus/pci/devices" / entry.name.lower()
        found.append((entry.name.lower(), _pci_path(device), _numa(device)))
    return found


def distance(a: tuple[str, ...], numa_a: int, b: tuple[str, ...], numa_b: int) -> int:
    """Index into NEAR. A common bridge below the root port is a switch; the root complex alone is not."""
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    if common >= 3:  # root complex, root port, and a bridge of the switch
        return 0
    if common >= 1:
        return 1
    return 2 if numa_a == numa_b and numa_a >= 0 else 3


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
        for number, state, rate, layer in nic.ports:
            text = f"{nic.name} port {number}: {state}, {rate or 'rate unknown'}, {layer or 'link layer unknown'}"
            if state == "ACTIVE":
                yield OK, text
            else:
                yield (
                    WARN,
                    text,
                    (
                        f"ibstat {nic.name}; cable, switch port, and on InfiniBand a subnet manager; a rail "
                        "that is down is chosen by nobody"
                    ),
                )


def check_pairs(root: Path = ROOT) -> Found:
    """Every GPU and the NIC nearest to it: its rail."""
    cards = [nic for nic in nics(root) if any(state == "ACTIVE" for _, state, _, _ in nic.ports)]
    devices = gpus(root)
    if not cards or not devices:
        yield SKIP, f"{count(len(devices), 'GPU')} and {count(len(cards), 'active NIC')}: nothing to pair"
        return
    taken: dict[str, list[int]] = {}
    for index, (address, path, numa) in enumerate(devices):
        # Of equally near ones the least taken, as a launcher that spreads rails would.
        far, _, nic = min(
            ((distance(path, numa, n.path, n.numa), len(taken.get(n.name, [])), n) for n in cards),
            key=lambda option: (option[0], option[1], option[2].name),
        )
        taken.setdefault(nic.name, []).append(index)
        text = f"GPU {index} ({address}) - {nic.name}, {NEAR[far]}"
        if far == len(NEAR) - 1:
            yield WARN, text, "its rail crosses the sockets' link; is a NIC of this socket down or hidden?"
        else:
            yield OK, text
    shared = {name: users for name, users in taken.items() if len(users) > 1}
    if shared:
        text = "; ".join(f"{name} serves GPUs {users}" for name, users in shared.items())
        yield WARN, f"rails are shared: {text}", "their GPUs divide its bandwidth; one NIC a GPU is what rails assume"


def check_gpudirect(root: Path = ROOT, release: str = "") -> Found:
    """Whether a NIC may read and write GPU memory: by nvidia_peermem, or by dma-buf."""
    version = _text(root / "proc/driver/nvidia/version")
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
    version = _text(root / "proc/driver/nvidia/version")
    if not version:
        yield SKIP, "no NVIDIA driver"
        return
    number = re.search(r"(?:Module|x86_64|aarch64)\s+(\d+\.\d+[.\d]*)", version)
    text = f"NVIDIA driver {number[1] if number else 'of an unknown version'}"
    parameters = _text(root / "proc/driver/nvidia/params")
    missing = []
    if not re.search(r"^EnableStreamMemOPs: 1$", parameters, re.M):
        missing.append("NVreg_EnableStreamMemOPs=1")
    if "PeerMappingOverride=1" not in parameters:
        missing.append('NVreg_RegistryDwords="PeerMappingOverride=1;"')
    if missing and nics(root):
        yield (
            WARN,
            f"{text} without {', '.join(missing)}",
            (
                f"GPU-initiated RDMA may not start: put 'options nvidia {' '.join(missing)}' into "
                "/etc/modprobe.d/nvidia.conf, rebuild the initramfs, reboot; or "
                "install gdrcopy for the CPU-assisted mode"
            ),
        )
    else:
        yield OK, text
