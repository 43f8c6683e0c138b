"""What the installed grouped GEMM really does with experts that received nothing, found out once and then known.

Results differ between releases and GPUs: an empty expert's weight gradient was the previous tile's accumulator in one
release, memory never written in another, a hang in a third. So nothing is believed: once per process, device, dtype
and backend four small products run with empty groups at the start, in the middle, at the end and everywhere, over
memory full of NaN, and are compared with a product per expert. The answer is the smallest exact remedy:

    none              groups without rows come out as exact zeros
    zero_empty_wgrad  they do not, all else is right: store zeros to those weight gradients afterwards
    pad_empty         an empty group spoils more than its own gradient: give it real zero rows
    unusable          wrong even then, or it raises: another backend must do it
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_ep import recording
from hybrid_ep.moe import padding
from hybrid_ep.moe.backends import Backend, Groups
from hybrid_ep.moe.block_scaled import BLOCK
from hybrid_ep.moe.precisions import PRECISIONS, backend_of

deterministic: Any = torch.utils.deterministic  # its stub lacks the switch that torch adds at run time
REMEDIES = ("none", "zero_empty_wgrad", "pad_empty", "unusable")
COUNTS = {"start": (0, 0, 24, 8), "middle": (16, 0, 0, 16), "end": (8, 24, 0, 0), "everywhere": (0, 0, 0, 0)}
PAD_ROWS = 16  # a multiple of every 16-bit format's alignment
_ROWS, _TAIL, _K, _F = 32, 8, 32, 64
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # of the largest value
# Both quantise alike, so that dtypes make no difference; Hopper's tensor cores keep some 14 bits of the sum of a block.
_TOLERANCE_OF_FP8 = 1e-2
_LARGER_FOR_FP8 = 6  # in rows, K and F: groups and matrices of several blocks, the last of which are not full

log = logging.getLogger("hybrid_ep.moe")
_known: dict[tuple, Probe] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Probe:
    """backend, device ("cpu", or the GPU's name), dtype ("bfloat16", "bfloat16 in fp8"); remedy: one of REMEDIES;
    found: what was seen, in words; tail_dirty: whether rows behind the groups came out as anything but zeros
    (grouped_mm clears them always)."""

    backend: str
    device: str
    dtype: str
    remedy: str
    found: str
    tail_dirty: bool

    def __str__(self) -> str:
        return (
            f"grouped GEMM: backend {self.backend}, {self.dtype} on {self.device}, torch {torch.__version__}: "
            f"{self.found}; remedy {self.remedy}"
        )


def probe(
    device: torch.device | str, dtype: torch.dtype = torch.bfloat16, backend: str = "torch", precision: str = "params"
) -> Probe:
    """The Probe of a backend ("torch", "triton", "loop", "te"; with precision="fp8" "triton", "loop") on a device; runs
    at the first call, logs once.

    Must not first be called while a CUDA graph is being captured: it reads results on the host. ValueError for an
    unknown backend or precision; RuntimeError when first called during a capture."""
    machine = backend_of(backend, precision)
    device = torch.device(device)
    key = (device.type, device.index, dtype, backend, precision)
    if (known := _known.get(key)) is not None:
        return known
    with _lock:
        if key not in _known:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the grouped-GEMM probe cannot run inside a CUDA graph; call "
                    f"hybrid_ep.moe.probe({str(device)!r}, {dtype}, {backend!r}, {precision!r}) before the capture"
                )
            with recording.unrecorded():  # what it multiplies is no part of the model
                found = examine(machine, device, dtype, precision)
            _known[key] = found
            log.log(logging.INFO if found.remedy == "none" else logging.WARNING, "%s", found)
        return _known[key]


def examine(backend: Backend, device: torch.device, dtype: torch.dtype, precision: str = "params") -> Probe:
    """Runs the products and judges them by the loop's of the same precision; no cache, no log. backend: a class with
    backends' verbs."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = (
        backend.name,
        where,
        str(dtype).removeprefix("torch.") + ("" if precision == "params" else f" in {precision}"),
    )
    why = backend.refusal(device, dtype, (4, _K, _F))
    if why is not None:
        return Probe(*facts, "unusable", why, False)
    remedy, found, tail = "none", "empty experts are exact", False
    try:
        for position, counts in COUNTS.items():
            verdict, tail_here = _judge(backend, counts, device, dtype, precision, padded=False)
            tail = tail or tail_here
            if verdict == "right" or remedy == "pad_empty":
                continue
            remedy = "zero_empty_wgrad" if verdict == "empty" else "pad_empty"
            found = (
                f"weight gradient of experts without rows ({position}) is not zero"
                if verdict == "empty"
                else f"experts without rows ({position}) spoil the results of others"
            )
        if remedy == "pad_empty" and any(
            _judge(backend, counts, device, dtype, precision, padded=True)[0] != "right" for counts in COUNTS.values()
        ):
            remedy, found = "unusable", f"{found}, with zero rows too"
    except torch.OutOfMemoryError:  # of this moment, and nothing to be known by
        raise
    except (RuntimeError, NotImplementedError, AssertionError, ImportError) as error:
        remedy, found = "unusable", f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
    return Probe(*facts, remedy, found, tail)


