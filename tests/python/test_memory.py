"""The memory report is exact: it adds up, it is what the shared memory holds, and it grows as computed by
hand."""

from __future__ import annotations

import itertools
import os

import pytest

from hybrid_ep import HybridEPBuffer, _core, memory, traffic
from hybrid_ep.testing import VirtualWorld


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2)])
def test_regions_add_up_and_do_not_overlap(shape):
    world = VirtualWorld(*shape)
    buffer = world.buffers(64, 100, 2, timeout_s=30)[0]
    report = buffer.memory_report()
    regions = sorted(buffer._session.shape.regions(), key=lambda r: r[1])
    for (_, offset, size), (_, following, _) in zip(regions, regions[1:], strict=False):
        assert offset + size <= following
    assert sum(report.regions.values()) + report.padding_bytes == report.total_bytes
    assert report.total_bytes >= regions[-1][1] + regions[-1][2]
    assert report.mapped_bytes == report.total_bytes * world.size
    assert 0 <= report.padding_bytes < 4096 + 128 * len(regions)
    assert str(report).splitlines()[-1].split() == ["total", f"{report.total_bytes:,}"]


def test_the_receive_region_is_rows_times_the_largest_message():
    world = VirtualWorld(1, 2)
    buffer = world.buffers(64, 100, 8, timeout_s=30)[0]
    rows = buffer.memory_report().regions["receive_rows"]
    message = traffic.message_bytes(8, 2, 128)
    lines = 2 * 128  # rows that land aside, and their scales, begin at lines
    assert rows == -(-message * 200 // 128) * 128 + lines
    half = VirtualWorld(1, 2).buffers(64, 100, 8, timeout_s=30, capacity_factor=1.0)[0]
    assert half.memory_report().regions["receive_rows"] == -(-message * 100 // 128) * 128 + lines


def test_a_report_of_a_shape_alone():
    shape = _core.BufferShape(
        num_nodes=2,
        num_local_ranks=2,
        num_experts=8,
        max_tokens=4,
        max_topk=2,
        row_bytes=32,
        recv_rows=16,
        partial_row_bytes=32,
    )
    assert memory.report(shape, 4).total_bytes == shape.total_bytes


def mapped_bytes(ctx):
    """What the kernel says about the segments that this process maps."""
    with HybridEPBuffer(ctx.group(4), 64, 100, 2, timeout_s=50) as buffer:
        report, mapped = buffer.memory_report(), 0
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "/hybrid_ep." in line:
                    start, end = (int(x, 16) for x in line.split()[0].split("-"))
                    mapped += end - start
    return report.mapped_bytes, mapped


def test_the_kernel_agrees(world, shm_names):
    # A buffer of another test may be alive in these processes: compare what one more buffer adds.
    for said, found in world.run(mapped_bytes, ranks=range(4)):
        assert said <= found and found % 4096 == 0
    assert shm_names.new() == []


HUGE_PAGE = 2 << 20


def mapping_of(name, address):
    """What the kernel says of the mapping there: bytes by field of smaps, or None where nothing of that name lies."""
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        for line in lines:
            if line.startswith(f"{address:x}-") and f"/dev/shm/{name}" in line:
                return {k: int(v.split()[0]) << 10 for k, v in itertools.islice((x.split(":", 1) for x in lines), 20)}
    return None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # the child looks and exits
@pytest.mark.parametrize("num_bytes", [2 * HUGE_PAGE, 3 * HUGE_PAGE + 4096 + 8])
def test_shared_memory_lies_where_huge_pages_would(num_bytes, record_property):
    name = f"hybrid_ep.huge.{os.getpid()}"
    owner = _core.Segment.create("/" + name, num_bytes)
    peer = _core.Segment.attach("/" + name, num_bytes)
    owner.unlink()
    for segment in (owner, peer):
        assert segment.address % HUGE_PAGE == 0
        mapped = mapping_of(name, segment.address)
        record_property("on_huge_pages", mapped["ShmemPmdMapped"])  # as the kernel can; not required
    child = os.fork()
    if not child:
        os._exit(mapping_of(name, owner.address) is not None)
    assert os.waitpid(child, 0)[1] == 0, "a forked child has inherited the mapping"


def test_shared_memory_that_cannot_be_mapped_leaves_no_name():
    name = f"hybrid_ep.unmapped.{os.getpid()}"
    with pytest.raises(MemoryError, match="is more memory than this machine gives|does not fit"):
        _core.Segment.create("/" + name, 1 << 47)  # all addresses of a process
    assert not os.path.exists("/dev/shm/" + name)
