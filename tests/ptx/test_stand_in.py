"""The stand-in for the CUDA runtime: order, poison, and the errors that CUDA gives for what must not be done. Each test
has a process of its own, for an error of the device stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BEGIN = """
import ctypes, os, sys
sys.path.insert(0, {here!r})
from ptx_machine import Choices, CudaError, Library
lib = Library(Choices(num_devices=2))
H2D, D2H, D2D = 1, 2, 3
INVALID_VALUE, INVALID_HANDLE, ILLEGAL_ADDRESS, NOT_READY = 1, 400, 700, 600
UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, CAPTURED = 900, 901, 904, 905, 907
POOL = lib.made("cudaMemPoolCreate", (ctypes.c_int32 * 22)(1, 0, 1, 0))
def stream(): return lib.made("cudaStreamCreateWithFlags", 1)
def event(): return lib.made("cudaEventCreateWithFlags", 2)
def read(p, n):
    out = ctypes.create_string_buffer(n)
    lib.call("cudaMemcpyAsync", out, p, n, D2H, 0)
    return out.raw
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(here=str(HERE)) + textwrap.dedent(code)],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_memory_begins_as_garbage_and_is_gone_when_it_is_freed():
    run("""
    s, t = stream(), stream()
    p = lib.made("cudaMallocFromPoolAsync", 100, POOL, s)
    assert read(p, 100) == b"\\xcb" * 100
    assert lib.status("cudaMemsetAsync", p, 0, 101, s) == INVALID_VALUE  # a byte too many
    lib.call("cudaFreeAsync", p, s)
    assert lib.status("cudaFreeAsync", p, s) == INVALID_VALUE
    lib.call("cudaStreamSynchronize", s)
    assert lib.status("cudaMemsetAsync", p, 0, 100, s) == INVALID_VALUE
    assert lib.made("cudaMallocFromPoolAsync", 100, POOL, s) != p
    """)


def test_an_error_of_the_device_stays():
    run("""
    s, t, e = stream(), stream(), event()
    p, q = (lib.made("cudaMallocFromPoolAsync", 1 << 20, POOL, s) for _ in range(2))
    graph, late = ctypes.c_uint64(), ctypes.c_uint64()
    lib.call("cudaStreamBeginCapture", t, 1)
    lib.call("cudaMemsetAsync", p, 1, 16, t)
    lib.call("cudaStreamEndCapture", t, ctypes.byref(graph))
    lib.call("cudaGraphInstantiateWithFlags", ctypes.byref(late), graph, 0)
    lib.call("cudaFreeAsync", p, s)
    lib.call("cudaStreamSynchronize", s)
    lib.call("cudaGraphLaunch", late, t)  # of memory that is gone
    assert lib.status("cudaStreamSynchronize", t) == ILLEGAL_ADDRESS
    assert lib.status("cudaMemsetAsync", q, 0, 16, s) == ILLEGAL_ADDRESS
    """)


def test_wrong_arguments_get_cudas_errors():
    run("""
    s, p = stream(), lib.made("cudaMalloc", 64)
    host = ctypes.create_string_buffer(64)
    assert lib.status("cudaMemcpyAsync", host, p, 64, H2D, s) == INVALID_VALUE
    assert lib.status("cudaMemcpyAsync", p, host, 65, H2D, s) == INVALID_VALUE
    assert lib.status("cudaStreamQuery", 12345) == INVALID_HANDLE
    assert lib.status("cudaSetDevice", 2) == 101
    assert lib.status("cudaFree", p + 1) == INVALID_VALUE
    lib.call("cudaSetDevice", 1)
    e = event()
    assert lib.status("cudaEventRecord", e, s) == INVALID_HANDLE  # a stream of another device
    assert lib.status("cudaMallocFromPoolAsync", ctypes.byref(ctypes.c_uint64()), 16, POOL, stream()) == INVALID_VALUE
    """)


def test_pageable_memory_is_read_at_the_call_and_pinned_memory_later():
    run("""
    s, p = stream(), lib.made("cudaMalloc", 8)
    host = ctypes.create_string_buffer(b"12345678", 8)
    lib.call("cudaMemcpyAsync", p, host, 8, H2D, s)
    host[:] = b"--------"
    lib.call("cudaStreamSynchronize", s)
    assert read(p, 8) == b"12345678"
    assert lib.made("cudaHostAlloc", 8, 2)
    """)


