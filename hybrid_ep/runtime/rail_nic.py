"""The NIC that this rank's traffic between nodes goes over, named to NVSHMEM before it starts.

NVSHMEM takes the NIC nearest to a GPU, but where two GPUs and two NICs hang at one bridge both may take the same one,
and have half the bandwidth each (reported of such hosts: https://github.com/deepseek-ai/DeepEP/pull/466). Where every
GPU of the host can have a NIC of its own, each is given its own here; so it is where the user names the NICs to choose
among. Else the choice stays NVSHMEM's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from hybrid_ep import env
from hybrid_ep.hardware import fabric

log = logging.getLogger("hybrid_ep.runtime")
_KIND = "mlx5"  # what NVSHMEM looks for where nobody names NICs


def bind(device: int, root: Path = fabric.ROOT) -> str | None:
    """Names a NIC and its port to NVSHMEM by its environment variables and returns it, or returns None and leaves the
    choice to NVSHMEM: where the user has made one, where NICs are fewer than GPUs, where one GPU has several to itself
    (NVSHMEM may use them all), and where this host does not show its GPUs or NICs. NVSHMEM_HCA_LIST alone is no choice
    but says which NICs there are to choose among; one of them is taken even where GPUs share it. device: of CUDA."""
    given = env.nvshmem_nics()
    listed = given.pop(env.NIC_LIST, "")
    if given:
        return None
    ports = _ports(listed, root) if listed else None
    address = _address(device)
    rails = fabric.rails(root, ports)
    rail = next((rail for rail in rails if rail.gpu.address == address), None)
    if rail is None and ports is not None:
        log.warning(
            "%s=%s: this host shows no active NIC of these, or not this rank's GPU %s; NVSHMEM 3.8 then chooses "
            "among all NICs; with %s=1 it gives each rank one of the list in turn",
            env.NIC_LIST,
            listed,
            address,
            env.NIC_BY_LIST,
        )
    if rail is None or (ports is None and not _own_each(rails)):
        return None
    nic = f"{rail.nic.name}:{(ports or {}).get(rail.nic.name) or rail.port}"
    env.name_nvshmem_nic(nic)
    log.info("GPU %s: its rail goes over %s, %s", address, nic, fabric.NEAR[rail.far])
    return nic


def _own_each(rails: list[fabric.Rail]) -> bool:
    """Whether every GPU has a NIC of its own, and none a second one as good."""
    return all(rail.sharers == 1 and not rail.left and rail.nic.name.startswith(_KIND) for rail in rails)


def _address(device: int) -> str:
    """Of a CUDA device on the PCI bus, as the driver's folder in procfs has it; "" where torch does not say."""
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these
    if not hasattr(found, "pci_bus_id"):
        return ""
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _ports(listed: str, root: Path) -> dict[str, str]:
    """NIC: port, "" for any, of NVSHMEM_HCA_LIST: "mlx5_0:1,mlx5_1" are these, "^mlx5_0" all others."""
    entries = (entry.strip().split(":") for entry in listed.removeprefix("^").split(","))
    named = {name: more[0] if more else "" for name, *more in entries}
    return {nic.name: "" for nic in fabric.nics(root) if nic.name not in named} if listed.startswith("^") else named
