"""Virtual worlds on one GPU behind the host tests' eyes: buffers that take and return CPU tensors and work on the
device in between, each on a stream of its own, entering every call at a random time."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from examples import Example, make_inputs, same

from hybrid_ep.runtime.devices import is_cuda
from hybrid_ep.testing import VirtualWorld

VERBS = ("dispatch", "combine", "dispatch_with_permute", "combine_with_unpermute")


def to_device(value: Any, device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return tuple(to_host(v) for v in value) if isinstance(value, tuple) else value


class OnDevice:
    """A HybridEPBuffer of a GPU, whose verbs are called with CPU tensors. skew: cycles by which a call starts late, at
    most. A verb returns when its stream is idle: nothing may wait inside CUDA while another rank's kernel waits for
    what this thread launches next."""

    def __init__(self, buffer, stream: torch.cuda.Stream, seed: int, skew: int):
        self._buffer, self._stream, self._skew = buffer, stream, skew
        self._random = random.Random(seed)

    def __getattr__(self, name: str):
        value = getattr(self._buffer, name)
        return self._verb(value) if name in VERBS else value

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *_: Any) -> None:
        self._buffer.destroy()

    def _verb(self, method):
        def call(*args, handle=None, **kwargs):
            device = self._stream.device
            with torch.cuda.stream(self._stream):
                args = [a if isinstance(a, tuple) else to_device(a, device) for a in args]
                kwargs = {k: to_device(v, device) for k, v in kwargs.items()}
                if self._skew:
                    torch.cuda._sleep(self._random.randrange(self._skew))
                if handle is not None:
                    kwargs["handle"] = handle  # as it is: its tensors say where they lie
                result = method(*args, **kwargs)
                while not self._stream.query():
                    time.sleep(20e-6)
                return tuple(v if isinstance(v, tuple) else to_host(v) for v in result)

        return call


class DeviceWorld(VirtualWorld):
    """A VirtualWorld on the current device. Who names an executor of the host gets buffers of the host, as they are."""

    made: list = []  # by all worlds: the fixture that puts this class in VirtualWorld's place ends them
    skew = 200_000
    dressed = False

    def buffers(
        self, hidden_dim: int, max_tokens: int, num_local_experts: int, executor: str = "cuda", **options: Any
    ) -> list[Any]:
        raw = super().buffers(hidden_dim, max_tokens, num_local_experts, executor=executor, **options)
        if not is_cuda(executor):
            return raw
        self.made += raw
        streams = self.more_streams() if self.dressed else self.streams  # operations of two buffers may run at once
        self.dressed = True
        return [OnDevice(b, s, rank, self.skew) for rank, (b, s) in enumerate(zip(raw, streams, strict=True))]


class GpuWorld:
    """num_nodes x num_local_ranks virtual ranks on the current device."""

    def __init__(
        self,
        num_nodes: int,
        num_local_ranks: int,
        num_local_experts: int,
        executor: str = "cuda",
        skew: int = 200_000,
        **options: Any,
    ):
        self.world = VirtualWorld(num_nodes, num_local_ranks)
        options.setdefault("timeout_s", 20)
        self.raw = self.world.buffers(16, 1, num_local_experts, executor=executor, **options)
        self.streams = self.world.streams
        self.buffers = [
            OnDevice(b, s, rank, skew) for rank, (b, s) in enumerate(zip(self.raw, self.streams, strict=True))
        ]

    def run(self, work, **options: Any) -> list[Any]:
        """[work(rank, buffer)] of all ranks at once, each on its stream."""

        def body(rank, _):
            with torch.cuda.stream(self.streams[rank]):
                return work(rank, self.buffers[rank])

        return self.world.run(body, **options)

    def close(self) -> None:
        for buffer in self.raw:
            buffer.destroy()


def call_on_two_streams(timeout_s: float) -> None:
    """Dispatches of one buffer on two streams, and nobody waits in between: the library puts one behind the other."""
    ex = Example(1, 1, 4, (64,), 2, 256, pad_multiple=8, seed=3)
    world, mine = GpuWorld(1, 1, 4, skew=0, timeout_s=timeout_s), make_inputs(ex, 0)
    x, idx = mine.hidden.cuda(), mine.topk_idx.cuda()
    rows, _, _, _, handle = world.raw[0].dispatch_with_permute(hidden=x, topk_idx=idx, num_of_experts=4)
    torch.cuda.synchronize()
    results = []
    for factor, stream in ((2, torch.cuda.Stream()), (3, torch.cuda.Stream())):
        with torch.cuda.stream(stream):
            again = {"hidden": x * factor, "handle": handle, "num_permuted_tokens": rows.shape[0]}
            results.append((factor, world.raw[0].dispatch_with_permute(**again)[0]))
    torch.cuda.synchronize()
    for factor, result in results:
        same(f"rows of the call times {factor}", result.cpu(), rows.cpu() * factor)
    world.close()