@pytest.mark.parametrize(
    "forbidden, status",
    [
        ('lib.status("cudaStreamSynchronize", s)', "UNSUPPORTED"),
        ('lib.status("cudaStreamQuery", s)', "UNSUPPORTED"),
        ('lib.status("cudaDeviceSynchronize")', "UNSUPPORTED"),
        ('lib.status("cudaMalloc", ctypes.byref(ctypes.c_uint64()), 16)', "UNSUPPORTED"),
        ('lib.status("cudaFreeAsync", lib_block, s)', "UNSUPPORTED"),
        ('lib.status("cudaMemcpyAsync", p, ctypes.create_string_buffer(8), 8, H2D, s)', "UNSUPPORTED"),
        ('lib.status("cudaStreamWaitEvent", s, outside, 0)', "ISOLATION"),
    ],
)
def test_what_a_capture_forbids_spoils_it(forbidden, status):
    run(f"""
    s, t, outside = stream(), stream(), event()
    p, graph = lib.made("cudaMalloc", 64), ctypes.c_uint64()
    lib_block = lib.made("cudaMallocFromPoolAsync", 16, POOL, s)
    lib.call("cudaEventRecord", outside, t)
    lib.call("cudaStreamBeginCapture", s, 0)
    lib.call("cudaMemsetAsync", p, 1, 64, s)
    assert {forbidden} == {status}
    assert lib.status("cudaStreamEndCapture", s, ctypes.byref(graph)) == INVALIDATED
    lib.call("cudaMemsetAsync", p, 2, 64, s)  # and the stream works on
    lib.call("cudaStreamSynchronize", s)
    assert read(p, 64) == b"\\2" * 64
    """)


def test_a_thread_that_says_so_may_ask_while_a_capture_forbids_it():
    run("""
    s, t, mode = stream(), stream(), ctypes.c_int(2)
    for relaxed in (True, False):
        graph = ctypes.c_uint64()
        lib.call("cudaStreamBeginCapture", s, 0)
        if relaxed:
            lib.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert lib.status("cudaStreamQuery", t) == (0 if relaxed else UNSUPPORTED)
        if relaxed:
            lib.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert lib.status("cudaStreamEndCapture", s, ctypes.byref(graph)) == (0 if relaxed else INVALIDATED)
    """)


def test_branches_of_a_capture_run_in_order_and_must_come_back():
    run("""
    s, t, fork, join = stream(), stream(), event(), event()
    p, graph, run = lib.made("cudaMalloc", 8), ctypes.c_uint64(), ctypes.c_uint64()
    lib.call("cudaStreamBeginCapture", s, 0)
    lib.call("cudaMemsetAsync", p, 1, 8, s)
    lib.call("cudaEventRecord", fork, s)
    assert lib.status("cudaEventQuery", fork) == CAPTURED
    lib.call("cudaStreamWaitEvent", t, fork, 0)
    lib.call("cudaMemsetAsync", p, 2, 4, t)
    assert lib.status("cudaStreamEndCapture", s, ctypes.byref(graph)) == UNJOINED
    lib.call("cudaStreamBeginCapture", s, 0)
    lib.call("cudaMemsetAsync", p, 1, 8, s)
    lib.call("cudaEventRecord", fork, s)
    lib.call("cudaStreamWaitEvent", t, fork, 0)
    lib.call("cudaMemsetAsync", p, 2, 4, t)
    lib.call("cudaEventRecord", join, t)
    lib.call("cudaStreamWaitEvent", s, join, 0)
    lib.call("cudaMemsetAsync", p, 3, 2, s)
    lib.call("cudaStreamEndCapture", s, ctypes.byref(graph))
    lib.call("cudaGraphInstantiateWithFlags", ctypes.byref(run), graph, 0)
    assert read(p, 8) == b"\\xcb" * 8  # nothing has run yet
    for _ in range(20):
        lib.call("cudaMemset", p, 0, 8)
        lib.call("cudaGraphLaunch", run, s)
        lib.call("cudaStreamSynchronize", s)
        assert read(p, 8) == b"\\3\\3\\2\\2\\1\\1\\1\\1"
    """)


CHILD = """
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
lib._c.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
q = ctypes.c_uint64()
assert lib._c.cudaIpcOpenMemHandle(ctypes.byref(q), Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), 1) == 0
lib.call("cudaMemset", q.value, 7, 5)
assert lib.status("cudaMemset", q.value, 7, 6) == INVALID_VALUE
lib.call("cudaIpcCloseMemHandle", q.value)
"""


def test_another_process_maps_the_same_memory():
    run(
        """
    import subprocess
    p, handle = lib.made("cudaMalloc", 5), ctypes.create_string_buffer(64)
    lib.call("cudaIpcGetMemHandle", handle, p)
    subprocess.run([sys.executable, "-c", os.environ["CHILD"], handle.raw.hex()], check=True)
    assert read(p, 5) == b"\\7" * 5
    """,
        CHILD=BEGIN.format(here=str(HERE)) + CHILD,
    )


DRIVER = """
GRANULE, NOT_PERMITTED, FILE, FABRIC = 2 << 20, 800, 1, 8
def driver(name, *args):
    function = ctypes.c_void_p()
    lib.call("cudaGetDriverEntryPointByVersion", name.encode(), ctypes.byref(function), 13000, 0, None)
    call = ctypes.CFUNCTYPE(ctypes.c_int)(function.value)
    return call(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in args))
def made(name, *args):
    out = ctypes.c_uint64()
    assert driver(name, ctypes.byref(out), *args) == 0
    return out.value
def properties(kind): return (ctypes.c_int32 * 8)(1, kind, 1, 0)  # pinned, on device 0
def access(flags): return (ctypes.c_int32 * 3)(1, 0, flags)
def mapped(handle):
    at = made("cuMemAddressReserve", GRANULE, 0, 0, 0)
    assert driver("cuMemMap", at, GRANULE, 0, handle, 0) == 0
    return at
"""


