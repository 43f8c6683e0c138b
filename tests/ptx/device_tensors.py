"""Tensors of the PTX machine. A CPU tensor whose storage the stand-in allocated says that it lies on cuda:0, and
torch's operations on such tensors are ordered as on a GPU: after what the current stream holds. Every storage is a
block of its own, exact to the byte, stream-ordered from a pool as torch's allocator has it; a kernel that touches a
tensor after its free in stream order meets memory that is gone.

Operations themselves run on the CPU, and each waits for its stream first. What needs torch's own CUDA kernels (their
timing, their own synchronisation) cannot be shown here."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import graphs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# Operations whose results' shapes depend on values: on a GPU the host waits for them.
WAITS = ("aten.nonzero", "aten.masked_select", "aten._unique", "aten.unique", "aten.equal")
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class _Chosen(threading.local):
    """The MemPool that this thread's tensors come from; None: none."""

    pool: Any = None


class Memory:
    """Storages from the stand-in's pool."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.begin, self.end = runtime.span()
        props = (ctypes.c_int32 * 22)(1, 0, 1, 0)  # pinned, no handles, on device 0
        self.pool = runtime.made("cudaMemPoolCreate", props)
        self.users: dict[int, set[int]] = {}  # storage's address: other streams that use it
        self.deferred: list[tuple[int, int]] = []  # freed while their stream was being captured
        self.chosen = _Chosen()
        self.of_pools: dict[int, Any] = {}  # address: the MemPool that lent it

    def holds(self, x: torch.Tensor) -> bool:
        return x.layout == torch.strided and self.begin <= _storage(x) < self.end

    def bytes(self, num_bytes: int, stream: int) -> torch.Tensor:
        """uint8 [num_bytes], uninitialised."""
        size, pool = max(num_bytes, 1), self.chosen.pool
        if pool is not None:
            at = pool.allocate(size, stream)
            self.of_pools[at] = pool
        else:
            at = self.runtime.made("cudaMallocFromPoolAsync", size, self.pool, stream)
        block = (ctypes.c_uint8 * size).from_address(at)
        weakref.finalize(block, self._free, at, stream).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8)[:num_bytes]

    def empty(self, shape, dtype: torch.dtype, stream: int, strides=None) -> torch.Tensor:
        shape = tuple(shape)
        count = 1
        for n in shape:
            count *= n
        flat = self.bytes(count * dtype.itemsize, stream).view(dtype)
        return flat.view(shape) if strides is None or not count else flat.as_strided(shape, strides)

    def _free(self, at: int, stream: int) -> None:
        status, mine = ctypes.c_int(), self.users.get(at, set()) <= {stream}
        if at in self.of_pools and mine:  # a pool's is free at once, in a capture too
            self.users.pop(at, None)
            return self.of_pools.pop(at).free(at, set())
        if self.runtime.status("cudaStreamIsCapturing", stream, ctypes.byref(status)) == 0 and status.value:
            self.deferred.append((at, stream))
            return
        if pool := self.of_pools.pop(at, None):
            return pool.free(at, self.users.pop(at, set()) - {stream})
        for user in self.users.pop(at, ()):
            event = self.runtime.made("cudaEventCreateWithFlags", 2)
            self.runtime.status("cudaEventRecord", event, user)
            self.runtime.status("cudaStreamWaitEvent", stream, event, 0)
            self.runtime.status("cudaEventDestroy", event)
        self.runtime.status("cudaFreeAsync", at, stream)

    def free_deferred(self) -> None:
        """A capture has ended."""
        waiting, self.deferred = self.deferred, []
        for at, stream in waiting:
            self._free(at, stream)

    def record_stream(self, x: torch.Tensor, stream: int) -> None:
        if self.holds(x):
            self.users.setdefault(x.untyped_storage().data_ptr(), set()).add(stream)


def _storage(x: torch.Tensor) -> int:
    """The address of its storage; 0 for tensors without one."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # wrappers, meta and freed tensors
        return 0


