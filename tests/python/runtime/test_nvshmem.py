"""NVSHMEM's host half against a stand-in library of its own processes: start, symmetric growth, freeing, and every way
in which it can fail. What runs here is the product's code down to NVSHMEM's functions; no kernel does."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybrid_ep import _core
from hybrid_ep.buffer import HybridEPBuffer
from hybrid_ep.errors import BootstrapError
from hybrid_ep.runtime import devices, nvshmem
from hybrid_ep.runtime.bootstrap import GroupView, PosixSegments, Rendezvous
from hybrid_ep.runtime.session import Session
from hybrid_ep.testing import VirtualWorld

HERE = Path(__file__).parent / "nvshmem_stand_in"
CSRC = Path(__file__).parents[3] / "csrc"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    """The stand-ins of NVSHMEM's host library and of our kernels over it, in one library that binds to itself: torch
    may have loaded the real NVSHMEM into this process."""
    library = tmp_path_factory.mktemp("nvshmem") / "stand_in.so"
    sources = [HERE / "library.cpp", HERE / "kernels.cpp", CSRC / "transport/nvshmem/nvshmem_host.cu"]
    subprocess.run(
        [
            os.environ.get("CXX", "g++").split()[0],
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-Wl,-Bsymbolic",
            f"-I{HERE}",
            f"-I{CSRC}",
            "-o",
            str(library),
            "-xc++",
            *map(str, sources),
            "-lrt",
        ],
        check=True,
        timeout=300,
    )
    return library


def _library(stand_in: Path):
    return _core.NvshmemWorld(str(stand_in), str(stand_in))


class _Case:
    """A rank of a test: a heap of its own, told how to misbehave, with its log."""

    def __init__(self, ctx, stand_in: Path, size: int, misbehave: str = "", timeout_s: float = 30):
        self.heap = nvshmem.Heap(lambda: _library(stand_in))
        self.log = stand_in.with_name(f"log.{os.getpid()}")
        self.log.unlink(missing_ok=True)
        os.environ.update(STAND_IN_NVSHMEM=misbehave, STAND_IN_NVSHMEM_LOG=str(self.log))
        self.group = ctx.group(size)
        self.meet = Rendezvous(GroupView.of(self.group), timeout_s)

    def calls(self) -> list[str]:
        return [line.split(maxsplit=1)[1] for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def end(self) -> None:
        """After a failure: frees hanging calls and stops the stand-in, so that the process may start it again."""
        os.environ["STAND_IN_NVSHMEM"] = ""
        for thread in [t for t in threading.enumerate() if "nvshmem" in t.name.lower()]:
            thread.join(timeout=20)
        if (library := self.heap._world) is not None and library.started:
            library.stop()

    def buffer(self, arenas=None, **options):
        def segments(session):
            return devices.Memory(nvshmem.NvshmemSegments(self.heap, session.meet, session.topology), "host", arenas)

        with mock.patch.object(Session, "_choose_memory", segments):
            return HybridEPBuffer(
                self.group,
                32,
                options.pop("tokens", 4),
                1,
                timeout_s=30,
                num_of_hybrid_ep_ranks_per_nvlink_domain=2,
                **options,
            )


def _exercise(buffer, rank: int, num_tokens: int, keep: bool = False):
    torch.manual_seed(rank)
    x = torch.randint(-8, 8, (num_tokens, 32)).bfloat16()
    idx = torch.stack([torch.randperm(4)[:2] for _ in range(num_tokens)])
    rows, _, _, handle = buffer.dispatch(x, topk_idx=idx, topk_weights=torch.ones(num_tokens, 2), num_of_experts=4)
    total, _ = buffer.combine(rows, handle=handle)
    return rows if keep else rows.float(), total.float()


def _grow_and_close(ctx, stand_in: Path):
    case = _Case(ctx, stand_in, 4)
    buffer, plain = case.buffer(), HybridEPBuffer(case.group, 32, 4, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
    for num_tokens in (3, 4, 40):  # the last does not fit
        for got, want in zip(
            _exercise(buffer, ctx.rank, num_tokens), _exercise(plain, ctx.rank, num_tokens), strict=True
        ):
            assert torch.equal(got, want)
    first = case.heap.identity
    second = case.buffer()
    assert case.heap.identity == first and case.heap.num_blocks == 2
    buffer.destroy()
    assert case.heap.num_blocks == 1 and case.heap.identity == first
    second.destroy()
    assert case.heap.num_blocks == 0 and case.heap.identity == ""
    again = case.buffer()  # a world of its own
    assert case.heap.identity not in ("", first)
    again.destroy()
    return case.calls()


def test_a_buffer_in_the_symmetric_heap_grows_and_gives_everything_back(world, stand_in):
    for rank, calls in enumerate(_on(world, 4, _grow_and_close, stand_in)):
        names = [c.split()[0] for c in calls]
        assert names.count("unique_id") == (2 if rank == 0 else 0)
        sizes = {c.split()[1] for c in calls if c.startswith("malloc")}
        names = [n for n in names if n != "unique_id"]
        assert names[:2] == ["init", "malloc"] and len(sizes) >= 2
        for at, name in enumerate(names):  # growth frees first, never holding both
            if name == "free" and names[at + 1 : at + 2] == ["malloc"]:
                break
        else:
            raise AssertionError(f"no growth in {calls}")
        assert calls[-1] == "finalize 0" and names.count("finalize") == 2
        assert names.count("malloc") == names.count("free")
        # Each time that the ranks free, their kernels' verbs have landed before; nothing else asks for that.
        assert [names[i - 1] for i, name in enumerate(names) if name == "free"] == ["quiet"] * names.count("quiet")


def _results_outlive_the_heap(ctx, stand_in: Path):
    case = _Case(ctx, stand_in, 4)
    buffer = case.buffer(PosixSegments(), tokens=40)
    plain = HybridEPBuffer(case.group, 32, 40, 1, num_of_hybrid_ep_ranks_per_nvlink_domain=2)
    rows, total = _exercise(buffer, ctx.rank, 40, keep=True)
    want_rows, want_total = _exercise(plain, ctx.rank, 40)
    traffic, kept = buffer.traffic(), buffer._session.engine.arena_bytes_lent
    buffer.destroy()
    assert case.heap.identity == ""  # NVSHMEM has ended, and its memory with it
    assert torch.equal(rows.float(), want_rows) and torch.equal(total, want_total)
    return traffic["copied_rows"], traffic["partial_rows"], kept >= rows.nbytes


def test_rows_land_beside_the_symmetric_heap_and_outlive_it(world, stand_in):
    """Nothing is copied, no partial row is formed: as on a host without NVSHMEM."""
    assert _on(world, 4, _results_outlive_the_heap, stand_in) == [(0, 0, True)] * 4


def _on(world, size: int, function, *arguments):
    """function on the first ranks of the world; None from the others, who only look on."""
    return world.run(_if_member, size, function, *arguments)[:size]


def _if_member(ctx, size: int, function, *arguments):
    return function(ctx, *arguments) if ctx.rank < size else None


def _uneven(ctx, stand_in: Path):
    case = _Case(ctx, stand_in, 3)
    case.heap.start(case.meet, "start", -1)
    _, address = case.heap.allocate(case.meet, "a", 1000 + ctx.rank)
    case.heap.leave(0)
    number, _ = case.heap.allocate(case.meet, "b", 64)
    case.heap.leave(number)
    case.heap.free(case.meet, "c")
    return case.calls()


def test_wishes_that_differ_become_the_largest_and_what_all_left_is_freed_first(world, stand_in):
    for calls in _on(world, 3, _uneven, stand_in):
        assert [c for c in calls if c != "unique_id 0"] == [
            "init 3",
            "malloc 1002",
            "quiet 0",
            "free 1002",
            "malloc 64",
            "quiet 0",
            "free 64",
            "finalize 0",
        ]


def _one_leaves(ctx, stand_in: Path):
    case = _Case(ctx, stand_in, 3)
    case.heap.start(case.meet, "start", -1)
    number, _ = case.heap.allocate(case.meet, "a", 64)
    if ctx.rank != 1:
        case.heap.leave(number)
    case.heap.allocate(case.meet, "b", 32)
    kept = case.heap.num_blocks
    for number in (0, 1):
        case.heap.leave(number)
    case.heap.free(case.meet, "c")
    return kept, case.calls()[-1]


def test_what_one_rank_still_holds_is_not_freed(world, stand_in):
    assert _on(world, 3, _one_leaves, stand_in) == [(2, "finalize 0")] * 3


def _verbs_never_land(ctx, stand_in: Path):
    case = _Case(ctx, stand_in, 3)
    case.heap.start(case.meet, "start", -1)
    number, _ = case.heap.allocate(case.meet, "a", 64)
    os.environ["STAND_IN_NVSHMEM"] = "hang:quiet:1"
    case.heap.leave(number)
    case.meet.timeout_s = 3.0  # of the call that hangs alone: on a busy machine the ranks' start takes seconds
    try:
        with pytest.raises(BootstrapError, match=r"nvshmem_quiet did not come back within [\d.]+ s on rank 1") as error:
            case.heap.free(case.meet, "b")
        return error.value.missing, [c.split()[0] for c in case.calls()]
    finally:
        case.end()


def test_nobody_frees_before_all_ranks_verbs_have_landed(world, stand_in):
    for missing, calls in _on(world, 3, _verbs_never_land, stand_in):
        assert missing == (1,) and calls[-1] == "quiet" and "free" not in calls


def _failing(ctx, stand_in: Path, misbehave: str, timeout_s: float):
    case = _Case(ctx, stand_in, 3, misbehave, timeout_s)
    try:
        case.heap.start(case.meet, "start", -1)
        case.heap.allocate(case.meet, "a", 64)
    except BootstrapError as error:
        return str(error), error.missing, case.heap.failure
    finally:
        case.end()
    return "no error", (), ""


@pytest.mark.parametrize(
    "misbehave, missing, text, lost",
    [
        ("fail:unique_id:*", (0,), "rank 0 has no unique id.*: .*get_uniqueid failed with status 7.*IFNAME", False),
        ("fail:init:*", (0, 1, 2), "rank 0 says: .*nvshmemx_init_attr. failed with status 7 on PE 0 of 3", False),
        ("fail:context:*", (0, 1, 2), "rank 0 says: .*started on PE 0 of 3, but finds no CUDA device there", False),
        (
            "hang:init:1",
            (0, 1, 2),
            "starting NVSHMEM did not come back within [0-9.]+ s on rank 0 .deadline: timeout_s",
            True,
        ),
        ("fail:malloc:2", (0, 1, 2), "rank 0 says: .*nvshmem_malloc of 64 bytes failed on PE 0 of 3", False),
        ("hang:malloc:1", (0, 1, 2), "did not come back within [0-9.]+ s on rank 0 .deadline: timeout_s", True),
        (
            "version:2.11",
            (0, 1, 2),
            r"kernels were built with 3\.4\.5 and this process has host library 2\.11\.9",
            False,
        ),
        ("version:3.3", (0, 1, 2), r"at least that minor one", False),
    ],
)
def test_every_rank_raises_and_names_the_call(world, stand_in, misbehave, missing, text, lost):
    timeout_s = 3.0 if "hang" in misbehave else 30.0
    errors = _on(world, 3, _failing, stand_in, misbehave, timeout_s)
    assert {e[0] for e in errors} == {errors[0][0]}
    for message, ranks, failure in errors:
        assert ranks == missing and bool(failure) == lost
        assert re.search(text, message), message


def test_a_newer_minor_version_of_the_host_library_serves(stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_NVSHMEM", "version:3.9")
    assert _library(stand_in).running[:2] == (3, 9)


def test_what_is_missing_is_named(stand_in, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="host library does not load"):
        _core.NvshmemWorld(str(tmp_path / "none.so"), str(stand_in))
    with pytest.raises(RuntimeError, match="kernels over it do not load"):
        _core.NvshmemWorld(str(stand_in), str(tmp_path / "none.so"))
    monkeypatch.setenv("STAND_IN_NVSHMEM", "other build")
    with pytest.raises(RuntimeError, match="stand_in.so is of another build"):
        _library(stand_in)
    monkeypatch.setattr(nvshmem, "host_library", lambda: None)
    with pytest.raises(RuntimeError, match=r"pip install nvidia-nvshmem-cu1\d"):
        nvshmem.load()
    with pytest.raises(ValueError, match=r"executor='cuda_nvshmem' cannot|executor='cuda' cannot|needs a GPU"):
        VirtualWorld(1, 1).buffers(16, 1, 1, executor=nvshmem.EXECUTOR)
    monkeypatch.setattr(nvshmem, "host_library", lambda: tmp_path)
    monkeypatch.setattr(nvshmem, "KERNELS", tmp_path / "libhybrid_ep_nvshmem.so")
    with pytest.raises(RuntimeError, match="build_cuda.py --nvshmem"):
        nvshmem.load()


def _answer(**differs):
    return {"problem": "", "identity": "", "version": [3, 4, 5], **differs}


def test_one_nvshmem_for_one_set_of_ranks():
    nvshmem._agree_to_start([_answer(), _answer()])
    nvshmem._agree_to_start([_answer(identity="a"), _answer(identity="a")])
    with pytest.raises(ValueError, match=r"already runs in the processes of ranks \[1\]"):
        nvshmem._agree_to_start([_answer(), _answer(identity="a")])
    with pytest.raises(ValueError, match=r"already runs in the processes of ranks \[0, 1\]"):
        nvshmem._agree_to_start([_answer(identity="a"), _answer(identity="b")])
    with pytest.raises(ValueError, match=r"different versions of NVSHMEM .*1: '3\.7\.2'"):
        nvshmem._agree_to_start([_answer(), _answer(version=[3, 7, 2])])
    with pytest.raises(BootstrapError, match=r"ranks \[1\] cannot use; rank 1 says: NVSHMEM is not installed"):
        nvshmem._agree_to_start([_answer(), _answer(problem="NVSHMEM is not installed; ...")])


def test_a_peer_of_the_node_without_a_mapped_path_is_an_error_and_another_nodes_is_not():
    heap = mock.Mock(peer=mock.Mock(return_value=None), own=mock.Mock(return_value="own"))
    segments = nvshmem.NvshmemSegments(heap, None, SimpleNamespace(rank=0, node=0, num_local_ranks=2))
    assert segments.attach("/hybrid_ep.token.0.3", 64) == "own"
    with pytest.raises(RuntimeError, match="no mapped path to rank 1 of the same node"):
        segments.attach("/hybrid_ep.token.0.1", 64)


def test_who_failed_is_named_before_who_waited():
    said = [["late", True], ["status 7", False], ["late", True]]
    meet = mock.Mock(timeout_s=10, exchange=mock.Mock(return_value=said), view=SimpleNamespace(rank=0))
    heap = nvshmem.Heap(mock.Mock())
    with pytest.raises(BootstrapError, match=r"starting failed on ranks \[0, 1, 2\]; rank 1 says: status 7"):
        heap._together(meet, "topic", "starting", lambda: None)
    assert heap.failure
