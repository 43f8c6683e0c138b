"""The machines that multiply groups, each with the same verbs and each as it is, bugs included.

    mm(x, w, offsets)             x [N, K], w [E, K, F], offsets int32 [E] -> [N, F]: rows of group e times w[e]
    mm_into(x, w, offsets, out)   the same into out [N, F]; of a machine that makes its result itself, by a copy
    wgrad(x, g, offsets)          x [N, K], g [N, F], offsets int32 [E]    -> [E, K, F]: x_e.T @ g_e

    absence()                     None, or why it is not installed
    refusal(device, dtype, (E, K, F))
                                  None, or why it cannot run there

What they leave undefined (rows from offsets[-1] on, weight gradients of groups without rows) is `grouped`'s business,
with what `probing` found out about them.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Backend(Protocol):
    """Its verbs; see the head of the module."""

    name: str

    def absence(self) -> str | None: ...

    def refusal(self, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None: ...

    def mm(self, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor: ...

    def mm_into(self, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None: ...

    def wgrad(self, x: torch.Tensor, g: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor: ...


class LoopBackend:
    """One matrix product per expert that has rows. Exact everywhere; needs the counts on the host."""

    name = "loop"

    @staticmethod
    def absence() -> str | None:
        return None

    @staticmethod
    def refusal(device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        if dtype not in FLOATS:
            return f"dtype {dtype} is not one of {', '.join(map(str, FLOATS))}"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it reads the counts on the host, which a CUDA graph cannot capture; give 16-bit rows to 'torch'"
        return None

    @classmethod
    def mm(cls, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], w.shape[2])
        cls.mm_into(x, w, offsets, out)
        return out

    @staticmethod
    def mm_into(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
        for e, rows in _groups(offsets):
            torch.mm(x[rows], w[e], out=out[rows])

    @staticmethod
    def wgrad(x: torch.Tensor, g: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(offsets.numel(), x.shape[1], g.shape[1])
        for e, rows in _groups(offsets):
            torch.mm(x[rows].t(), g[rows], out=out[e])
        return out


class TorchBackend:
    """torch's grouped GEMM: one kernel, counts on the device. On GPUs bf16 from compute capability 9.0 on; torch's
    own fallback for the rest reads the counts on the host, so it is refused here."""

    name = "torch"

    @staticmethod
    def absence() -> str | None:
        return None if _torch_grouped_mm() else f"torch {torch.__version__} has no grouped_mm; install torch >= 2.9"

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        if why := cls.absence():
            return why
        if dtype not in FLOATS:
            return f"dtype {dtype} is not one of {', '.join(map(str, FLOATS))}"
        if device.type == "cuda":
            if dtype != torch.bfloat16:
                return f"its kernels for GPUs take bfloat16 rows, not {dtype}"
            if torch.cuda.get_device_capability(device) < (9, 0):
                return "its kernels need a GPU of compute capability 9.0 or newer"
        _, k, f = shape
        step = 16 // dtype.itemsize
        if k % step or f % step:
            return f"rows of {k} and {f} elements of {dtype} must be multiples of 16 bytes ({step} elements)"
        return None

    @staticmethod
    def mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return _required_grouped_mm()(x.contiguous(), w, offs=offsets)

    @classmethod
    def mm_into(cls, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(cls.mm(x, w, offsets))

    @staticmethod
    def wgrad(x: torch.Tensor, g: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        # A transposed view keeps the ragged dimension off the contiguous one, where it would need alignment.
        return _required_grouped_mm()(x.contiguous().t(), g.contiguous(), offs=offsets)


class TransformerEngineBackend:
    """Transformer Engine's GroupedLinear, through its public module. Takes a list of counts, so the host waits."""

    name = "te"

    @staticmethod
    def absence() -> str | None:
        return None if importlib.util.find_spec("transformer_engine") else "Transformer Engine is not installed"

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        if why := cls.absence():
            return why
        if device.type != "cuda":
            return "Transformer Engine needs a GPU"
        return LoopBackend.refusal(device, dtype, shape)

    @classmethod
    def mm(cls, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(x.shape[0], w.shape[2])
        counts = _counts(offsets)
        if total := sum(counts):
            out[:total] = cls._apply(x[:total].contiguous(), [m.t().contiguous() for m in w], counts)
        return out

    @classmethod
    def mm_into(cls, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(cls.mm(x, w, offsets))

    @classmethod
    def wgrad(cls, x: torch.Tensor, g: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        counts = _counts(offsets)
        total = sum(counts)
        if not total:
            return x.new_zeros(offsets.numel(), x.shape[1], g.shape[1])
        with torch.enable_grad():
            weights = [x.new_zeros(g.shape[1], x.shape[1], requires_grad=True) for _ in counts]
            y = cls._apply(x[:total].detach().contiguous(), weights, counts)
            return torch.stack(torch.autograd.grad(y, weights, g[:total].contiguous())).transpose(1, 2)

    @staticmethod
    def _apply(x: torch.Tensor, weights: Sequence[torch.Tensor], counts: list[int]) -> torch.Tensor:
        """weights: E tensors [F, K]."""
        f, k = weights[0].shape
        module = _te_module(len(counts), k, f, x.dtype)
        named = {f"weight{e}": weight for e, weight in enumerate(weights)}
        return torch.func.functional_call(module, named, (x, counts))


BACKENDS: dict[str, Backend] = {b.name: b for b in (TorchBackend(), LoopBackend(), TransformerEngineBackend())}


@functools.cache
def _torch_grouped_mm() -> Callable[..., torch.Tensor] | None:
    """The public name since torch 2.10, before that the operator behind it."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _required_grouped_mm() -> Callable[..., torch.Tensor]:
    found = _torch_grouped_mm()
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} has no grouped_mm; install torch >= 2.9")
    return found


_te_modules = threading.local()  # a module is not to be entered by two threads


def _te_module(num_groups: int, k: int, f: int, dtype: torch.dtype) -> torch.nn.Module:
    from transformer_engine.pytorch import GroupedLinear

    cache = _te_modules.__dict__.setdefault("modules", {})
    key = (num_groups, k, f, dtype)
    if key not in cache:
        cache[key] = GroupedLinear(num_groups, k, f, bias=False, params_dtype=dtype, device="meta")
    return cache[key]


def _counts(offsets: torch.Tensor) -> list[int]:
    ends = offsets.tolist()
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _groups(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(e, its rows as a slice) of the groups that have rows."""
    start = 0
    for e, end in enumerate(offsets.tolist()):
        if end > start:
            yield e, slice(start, end)
        start = end