def _is_cuda(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class OnMachine(TorchDispatchMode):
    """Below autograd: waits for the current stream, runs the operation on the CPU, and moves what it made to where its
    operands lie. Operands that lie apart are refused, as a GPU's would be."""

    refuses_to_wait = False  # torch.cuda.set_sync_debug_mode("error")
    MAY_MIX = ("aten._to_copy", "aten.copy_", "aten.index", "aten._index_put", "aten.index_put", "aten.set_")

    def __init__(self, memory: Memory, stream):
        super().__init__()
        self.memory, self.stream = memory, stream  # stream(): the current one's handle

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else every operation enters through torch.compile's guard, and imports it
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = str(func)
        wanted = kwargs.get("device")
        kwargs.pop("pin_memory", None)  # all host memory is the machine's
        if wanted is not None:
            kwargs["device"] = CPU
        operands = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        mine = [x for x in operands if self.memory.holds(x)]
        if mine and name.startswith(
            "aten.new_empty_strided"
        ):  # autograd's copy of a gradient, which it takes for a CPU's
            wanted = None
        reads = not name.startswith("aten.new_empty")  # of which the operand says only where to
        recording = graphs.recording()
        scalar = name.startswith("aten._local_scalar_dense")
        if self.refuses_to_wait and mine and (scalar or name.startswith(WAITS) or wanted == CPU):
            raise RuntimeError(f"{name}: called a synchronizing CUDA operation")
        if mine and reads:
            if recording is None or scalar or (wanted is not None and not _is_cuda(wanted)):
                self.memory.runtime.call("cudaStreamSynchronize", self.stream())  # which a capture forbids
            apart = [x for x in operands if x.dim() and not self.memory.holds(x)]
            if apart and not name.startswith(self.MAY_MIX):
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        to_machine = _is_cuda(wanted) if wanted is not None else bool(mine)
        records = recording is not None and to_machine
        out = recording.once(func, args, kwargs) if records else func(*args, **kwargs)
        if scalar:
            return out
        of_pool = self.memory.chosen.pool is not None and name.startswith("aten.empty")
        known = {_storage(x) for x in operands} - {0}  # an empty tensor of the host has no address

        def place(y):
            if not isinstance(y, torch.Tensor) or y.layout != torch.strided or _storage(y) in known:
                return y
            if to_machine == self.memory.holds(y):
                return y
            if to_machine:
                stream = recording.memory_stream if records and not of_pool else self.stream()
                moved = self.memory.empty(y.shape, y.dtype, stream, y.stride() if _dense(y) else None)
                if of_pool:  # work on its way may still use the block: nothing is written to it out of turn
                    return moved
                if self.memory.chosen.pool is not None:  # for the same reason
                    self.memory.runtime.call("cudaStreamSynchronize", self.stream())
            else:
                moved = torch.empty_like(y)
            return moved.copy_(y)

        placed = tree_map(place, out)
        if records and not of_pool:
            recording.again(func, args, kwargs, out, placed)
        return placed


def _dense(y: torch.Tensor) -> bool:
    return y.numel() == 0 or y.untyped_storage().nbytes() == y.numel() * y.element_size()


class Move(torch.autograd.Function):
    """A copy on another device, whose gradient comes back."""

    @staticmethod
    def forward(ctx, x, source, device):
        ctx.source = source
        return torch.ops.aten._to_copy.default(x.detach(), device=device)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.aten._to_copy.default(gradient, device=ctx.source), None, None


def _target(args, memory):
    """(device or None, the other arguments) of Tensor.to."""
    device, rest = None, []
    for a in args:
        if isinstance(a, (str, torch.device)):
            device = a
        elif isinstance(a, torch.Tensor):
            device = a.device
            rest.append(a.dtype)
        else:
            rest.append(a)
    return device, rest


def patch_tensors(memory: Memory, stream) -> None:
    """What Python code asks tensors about their device, and how it moves them."""
    plain = torch.Tensor
    to, tolist, numpy = plain.to, plain.tolist, plain.numpy

    def moved(x, device):
        device = CUDA if _is_cuda(device) else CPU
        return x if x.device == device else Move.apply(x, x.device, device)

    def new_to(x, *args, **kwargs):
        device, rest = _target(args, memory)
        device = kwargs.pop("device", device)
        kwargs.pop("non_blocking", None)
        y = to(x, *rest, **kwargs) if rest or kwargs else x
        return y if device is None else moved(y, device)

    def new_tolist(x):
        if memory.holds(x):
            memory.runtime.call("cudaStreamSynchronize", stream())
        return tolist(x)

    def new_numpy(x, *args, **kwargs):
        if memory.holds(x):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return numpy(x, *args, **kwargs)

    plain.device = property(lambda x: CUDA if memory.holds(x) else CPU)
    plain.is_cuda = property(lambda x: memory.holds(x))
    plain.is_cpu = property(lambda x: not memory.holds(x))
    plain.to, plain.tolist, plain.numpy = new_to, new_tolist, new_numpy
    plain.cuda = lambda x, *args, **kwargs: moved(x, CUDA)
    plain.cpu = lambda x, *args, **kwargs: moved(x, CPU)
    plain.pin_memory = lambda x, *args: x
    plain.record_stream = lambda x, user: memory.record_stream(x, user.cuda_stream)


def patch_as_tensor(memory: Memory) -> None:
    """torch.as_tensor of bytes that say by __cuda_array_interface__ that they lie on the device: a tensor over them,
    which keeps the object that lends them."""
    plain = torch.as_tensor

    def as_tensor(data, *args, **kwargs):
        lent = None if isinstance(data, torch.Tensor) else getattr(data, "__cuda_array_interface__", None)
        if lent is None:
            return plain(data, *args, **kwargs)
        ((size,), (at, _)) = lent["shape"], lent["data"]
        if lent["typestr"] != "|u1" or not memory.begin <= at < memory.end:
            raise RuntimeError(f"as_tensor of {lent}: bytes of the machine's device are known, no others")
        block = (ctypes.c_uint8 * size).from_address(at)
        block.lender = data
        return torch.frombuffer(block, dtype=torch.uint8)

    torch.as_tensor = as_tensor


def in_every_thread(memory: Memory, stream) -> None:
    """Threads that start from here on run under the mode."""
    run = threading.Thread.run

    def with_modes(self):
        with OnMachine(memory, stream):
            run(self)

    threading.Thread.run = with_modes
