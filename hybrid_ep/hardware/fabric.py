"""RDMA NICs and GPUs of this host, how near they are to each other, and the NIC that each GPU's rail goes over: read
from sysfs and procfs. Functions take the root of the file system, so that tests show them machines that are not there.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")

# How far a NIC is from a GPU, nearest first.
NEAR = ("behind one PCIe switch", "on one root complex", "on one NUMA node", "across sockets")


@dataclass(frozen=True)
class Port:
    """number: from 1. state: "ACTIVE" where it can be used. rate, layer: as sysfs has them, "" if it has not."""

    number: int
    state: str
    rate: str
    layer: str

    @property
    def gigabits(self) -> float:
        """Of its rate, a second; 0.0 if unknown."""
        found = re.match(r"\s*([0-9.]+)\s*Gb/sec", self.rate)
        return float(found[1]) if found else 0.0


@dataclass(frozen=True)
class Nic:
    """name: as ibv_devices says; path: PCI addresses from the root port down; numa: node or -1."""

    name: str
    path: tuple[str, ...]
    numa: int
    ports: tuple[Port, ...]

    @property
    def active(self) -> Port | None:
        """The first of its fastest ports that are up."""
        up = [port for port in self.ports if port.state == "ACTIVE"]
        return max(up, key=lambda port: port.gigabits) if up else None


@dataclass(frozen=True)
class Gpu:
    """address: of PCI, as the driver writes it, in lower case; path, numa: as of a NIC."""

    address: str
    path: tuple[str, ...]
    numa: int


@dataclass(frozen=True)
class Rail:
    """What a GPU's traffic between nodes goes over. far: index into NEAR. sharers: GPUs with this NIC. left: other NICs
    as near and as fast, which no GPU has."""

    gpu: Gpu
    nic: Nic
    port: int
    far: int
    sharers: int
    left: tuple[str, ...]


def text(path: Path) -> str:
    """What a file says, "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def nics(root: Path = ROOT) -> list[Nic]:
    """All RDMA devices, by name."""
    found = []
    for entry in sorted((root / "sys/class/infiniband").glob("*")):
        ports = []
        for port in sorted((entry / "ports").glob("*"), key=lambda p: int(p.name)):
            state = text(port / "state").partition(": ")[2]
            ports.append(Port(int(port.name), state or "unknown", text(port / "rate"), text(port / "link_layer")))
        found.append(Nic(entry.name, _pci_path(entry / "device"), _numa(entry / "device"), tuple(ports)))
    return found


def gpus(root: Path = ROOT) -> list[Gpu]:
    """Every GPU that the NVIDIA driver has, by address."""
    found = []
    for entry in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        device = root / "sys/bus/pci/devices" / entry.name.lower()
        found.append(Gpu(entry.name.lower(), _pci_path(device), _numa(device)))
    return found


def rails(root: Path = ROOT, only: Collection[str] | None = None) -> list[Rail]:
    """A NIC for every GPU, in the order of addresses: the nearest, of these the fastest, of these the one that the GPUs
    before it have taken least; [] without active NICs. Every process of a host comes to the same. only: names of NICs
    to choose among."""
    cards = [(nic, port) for nic in nics(root) if (port := nic.active) and (only is None or nic.name in only)]
    taken: dict[str, int] = {}
    chosen = []
    for gpu in gpus(root) if cards else []:
        near = [(distance(gpu, nic), -port.gigabits, nic, port) for nic, port in cards]
        best = min((far, slow) for far, slow, *_ in near)
        alike = [(taken.get(nic.name, 0), nic.name, nic, port) for far, slow, nic, port in near if (far, slow) == best]
        _, name, nic, port = min(alike, key=lambda option: option[:2])
        taken[name] = taken.get(name, 0) + 1
        chosen.append((gpu, nic, port.number, best[0], [option[1] for option in alike]))
    return [
        Rail(gpu, nic, port, far, taken[nic.name], tuple(name for name in alike if name not in taken))
        for gpu, nic, port, far, alike in chosen
    ]


def distance(a: Gpu | Nic, b: Gpu | Nic) -> int:
    """Index into NEAR. A common bridge below the root port is a switch; the root complex alone is not."""
    common = 0
    while common < min(len(a.path), len(b.path)) and a.path[common] == b.path[common]:
        common += 1
    if common >= 3:  # root complex, root port, and a bridge of the switch
        return 0
    if common >= 1:
        return 1
    return 2 if a.numa == b.numa and a.numa >= 0 else 3


def _pci_path(device: Path) -> tuple[str, ...]:
    """(root complex, bridges..., function) of a device's real path in sysfs."""
    parts = device.resolve().parts
    return tuple(part for part in parts if part.startswith("pci") or _ADDRESS.fullmatch(part))


def _numa(device: Path) -> int:
    node = text(device / "numa_node")
    return int(node) if node.lstrip("-").isdigit() else -1
