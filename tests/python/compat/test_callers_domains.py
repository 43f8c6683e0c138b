"""get_physical_domain_size and get_logical_domain_size of a group, which say what a buffer of it says."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import compat
from hybrid_ep.compat import envs
from hybrid_ep.compat.elastic import ElasticBuffer
from hybrid_ep.compat.envs import get_logical_domain_size, get_physical_domain_size
from hybrid_ep.errors import BootstrapError
from hybrid_ep.runtime import devices, options
from hybrid_ep.runtime.bootstrap import GroupView
from hybrid_ep.testing import VirtualWorld

# Signatures, as facts: deepseek-ai/DeepEP, branch main, commit dd758ca, deep_ep/utils/envs.py.
REQUIRED = inspect.Parameter.empty
UPSTREAM = {
    get_physical_domain_size: {"group": REQUIRED},
    get_logical_domain_size: {"group": REQUIRED, "allow_hybrid_mode": True},
}


@pytest.mark.parametrize("function", UPSTREAM)
def test_signatures_are_upstreams(function):
    parameters = inspect.signature(function).parameters
    assert {name: p.default for name, p in parameters.items()} == UPSTREAM[function]
    assert list(parameters) == list(UPSTREAM[function])


def test_served_where_deep_ep_has_them():
    module = compat.install_as_deep_ep()
    try:
        import deep_ep.utils.envs

        for served in (module, deep_ep.utils.envs):
            assert served.get_physical_domain_size is get_physical_domain_size
            assert served.get_logical_domain_size is get_logical_domain_size
        with pytest.raises(ImportError, match="init_dist"):
            from deep_ep.utils.envs import init_dist  # noqa: F401
    finally:
        compat.uninstall()


@contextlib.contextmanager
def _elsewhere(ctx, size, declared, hosts):
    """The group of the first ranks, where what stands is declared and hosts have the names given, and nothing is known
    of it before or after."""
    group, declaration = ctx.group(size), {} if declared is None else {"HYBRID_EP_RANKS_PER_NODE": declared}
    host = socket.gethostname() if hosts is None else hosts[ctx.rank]
    envs._known.pop(group, None)
    with mock.patch.dict(os.environ, declaration), mock.patch.object(socket, "gethostname", return_value=host):
        yield group
    envs._known.pop(group, None)


def _sizes(ctx, size, declared, hosts):
    """What the functions say, and what buffers of the group do, with and without hybrid mode."""
    with _elsewhere(ctx, size, declared, hosts) as group:
        said = (
            get_physical_domain_size(group),
            get_logical_domain_size(group),
            get_logical_domain_size(group, allow_hybrid_mode=False),
            get_logical_domain_size(group, False),
        )
        shape = {"num_max_tokens_per_rank": 4, "hidden": 8, "num_gpu_timeout_secs": 30}
        hybrid, direct = (ElasticBuffer(group, allow_hybrid_mode=mode, **shape) for mode in (True, False))
        assert hybrid.get_physical_domain_size() == direct.get_physical_domain_size() == said[0]
        assert hybrid.get_logical_domain_size() == said[1] == (hybrid.num_scaleout_ranks, hybrid.num_scaleup_ranks)
        assert direct.get_logical_domain_size() == said[2] == (direct.num_scaleout_ranks, direct.num_scaleup_ranks)
        for buffer in (hybrid, direct):
            assert buffer.scaleout_rank_idx * buffer.num_scaleup_ranks + buffer.scaleup_rank_idx == ctx.rank
            buffer.destroy()
    return said


@pytest.mark.parametrize(
    ("size", "declared", "hosts", "nodes"),
    [
        (1, None, None, 1),
        (1, "4", None, 1),
        (2, None, None, 1),
        (2, "1", None, 2),
        (2, "8", None, 1),
        (2, None, "ab", 2),
        (4, None, None, 1),
        (4, "2", None, 2),
        (4, None, "aabb", 2),
        (4, "4", "aabb", 1),
    ],
)
def test_a_buffer_says_the_same(world, size, declared, hosts, nodes):
    local = size // nodes
    want = ((nodes, local), (nodes, local), (1, size), (1, size))
    assert world.run(_sizes, size, declared, hosts, ranks=range(size)) == [want] * size


def _asked_by_one(ctx):
    """The first call of a group is of all ranks; then one may ask alone, and buffers still meet."""
    with _elsewhere(ctx, 2, None, None) as group, mock.patch.dict(os.environ, {"HYBRID_EP_TIMEOUT_S": "20"}):
        sizes = [get_logical_domain_size(group)]
        if ctx.rank == 1:
            sizes += [get_physical_domain_size(group), get_logical_domain_size(group, False)]
        ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=8, num_gpu_timeout_secs=20).destroy()
        return sizes


def test_later_calls_wait_for_nobody(world):
    assert world.run(_asked_by_one, ranks=range(2)) == [[(1, 2)], [(1, 2), (1, 2), (1, 2)]]


def test_a_group_that_is_gone_is_forgotten():
    world = VirtualWorld(1, 2)
    before = len(envs._known)
    assert world.run(lambda rank, group: get_physical_domain_size(group)) == [(1, 2)] * 2
    assert len(envs._known) == before + 2
    del world
    assert len(envs._known) == before


def _refused(ctx, size, declared, hosts):
    errors, said = [], declared[ctx.rank] if isinstance(declared, tuple) else declared
    with _elsewhere(ctx, size, said, hosts) as group:
        for ask in (
            get_physical_domain_size,
            lambda group: get_logical_domain_size(group, False),
            lambda group: ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=8, num_gpu_timeout_secs=30),
        ):
            with pytest.raises(ValueError) as raised:
                ask(group)
            errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize(
    ("size", "declared", "hosts", "text"),
    [
        (4, "3", None, "HYBRID_EP_RANKS_PER_NODE=3 puts the group's ranks [0, 1, 2, 3] on nodes [0, 0, 0, 1]"),
        (4, None, "aaab", "the group's ranks lie on hosts ['a', 'a', 'a', 'b']"),
        (4, None, "abab", "the group's ranks lie on hosts ['a', 'b', 'a', 'b']"),
        (4, "2", "abab", "let the launcher number ranks host by host"),
    ],
)
def test_what_a_buffer_refuses_is_refused_alike(world, size, declared, hosts, text):
    for errors in world.run(_refused, size, declared, hosts, ranks=range(size)):
        assert text in errors[0] and errors == errors[:1] * 3


def test_ranks_that_were_told_different_numbers_all_hear_of_it(world):
    for errors in world.run(_refused, 2, ("1", None), None, ranks=range(2)):
        assert "HYBRID_EP_RANKS_PER_NODE must be the same on every rank" in errors[0]
        assert all("must be the same on every rank, but is 1 on ranks [0]; None on ranks [1]" in e for e in errors)


def test_nonsense_on_one_rank_is_told_to_all(world):
    alone, other = world.run(_refused, 2, ("x", None), None, ranks=range(2))
    assert all("HYBRID_EP_RANKS_PER_NODE='x'" in e for e in alone + other)
    assert all("refused the arguments" in e for e in other)


def _foreign(ctx):
    alone, both = dist.new_group([0]), dist.new_group([0, 1])  # collective over all
    with mock.patch.dict(os.environ, {"HYBRID_EP_TIMEOUT_S": "0.5"}):
        if ctx.rank == 0:
            assert get_physical_domain_size(alone) == (1, 1)
        for wrong in (None, 3, *(() if ctx.rank == 0 else (alone,))):
            with pytest.raises(ValueError, match="is not a torch.distributed process group that this rank belongs to"):
                get_logical_domain_size(wrong)
        if ctx.rank == 1:
            with pytest.raises(BootstrapError, match=r"waited .* for 'places' of ranks \[0\]"):
                get_physical_domain_size(both)


def test_no_group_of_this_rank_and_ranks_that_do_not_come(world):
    world.run(_foreign, ranks=range(world.size))


def test_gpus_are_told_apart_by_what_their_memory_reaches(monkeypatch):
    """Four ranks of one host in two NVLink domains. Nobody probes where a number is declared, or on hosts."""
    probed, pairs = [], [[0, 1], [0, 1], [2, 3], [2, 3]]

    def probe(meet, device):
        probed.append(device)
        return devices.Reach([["fabric"]] * 4, pairs, pairs, pairs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(options, "machine", lambda executor: (executor, torch.device("cuda:0")))
    monkeypatch.setattr(devices, "probe", probe)
    monkeypatch.setattr(GroupView, "virtual", False)
    world = VirtualWorld(1, 4)
    assert world.run(lambda rank, group: get_physical_domain_size(group)) == [(2, 2)] * 4
    assert world.run(lambda rank, group: get_logical_domain_size(group, False)) == [(1, 4)] * 4
    assert probed == [torch.device("cuda:0")] * 4
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", "1")
    assert world.run(lambda rank, group: get_physical_domain_size(group)) == [(4, 1)] * 4
    monkeypatch.delenv("HYBRID_EP_RANKS_PER_NODE")
    monkeypatch.setenv("HYBRID_EP_EXECUTOR", "host")
    assert world.run(lambda rank, group: get_physical_domain_size(group)) == [(1, 4)] * 4
    assert len(probed) == 4


@pytest.mark.parametrize(("mode", "sums"), [(True, [2, 4]), (False, [1, 2, 3, 4])])
def test_what_is_received_is_counted_by_scale_up_ranks(mode, sums, monkeypatch):
    """Each of two times two ranks has a token for all four: by their ranks within nodes, or all of them."""
    monkeypatch.setenv("HYBRID_EP_RANKS_PER_NODE", "2")

    def work(rank, group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=1, hidden=8, allow_hybrid_mode=mode)
        x = torch.full((1, 8), float(rank), dtype=torch.float32)
        rows, _, _, handle, _ = buffer.dispatch(x, torch.arange(4, dtype=torch.int64)[None], num_experts=4)
        assert torch.equal(buffer.combine(rows, handle)[0], 4 * x)
        return rows[:, 0].tolist(), handle.psum_num_recv_tokens_per_scaleup_rank.tolist()

    assert VirtualWorld(2, 2).run(work) == [([0.0, 1.0, 2.0, 3.0], sums)] * 4
