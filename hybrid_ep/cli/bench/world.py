"""The ranks of a measurement: the process groups, the device, barriers around a clock, facts of all ranks together."""

from __future__ import annotations

import contextlib
import datetime
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybrid_ep import local_ranks
from hybrid_ep.cli import Failure, has_words, launch
from hybrid_ep.cli.bench import cores

Samples = dict[tuple[str, str], list[float]]  # (op, implementation) -> seconds, one an iteration


class World:
    """This rank's view. group: moves the data (NCCL for CUDA tensors); control: gloo, for barriers and facts."""

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.control, self.device = group, control, device
        self.rank, self.size = control.rank(), control.size()

    def meet(self) -> None:
        """A barrier, after the work of this rank's device."""
        self.finish()
        dist.barrier(group=self.control)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(
        self,
        kept: Samples,
        key: tuple[str, str],
        call: Callable[[], Any],
        parts: int = 1,
        on_cores: tuple[Samples, Samples] | None = None,
    ) -> Any:
        """call(), from a barrier to the end of its work; the seconds of one of its `parts` go into kept[key]. on_cores:
        takes those in which this thread ran, and those in which it waited for a core."""
        self.meet()
        before = cores.now() if on_cores else None
        start = time.perf_counter()
        result = call()
        self.finish()
        kept.setdefault(key, []).append((time.perf_counter() - start) / parts)
        if on_cores and before and (after := cores.now()):
            for samples, begin, end in zip(on_cores, before, after, strict=True):
                samples.setdefault(key, []).append((end - begin) / parts)
        return result

    def gather(self, samples: Samples) -> dict[tuple[str, str], list[list[float]]]:
        """The samples of every rank: key -> [rank][iteration]; collective."""
        everyone: list[Samples] = [{} for _ in range(self.size)]
        dist.all_gather_object(everyone, samples, group=self.control)
        return {key: [of_rank[key] for of_rank in everyone] for key in samples}

    def reduce(self, value: int, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> int:
        """The sum (or what `how` says) of `value` over the ranks; collective."""
        total = torch.tensor([value], dtype=torch.int64, device="cpu")
        dist.all_reduce(total, how, group=self.control)
        return int(total)


@contextlib.contextmanager
def joined(backend: str, timeout_s: float) -> Iterator[World]:
    """This process as a rank of the group that its launcher describes. cuda: on GPU LOCAL_RANK; ranks beyond the
    number of GPUs share them. An error in the body, but for those that main() has words for, becomes a Failure, and
    the rank that fails first shows it."""
    device = torch.device("cpu")
    if backend == "cuda":
        device = torch.device("cuda", launch.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    on_cpu, deadline = device.type == "cpu", datetime.timedelta(seconds=timeout_s)
    local_ranks.end_groups_first()
    dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", timeout=deadline)
    try:
        group = distributed_c10d._get_default_group()
        control = group if on_cpu else dist.new_group(backend="gloo", timeout=deadline)
        assert isinstance(control, dist.ProcessGroup)  # new_group without ranks has this rank in it
        yield World(group, control, device)
    except Exception as error:
        # Said before the group ends: what other ranks meet then only follows from it.
        first = _is_first_to_fail()
        if has_words(error):
            raise
        if not first:
            raise Failure from error
        if isinstance(error, Failure):
            raise
        sys.stderr.write("".join(traceback.format_exception(error)))
        raise Failure(f"rank {dist.get_rank()} failed with {type(error).__name__}: {error}") from error
    finally:
        dist.destroy_process_group()


def _is_first_to_fail() -> bool:
    """Of all ranks; True as well where the store has gone, so that no error is lost."""
    try:
        return distributed_c10d._get_default_store().add("hybrid_ep.cli/failed", 1) == 1
    except RuntimeError:
        return True