def _judge(
    backend: Backend, counts: Sequence[int], device: torch.device, dtype: torch.dtype, precision: str, *, padded: bool
) -> tuple[str, bool]:
    """("right" | "empty": only gradients of empty groups differ | "wrong", tail rows came out as not zero)."""
    times = _LARGER_FOR_FP8 if precision == "fp8" else 1
    counts = [count * times for count in counts]
    x, g, w, offsets = _problem(counts, device, dtype, times)
    if precision == "fp8":
        for matrix in (x, g, w):
            _make_blocks_unlike(matrix)
    groups, real = Groups(offsets, (len(counts),)), slice(0, sum(counts))
    right = PRECISIONS[precision]["loop"]
    want = (
        right.mm(x, [w], groups)[real],
        right.mm(g, [w.transpose(1, 2)], groups)[real],
        right.wgrad(x, g, groups)[0],
    )
    at_most = _TOLERANCE[dtype] if precision == "params" else _TOLERANCE_OF_FP8
    if padded:
        x, at, row_of = padding.pad_groups(x, offsets, PAD_ROWS, empty_only=True)
        g = padding.pad_groups(g, offsets, PAD_ROWS, empty_only=True).rows
        groups = groups._replace(ends=at)
    else:
        row_of = torch.arange(x.shape[0], device=device, dtype=torch.int64)
    with _poisoned_memory(device, (x.shape[0] * g.shape[1], x.numel(), w.numel()), dtype):
        out = backend.mm(x, [w], groups)[row_of]
        dx = backend.mm(g, [w.transpose(1, 2)], groups)[row_of]
        (dw,) = backend.wgrad(x, g, groups)
    full = torch.tensor(counts, device=device, dtype=torch.int64) > 0
    tail = bool((out[real.stop :] != 0).any())
    pairs = (out[real], want[0]), (dx[real], want[1]), (dw[full], want[2][full])
    if not all(_close(*pair, at_most) for pair in pairs):
        return "wrong", tail
    return ("right" if bool((dw[~full] == 0).all()) else "empty"), tail


def _problem(
    counts: Sequence[int], device: torch.device, dtype: torch.dtype, times: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, k, f = ((_ROWS + _TAIL) * times, _K * times, _F * times)
    generator = torch.Generator().manual_seed(1)
    x, g, w = (
        torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype).to(device)
        for shape in ((rows, k), (rows, f), (len(counts), k, f))
    )
    x[sum(counts) :] = g[sum(counts) :] = float("nan")  # nothing of the tail may reach a result
    offsets = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=device)
    return x, g, w, offsets


def _make_blocks_unlike(matrix: torch.Tensor) -> None:
    """Blocks of either direction differ by powers of two: a result of another block's scale is off by as much."""
    for dim in (-2, -1):
        blocks = torch.arange(matrix.shape[dim], device=matrix.device, dtype=torch.int64) // BLOCK
        sizes = torch.ldexp(torch.ones_like(blocks, dtype=matrix.dtype), blocks % 3)
        matrix.mul_(sizes.unsqueeze(1) if dim == -2 else sizes)


def _close(got: torch.Tensor, want: torch.Tensor, at_most: float) -> bool:
    if want.numel() == 0:
        return True
    # A NaN makes the comparison false, as it should.
    return bool((got.double() - want.double()).abs().max() <= at_most * want.double().abs().max())


@contextlib.contextmanager
def _poisoned_memory(device: torch.device, sizes: Sequence[int], dtype: torch.dtype) -> Iterator[None]:
    """Fresh tensors are NaN inside: torch fills them in its deterministic mode, and the caching allocator of a GPU
    hands out again what was just filled and freed."""
    # The debug mode is the same switch as use_deterministic_algorithms, which imports the compiler: 9 s of CPU.
    before = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    if device.type == "cuda":
        blocks = [torch.full((size,), float("nan"), dtype=dtype, device=device) for size in sizes for _ in range(4)]
        del blocks
    deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        deterministic.fill_uninitialized_memory = before[1]
