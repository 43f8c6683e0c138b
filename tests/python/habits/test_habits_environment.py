"""Nonsense in the variables of the environment, on all ranks and on some, and variables that differ between ranks."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_buffer import IDX, E, H, X, make, round_trip
from world import error_of

from hybrid_ep import HybridEPBuffer, env
from hybrid_ep.runtime import devices
from hybrid_ep.runtime.bootstrap import GroupView
from hybrid_ep.runtime.options import asked_executor
from hybrid_ep.testing import VirtualWorld

NONSENSE = {
    "HYBRID_EP_RANKS_PER_NODE": ["0", "-1", "two", "1e3", "99999999999999999999"],
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": ["0", "NaN"],
    "HYBRID_EP_TIMEOUT_S": ["0", "-1", "nan", "inf", "1e300", "soon"],
    "HYBRID_EP_EXECUTOR": ["abacus", "host,cuda"],
    "HYBRID_EP_NUM_BLOCKS": ["0", "100000", "4.5"],
    "HYBRID_EP_TUNING": ["/nonexistent/tuning.json", "/dev/null", "/"],
    "HYBRID_EP_ARENA_MIB": ["-1", "99999999999999999999", "1 GiB"],
    "HYBRID_EP_LANDING": ["last", "first,all", "0"],
    "HYBRID_EP_RESULT_CACHE_MIB": ["-1", "99999999999999999999", "1 GiB"],
    "HYBRID_EP_SEED": ["-5", "1.5", "99999999999999999999"],
}


def test_habits_every_variable_of_a_buffer_has_nonsense():
    assert set(NONSENSE) == {name for name in env.TABLE if not name.startswith("EXPERT_")}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in NONSENSE.items() for value in values])
def test_habits_nonsense_in_the_environment(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    world = VirtualWorld(1, 1)
    with pytest.raises(ValueError) as error:
        world.run(lambda rank, group: HybridEPBuffer(group, H, 8, E, timeout_s=5))
    assert name in str(error.value) and value in str(error.value), error.value
    monkeypatch.delenv(name)
    world.run(lambda rank, group: round_trip(make(group)))


@pytest.mark.parametrize("library", [None, {"devices": [], "why_none": "the driver is too old"}])
def test_habits_an_executor_in_the_environment_that_this_machine_lacks(monkeypatch, library):
    """The remedy names the variable whether the library is missing or finds no device."""

    def load():
        if library is None:
            raise RuntimeError("the library was not built")
        return library

    monkeypatch.setattr(devices, "load", load)
    monkeypatch.setenv("HYBRID_EP_EXECUTOR", "cuda")
    world = VirtualWorld(1, 1)
    with pytest.raises(ValueError, match="(not built|too old).*HYBRID_EP_EXECUTOR asks for it"):
        world.run(lambda rank, group: HybridEPBuffer(group, H, 8, E, timeout_s=5))
    monkeypatch.delenv("HYBRID_EP_EXECUTOR")
    world.run(lambda rank, group: round_trip(make(group)))


GPUS, NCCL, GLOO = True, "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"


def executor_of(ctx, gpus: bool, backends: str, variable: str | None, given: str | None) -> str:
    """Which executor a buffer of torch's own group asks for, on a machine with GPUs or without."""
    if variable is not None:
        os.environ["HYBRID_EP_EXECUTOR"] = variable
    try:
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=gpus),
            mock.patch.object(dist, "get_backend_config", return_value=backends),
            mock.patch.object(devices, "current", side_effect=ValueError("no library of the GPU")),
        ):
            with HybridEPBuffer(ctx.group(2), H, 8, 2, executor=given) as buffer:
                round_trip(buffer)
                return "host"
    except ValueError as error:
        return error_of(error)
    finally:
        os.environ.pop("HYBRID_EP_EXECUTOR", None)