def test_virtual_memory_of_the_driver():
    run(
        DRIVER.replace("\n", "\n    ")
        + """
    assert made("cuMemGetAllocationGranularity", properties(FILE), 0) == GRANULE
    assert driver("cuMemCreate", ctypes.byref(ctypes.c_uint64()), GRANULE + 1, properties(FILE), 0) == INVALID_VALUE
    assert driver("cuMemCreate", ctypes.byref(ctypes.c_uint64()), GRANULE, properties(FABRIC), 0) == NOT_PERMITTED
    handle = made("cuMemCreate", GRANULE, properties(FILE), 0)
    at = mapped(handle)
    assert driver("cuMemMap", at, GRANULE, 0, handle, 0) == INVALID_VALUE  # already
    assert lib.status("cudaMemset", at, 1, 16) == INVALID_VALUE  # nobody may access it yet
    assert driver("cuMemSetAccess", at, GRANULE, access(1), 1) == INVALID_VALUE  # read-only: not ours
    assert driver("cuMemSetAccess", at, GRANULE, access(3), 1) == 0
    lib.call("cudaMemset", at, 5, GRANULE)
    assert lib.status("cudaMemset", at, 5, GRANULE + 1) == INVALID_VALUE

    fd = ctypes.c_int()
    assert driver("cuMemExportToShareableHandle", ctypes.byref(fd), handle, FABRIC, 0) == NOT_PERMITTED
    assert driver("cuMemExportToShareableHandle", ctypes.byref(fd), handle, FILE, 0) == 0
    other = made("cuMemImportFromShareableHandle", fd.value, FILE)
    os.close(fd.value)
    twice = mapped(other)
    assert driver("cuMemSetAccess", twice, GRANULE, access(3), 1) == 0
    lib.call("cudaMemset", twice, 6, 8)
    assert read(at, 9) == b"\\6" * 8 + b"\\5"  # one memory at two addresses

    assert driver("cuMemRelease", handle) == 0
    assert driver("cuMemRelease", handle) == INVALID_VALUE
    assert read(at, 1) == b"\\6"  # what is mapped stays
    assert driver("cuMemAddressFree", at, GRANULE) == INVALID_VALUE  # while it is mapped
    assert driver("cuMemUnmap", at, GRANULE) == 0
    assert lib.status("cudaMemset", at, 1, 16) == INVALID_VALUE
    assert driver("cuMemAddressFree", at, GRANULE) == 0
    assert read(twice, 1) == b"\\6"
    """
    )


def test_a_host_function_runs_in_its_place_and_in_every_replay():
    run("""
    s, p, graph, replay = stream(), lib.made("cudaMalloc", 4), ctypes.c_uint64(), ctypes.c_uint64()
    seen = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(ctypes.string_at(p, 4)))
    def work():
        lib.call("cudaMemsetAsync", p, 1, 4, s)
        lib.call("cudaLaunchHostFunc", s, note, 0)
        lib.call("cudaMemsetAsync", p, 2, 4, s)
    work()
    lib.call("cudaStreamSynchronize", s)
    assert seen == [b"\\1" * 4]
    lib.call("cudaStreamBeginCapture", s, 1)
    work()
    lib.call("cudaStreamEndCapture", s, ctypes.byref(graph))
    lib.call("cudaGraphInstantiateWithFlags", ctypes.byref(replay), graph, 0)
    for _ in range(3):
        lib.call("cudaGraphLaunch", replay, s)
    lib.call("cudaStreamSynchronize", s)
    assert seen == [b"\\1" * 4] * 4 and read(p, 1) == b"\\2"
    """)


def test_an_operation_that_is_queued_writes_nothing_before_its_turn():
    """One that ran at once and put back what it wrote would undo what another stream writes meanwhile."""
    run("""
    import graphs, torch
    x, row = torch.zeros(2, 3), torch.ones(3)
    running, aten = torch.zeros(3), torch.ops.aten
    for func, args, result in (
        (aten.add_.Tensor, (x, row), x),
        (aten.copy_.default, (x, row), x),
        (aten.add.out, (x, row), x),
        (aten._foreach_add_.Scalar, ([x, running], 1), None),
        (aten.index_put_.default, (x, [torch.tensor([5])], row), x),  # a bad index of values that are not there yet
    ):
        kwargs = {"out": x} if func is aten.add.out else {}
        assert graphs.Recording(lib, 0, 0).once(func, args, kwargs) is result, func
    made = graphs.Recording(lib, 0, 0).once(
        aten._native_batch_norm_legit.default, (x, None, None, running, running + 1, True, 0.1, 1e-5), {}
    )
    assert len(made) == 3 and not any(m is running for m in made)
    assert x._version == running._version == 0 and not x.any() and not running.any()
    """)
