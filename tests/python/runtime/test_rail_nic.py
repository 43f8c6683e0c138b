"""Which NIC a rank names to NVSHMEM, on file trees of hosts that are not here."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_host import Machine

from hybrid_ep import env
from hybrid_ep.hardware import fabric
from hybrid_ep.runtime import nvshmem, rail_nic

SWITCH = "sys/devices/pci0000:{0}/0000:{0}:01.0/0000:{1}:00.0"
GPUS = ("0000:1d:00.0", "0000:1e:00.0", "0000:9d:00.0", "0000:9e:00.0")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (env.NIC_LIST, *env.NIC_CHOICES):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back behind it


@pytest.fixture
def host(tmp_path):
    """Two bridges, two GPUs and two NICs at each: GPUs see both NICs of their bridge as near."""
    made = Machine(tmp_path)
    for root, bridge, numa, first in (("1a", "1b", 0, 0), ("9a", "9b", 1, 2)):
        place = SWITCH.format(root, bridge)
        for i in range(2):
            made.gpu(f"{place}/0000:{bridge}:0{i}.0/{GPUS[first + i]}", numa)
            made.nic(f"mlx5_{first + i}", f"{place}/0000:{bridge}:0{2 + i}.0/0000:{root}:1{i}.0", numa)
    return made


def bind(host, gpu):
    domain, bus, rest = gpu.split(":")
    of_torch = SimpleNamespace(
        pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(rest.split(".")[0], 16)
    )
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=of_torch):
        return rail_nic.bind(0, host.root)


def named():
    return os.environ[env.NIC_LIST], os.environ[env.NIC_BY_LIST]


@pytest.mark.parametrize("index", range(4))
def test_two_gpus_at_a_bridge_take_different_nics(host, index):
    assert bind(host, GPUS[index]) == f"mlx5_{index}:1" and named() == (f"mlx5_{index}:1", "1")


@pytest.mark.parametrize("name", env.NIC_CHOICES)
def test_what_the_user_chose_stays(host, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    monkeypatch.setenv(env.NIC_LIST, "mlx5_3")
    assert bind(host, GPUS[0]) is None and os.environ[env.NIC_LIST] == "mlx5_3" and os.environ[name] == "0"


def test_fewer_nics_than_gpus_or_more_are_left_to_nvshmem(host):
    host.nic("mlx5_4", SWITCH.format("1a", "1b") + "/0000:1b:04.0/0000:1a:12.0")  # a third at the first bridge
    assert bind(host, GPUS[0]) is None and bind(host, GPUS[2]) is None and named() == ("", "")
    for port in ("mlx5_3", "mlx5_4"):
        host.write(f"sys/class/infiniband/{port}/ports/1/state", "1: DOWN\n")
    assert bind(host, GPUS[2]) is None and named() == ("", "")


def test_a_slow_nic_beside_the_fast_ones_is_nobody_s(host):
    slow = SWITCH.format("1a", "1b") + "/0000:1b:04.0/0000:1a:12.0"
    host.nic("mlx5_00", slow, rate="25 Gb/sec (1X EDR)")  # of storage; the first by name
    assert [bind(host, gpu) for gpu in GPUS[:1]] == ["mlx5_0:1"]


@pytest.mark.parametrize(
    "listed, nics",
    [
        ("mlx5_1:1,mlx5_2:1", ["mlx5_1:1", "mlx5_1:1", "mlx5_2:1", "mlx5_2:1"]),
        ("mlx5_3:2, mlx5_0", ["mlx5_0:1", "mlx5_0:1", "mlx5_3:2", "mlx5_3:2"]),
        ("^mlx5_0,mlx5_2:1", ["mlx5_1:1", "mlx5_1:1", "mlx5_3:1", "mlx5_3:1"]),
        ("mlx5_2", ["mlx5_2:1"] * 4),
    ],
)
def test_listed_nics_are_those_to_choose_among(host, monkeypatch, listed, nics):
    for gpu, nic in zip(GPUS, nics, strict=True):
        monkeypatch.setenv(env.NIC_LIST, listed)
        monkeypatch.setenv(env.NIC_BY_LIST, "")
        assert bind(host, gpu) == nic and named() == (nic, "1")


@pytest.mark.parametrize("listed, gpu", [("mlx5_9", GPUS[0]), ("mlx5_0", "0000:77:00.0")])
def test_a_list_that_cannot_be_followed_is_said(host, monkeypatch, caplog, listed, gpu):
    monkeypatch.setenv(env.NIC_LIST, listed)
    with caplog.at_level(logging.WARNING):
        assert bind(host, gpu) is None
    assert named() == (listed, "") and f"NVSHMEM_HCA_LIST={listed}" in caplog.text and gpu in caplog.text


def test_nothing_is_named_where_nothing_is_seen(tmp_path, caplog, host):
    with caplog.at_level(logging.WARNING):
        assert bind(Machine(tmp_path / "bare"), GPUS[0]) is None
        assert bind(host, "0000:77:00.0") is None  # a GPU that the driver's folder does not show
        with mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace()):
            assert rail_nic.bind(0, host.root) is None  # a torch that says no address
    assert named() == ("", "") and not caplog.records


def test_other_kinds_of_nics_are_nvshmem_s_to_choose(tmp_path):
    host = Machine(tmp_path)
    place = SWITCH.format("1a", "1b")
    host.gpu(f"{place}/0000:1b:00.0/{GPUS[0]}")
    host.nic("efa_0", f"{place}/0000:1b:01.0/0000:1a:10.0")
    assert bind(host, GPUS[0]) is None and named() == ("", "")


def test_doctor_and_ranks_pair_alike(host):
    assert [(rail.gpu.address, rail.nic.name) for rail in fabric.rails(host.root)] == [
        (gpu, f"mlx5_{index}") for index, gpu in enumerate(GPUS)
    ]


def test_the_heap_names_it_before_nvshmem_starts(host):
    seen = []
    world = SimpleNamespace(
        running=(3, 8, 0), unique_id=lambda: b"id", start=lambda *_: seen.append(named()), stop=lambda: None
    )
    meet = SimpleNamespace(
        view=SimpleNamespace(rank=0, size=1), exchange=lambda topic, value, *_: [value], timeout_s=10
    )
    for device in (0, -1):
        env.name_nvshmem_nic("")
        heap = nvshmem.Heap(lambda: world)
        with mock.patch.object(rail_nic, "bind", side_effect=lambda d: env.name_nvshmem_nic(f"of {d}")) as bound:
            heap.start(meet, "topic", device)
            heap.start(meet, "again", device)  # runs already
        assert bound.call_count == (device >= 0)
    assert seen == [("of 0", "1"), ("", "1")]