@pytest.mark.parametrize(
    "gpus, backends, variable, given, said",
    [
        (GPUS, NCCL, None, None, "no library of the GPU (executor= or HYBRID_EP_EXECUTOR asks for it, or a group"),
        (GPUS, "cuda:nccl", None, None, "no library of the GPU"),
        (GPUS, NCCL, "host", None, "host"),
        (GPUS, NCCL, None, "host", "host"),
        (GPUS, GLOO, None, None, "host"),
        (GPUS, GLOO, "cuda", None, "no library of the GPU"),
        (not GPUS, NCCL, None, None, "host"),
        (not GPUS, GLOO, None, None, "host"),
    ],
)
def test_habits_a_group_with_nccl_is_one_of_gpus(world, gpus, backends, variable, given, said):
    """It is never served by the host in silence, and a host's group needs no variable."""
    found = world.run(executor_of, gpus, backends, variable, given, ranks=range(2))
    assert all(said in str(one) for one in found), found


@pytest.mark.parametrize("argument", ["num_sms_dispatch_api", "num_blocks_unpermute"])
def test_habits_more_blocks_than_any_device_has(argument):
    world = VirtualWorld(1, 1)
    with pytest.raises(ValueError, match=f"{argument}=100000 must be an integer from 1 to 1024"):
        world.run(lambda rank, group: make(group, **{argument: 100000}))
    with pytest.raises(ValueError, match="num_sms=100000 must be an integer from 1 to 1024"):
        world.run(lambda rank, group: make(group).dispatch(X, topk_idx=IDX, num_sms=100000))
    world.run(lambda rank, group: round_trip(make(group, **{argument: 1024})))


def test_habits_a_group_that_torch_did_not_register_is_of_the_host():
    """Asked only where neither an argument nor the variable decides: other groups' backends are nobody's business."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    view = GroupView(0, 1, "bare", dist.HashStore(), None, 0, group)
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert not view.of_gpus and asked_executor(None, view) == "host"
        with mock.patch.object(dist, "get_backend_config", side_effect=AssertionError):
            assert asked_executor("host_checked", view) == "host_checked"


def other_environment(ctx, name: str, values: list[str]) -> dict | str:
    os.environ[name] = values[ctx.rank]
    try:
        with HybridEPBuffer(ctx.group(2), H, 8, 2) as buffer:
            round_trip(buffer)
        return "right"
    except ValueError as error:
        return error_of(error)
    finally:
        del os.environ[name]


@pytest.mark.parametrize(
    "name, values",
    [("HYBRID_EP_TIMEOUT_S", ["40", "50"]), ("HYBRID_EP_SEED", ["1", "2"]), ("HYBRID_EP_RESULT_CACHE_MIB", ["0", "7"])],
)
def test_habits_ranks_whose_environments_may_differ(world, name, values):
    assert world.run(other_environment, name, values, ranks=range(2)) == ["right"] * 2


@pytest.mark.parametrize(
    "name, values, said",
    [
        ("HYBRID_EP_NUM_BLOCKS", ["1", "2"], "num_sms_dispatch_api"),
        ("HYBRID_EP_RANKS_PER_NODE", ["1", "2"], "num_of_hybrid_ep_ranks_per_nvlink_domain"),
        ("HYBRID_EP_EXECUTOR", ["host", "host_checked"], "executor"),
    ],
)
def test_habits_ranks_whose_environments_must_agree(world, name, values, said):
    first, second = world.run(other_environment, name, values, ranks=range(2))
    assert first["type"] == second["type"] == "ValueError" and first["message"] == second["message"]
    assert said in first["message"] and "must be the same on every rank" in first["message"]


def nonsense_here(ctx, name: str, value: str, which: list[int]) -> list:
    """Two attempts of which the first fails on some ranks, on one group; then buffers of that group still meet."""
    group = ctx.group(2)
    errors = []
    for _ in range(2):
        if ctx.rank in which:
            os.environ[name] = value
        try:
            HybridEPBuffer(group, H, 8, 2, timeout_s=200)
        except ValueError as error:
            errors.append(str(error))
        finally:
            os.environ.pop(name, None)
    with HybridEPBuffer(group, H, 8, 2) as buffer:
        round_trip(buffer)
    return errors


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
def test_habits_nonsense_on_some_ranks(world, which):
    """Nobody waits for the ranks that refused, who say why, and later buffers of the same group meet as before."""
    answers = world.run(nonsense_here, "HYBRID_EP_NUM_BLOCKS", "4.5", which, ranks=range(2))
    for rank, errors in enumerate(answers):
        assert len(errors) == 2 and all("HYBRID_EP_NUM_BLOCKS='4.5'" in e for e in errors)
        assert all(("refused the arguments" in e) == (rank not in which) for e in errors)
