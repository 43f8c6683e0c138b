"""A root folder with the files of a host's GPUs and NICs, as the driver and Linux have them."""

from __future__ import annotations

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
SETTINGS = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'


class Machine:
    """A root folder with the files that the checks read."""

    def __init__(self, root):
        self.root = root
        self.write("proc/driver/nvidia/version", OPEN)
        self.write("proc/driver/nvidia/params", SETTINGS)

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def device(self, place, numa):
        self.write(f"{place}/numa_node", f"{numa}\n")
        return self.root / place

    def gpu(self, place, numa=0):
        address = place.rsplit("/", 1)[1]
        (self.root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        link = self.root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.device(place, numa))

    def nic(self, name, place, numa=0, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", port=1):
        entry = self.root / "sys/class/infiniband" / name
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(self.device(place, numa))
        for file, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
            self.write(f"sys/class/infiniband/{name}/ports/{port}/{file}", text + "\n")
