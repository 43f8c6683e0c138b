"""The rail over NVSHMEM between processes that share one GPU, several PEs on one device: bit for bit against the
reference. NVSHMEM allows that within limits; where it refuses, or is not built, the test says so and skips. No NIC has
a part in it: puts go through mapped memory."""

from __future__ import annotations

import os

import pytest
import torch
from examples import Example, check
from gpu_world import OnDevice
from world import ProcessWorld

from hybrid_ep import HybridEPBuffer
from hybrid_ep.runtime import devices, nvshmem


def why_not(ctx) -> str | None:
    devices.current()
    try:
        nvshmem.load()
    except RuntimeError as error:
        return str(error)
    return None


def _check(ctx, ex: Example) -> bool:
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")  # read when NVSHMEM starts; there is nobody to reach
    buffer = HybridEPBuffer(
        ctx.group(ex.world.num_ranks),
        16,
        1,
        ex.num_local_experts,
        executor=nvshmem.EXECUTOR,
        timeout_s=30,
        num_of_hybrid_ep_ranks_per_nvlink_domain=ex.num_local_ranks,
    )
    check(OnDevice(buffer, torch.cuda.Stream(), ctx.rank, 0), ctx.rank, ex)
    in_heap = isinstance(buffer._session._segments, nvshmem.NvshmemSegments) and buffer._session.shape.arena_apart
    buffer.destroy()
    return in_heap


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_several_pes_on_one_gpu(shape):
    """Twice, for NVSHMEM ends with the last buffer and is started anew. The processes are not used again: it may leave
    one in any state."""
    if not nvshmem.KERNELS.is_file():
        pytest.skip(f"{nvshmem.KERNELS.name} is not built; python scripts/build_cuda.py --nvshmem")
    num_ranks = shape[0] * shape[1]
    ex = Example(*shape, 2, tuple(9 * r + 5 for r in range(num_ranks)), 3, 64, scale_columns=1, pad_multiple=4, seed=6)
    with ProcessWorld(num_ranks) as processes:
        if why := processes.run(why_not, ranks=[0], timeout_s=60.0)[0]:
            pytest.skip(why)
        answers = processes.run(_check, ex, timeout_s=100.0, return_errors=True)
        # By NVSHMEM's own word when it starts; a start that hangs, and whatever comes later, is a failure.
        refused = [
            a["message"]
            for a in answers
            if isinstance(a, dict)
            and a["type"] == "BootstrapError"
            and "starting NVSHMEM failed on ranks" in a["message"]
            and "did not come back" not in a["message"]
        ]
        if len(refused) == num_ranks:
            pytest.skip(f"NVSHMEM refuses {num_ranks} PEs on one GPU: {refused[0]}")
        assert answers == [True] * num_ranks, answers
        assert processes.run(_check, ex, timeout_s=100.0) == [True] * num_ranks
