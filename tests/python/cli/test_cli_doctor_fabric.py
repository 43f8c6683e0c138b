"""NICs, rails and driver settings, on file trees of machines that are not here."""

from __future__ import annotations

import pytest
from fake_host import OPEN, Machine

from hybrid_ep.cli.doctor import fabric, machine
from hybrid_ep.cli.doctor.finding import FAIL, OK, SKIP, WARN

SWITCH = "sys/devices/pci0000:1a/0000:1a:01.0/0000:1b:00.0"
OTHER_SOCKET = "sys/devices/pci0000:9a/0000:9a:01.0"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Release Build\n"


@pytest.fixture
def host(tmp_path):
    return Machine(tmp_path)


def lines(check, host, *arguments):
    return [(status, text) for status, text, *_ in check(host.root, *arguments)]


def test_a_machine_without_anything_is_no_failure(tmp_path):
    for check in (fabric.check_nics, fabric.check_pairs, fabric.check_gpudirect, fabric.check_driver):
        assert {status for status, *_ in check(tmp_path)} == {SKIP}


def test_each_gpu_has_the_nic_behind_its_switch(host):
    host.gpu(f"{SWITCH}/0000:1c:00.0/0000:1d:00.0")
    host.gpu(f"{OTHER_SOCKET}/0000:9b:00.0", numa=1)
    host.nic("mlx5_0", f"{SWITCH}/0000:1c:01.0/0000:1e:00.0")
    host.nic("mlx5_1", "sys/devices/pci0000:9a/0000:9a:02.0/0000:9c:00.0", numa=1)
    assert lines(fabric.check_pairs, host) == [
        (OK, "GPU 0 (0000:1d:00.0) - mlx5_0, behind one PCIe switch"),
        (OK, "GPU 1 (0000:9b:00.0) - mlx5_1, on one root complex"),
    ]
    assert [status for status, _ in lines(fabric.check_nics, host)] == [OK, OK]


def test_a_nic_that_is_down_leaves_its_gpu_a_far_and_shared_one(host):
    host.gpu(f"{SWITCH}/0000:1c:00.0/0000:1d:00.0")
    host.gpu(f"{OTHER_SOCKET}/0000:9b:00.0", numa=1)
    host.nic("mlx5_0", f"{SWITCH}/0000:1c:01.0/0000:1e:00.0")
    host.nic("mlx5_1", "sys/devices/pci0000:9a/0000:9a:02.0/0000:9c:00.0", numa=1, state="1: DOWN")
    near, far, shared = lines(fabric.check_pairs, host)
    assert near[0] == OK and far == (WARN, "GPU 1 (0000:9b:00.0) - mlx5_0, across sockets")
    assert shared == (WARN, "rails are shared: mlx5_0 serves GPUs [0, 1]")
    assert lines(fabric.check_nics, host)[1] == (WARN, "mlx5_1 port 1: DOWN, 400 Gb/sec (4X NDR), InfiniBand")


def test_equally_near_nics_are_spread(host):
    for i in range(2):
        host.gpu(f"{SWITCH}/0000:1c:0{i}.0/0000:2{i}:00.0")
        host.nic(f"mlx5_{i}", f"{SWITCH}/0000:1c:1{i}.0/0000:3{i}:00.0")
    assert [text.rsplit(" - ")[1].split(",")[0] for _, text in lines(fabric.check_pairs, host)] == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    "version, module, kernel, nic, status",
    [
        (OPEN, False, "5.15.0-91", True, OK),
        (OPEN, False, "5.4.0", True, FAIL),
        (CLOSED, False, "6.8.0", True, FAIL),
        (CLOSED, True, "5.4.0", True, OK),
        (CLOSED, False, "6.8.0", False, OK),
    ],
)
def test_gpudirect(host, version, module, kernel, nic, status):
    host.write("proc/driver/nvidia/version", version)
    if module:
        (host.root / "sys/module/nvidia_peermem").mkdir(parents=True)
    if nic:
        host.nic("mlx5_0", f"{SWITCH}/0000:1e:00.0")
    assert [s for s, _ in lines(fabric.check_gpudirect, host, kernel)] == [status]


def test_driver_settings_for_rdma_that_the_gpu_starts(host):
    host.nic("mlx5_0", f"{SWITCH}/0000:1e:00.0")
    assert lines(fabric.check_driver, host) == [(OK, "NVIDIA driver 570.86.15")]
    host.write("proc/driver/nvidia/params", 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n')
    ((status, text, remedy),) = fabric.check_driver(host.root)
    assert status == WARN and "PeerMappingOverride=1" in text and "/etc/modprobe.d/nvidia.conf" in remedy


@pytest.mark.parametrize("up, status", [((18, 18), OK), ((18, 17), FAIL), ((), WARN), ((0, 0), WARN)])
def test_links_that_are_down_are_named(up, status):
    text = "".join(
        f"GPU {g}: NVIDIA H100 (UUID: x)\n"
        + "".join(f"\t Link {i}: 26.562 GB/s\n" for i in range(n))
        + "\t Link 17: <inactive>\n"
        for g, n in enumerate(up)
    )
    ((found, said, *remedy),) = machine.judge_links(text)
    assert found == status
    assert status != FAIL or "GPU [1]" in remedy[0]
