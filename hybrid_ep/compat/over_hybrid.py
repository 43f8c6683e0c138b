"""What deep_ep's two buffers share here: calls of HybridEPBuffer with events as its callers know them, and what travels
beside a row, in the place of its scaling factors: choices, weights, scales, as columns of four bytes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from hybrid_ep.compat import hybrid
from hybrid_ep.compat.events import EventHandle, EventOverlap
from hybrid_ep.runtime import validation


class OverHybrid:
    """Whose calls are those of a HybridEPBuffer."""

    _hybrid: hybrid.HybridEPBuffer

    def destroy(self) -> None:
        """Gives the registered memory back; may be called twice."""
        self._hybrid.destroy()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Where asynchronous calls run. RuntimeError on a CPU, which has no streams."""
        stream = self._hybrid.stream_of_calls()
        if stream is None:
            raise RuntimeError("get_comm_stream: this buffer runs on a CPU, which has no streams")
        return stream

    def _call(self, verb: str, num_sms: int | None, async_finish: bool, **arguments: Any) -> tuple[tuple, Any]:
        """A verb of HybridEPBuffer; (its results, its event as a caller of deep_ep knows it)."""
        results = getattr(self._hybrid, verb)(**arguments, num_sms=num_sms, async_finish=async_finish)
        if not async_finish:
            return results, EventOverlap()
        return results[:-1], EventOverlap(EventHandle(results[-1]))

    def _after(self, done: EventOverlap) -> Any:
        """Where small operations on a call's results run: behind it, on its stream."""
        stream = self._hybrid.stream_of_calls() if done.event is not None else None
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    @staticmethod
    def _hand_over(done: EventOverlap, *made: torch.Tensor | None) -> None:
        """What was made behind an asynchronous call, on its stream, is used and let go on the caller's."""
        if done.event is None:
            return
        for tensor in made:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def checked_topk(idx: Any, rows: int, num_experts: int) -> torch.Tensor:
    """topk_idx int64 [rows, K]. ValueError also for an expert named twice, where looking does not wait for a device."""
    on_cpu = isinstance(idx, torch.Tensor) and idx.device.type == "cpu"
    idx = validation.topk(idx, rows, num_experts, look=on_cpu)
    if on_cpu:
        ordered = idx.sort(1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if twice.any():
            row = int(twice.any(1).nonzero()[0])
            raise ValueError(
                f"topk_idx names an expert twice in row {row}: {idx[row].tolist()}; name each once, -1 drops a choice"
            )
    return idx


def checked_weights(topk_weights: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """topk_weights fp32 of this shape, cut from autograd, or None."""
    return None if topk_weights is None else validation.weights("topk_weights", topk_weights, shape).detach()


def rows_and_scales(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x, or the two halves of (x, scales of four bytes)."""
    if isinstance(x, torch.Tensor):
        return x, None
    if not isinstance(x, (tuple, list)):
        raise ValueError(f"x is {validation.describe(x)}; give a tensor [T, H], or (x, scales)")
    if len(x) != 2:
        raise NotImplementedError(
            f"x is a tuple of {len(x)}: NVFP4 is not served here; use "
            "hybrid_ep.functional.dispatch_with_permute(dispatch_dtype='nvfp4')"
        )
    hidden, scales = x
    if scales.element_size() != 4:
        raise ValueError(f"x's scales have dtype {scales.dtype}; give one of 4 bytes, as float32")
    return hidden, scales


def pack(*parts: torch.Tensor | None) -> torch.Tensor | None:
    """int32 [T, sum of columns] of those that are there, each [T, columns] of a dtype of four bytes; None: of none."""
    there = [part.contiguous().view(torch.int32) for part in parts if part is not None]
    return torch.cat(there, dim=1) if there else None


def unpack(packed: torch.Tensor | None, *like: tuple[int, torch.dtype] | None) -> list[torch.Tensor | None]:
    """What pack() was given: of each part its columns and dtype, or None. A last part of -1 columns has the rest."""
    if packed is None:
        return [None] * len(like)
    found: list[torch.Tensor | None] = []
    at = 0
    for part in like:
        if part is None:
            found.append(None)
            continue
        columns, dtype = part
        end = packed.shape[1] if columns < 0 else at + columns
        found.append(packed[:, at:end].contiguous().view(dtype))
        at = end
    return found


def local_choices(idx: torch.Tensor, rank: int, local_experts: int) -> torch.Tensor:
    """int64 [M, K]: numbers of a rank's experts from 0, -1 where a choice is another rank's or dropped."""
    local = idx.long() - rank * local_experts
    return local.masked_fill((local < 0) | (local >= local_experts), -1)


def of_choices(returned: torch.Tensor | None, idx: torch.Tensor) -> torch.Tensor | None:
    """fp32 [T, K] of what came back for all experts [T, E]; 0 where a choice was dropped."""
    return None if returned is None else returned.gather(1, idx.clamp(min=0)).masked_fill(idx < 0, 0.0)


def checked_bias(bias: Any, tokens: int, x: Any) -> tuple[torch.Tensor, ...]:
    """Of bias the tensors, none to two, each as wide as x and of as many rows as the rank has tokens."""
    if bias is None:
        return ()
    given = tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
    shape = tokens, *getattr(x, "shape", ())[1:]
    if not 1 <= len(given) <= 2 or not all(isinstance(b, torch.Tensor) and tuple(b.shape) == shape for b in given):
        what = ", ".join(validation.describe(b) for b in given)
        raise ValueError(f"bias is {what or 'an empty tuple'}; give one tensor of shape {shape}, or two")
    return given


def add_bias(out: torch.Tensor, bias: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """out [T, H] and what checked_bias found, added in fp32 and rounded. out was rounded before: one rounding more than
    deep_ep's, whose sum begins with the bias."""
    if not bias:
        return out
    total = out.float()
    for b in bias:
        total = total + b.detach().float()
    return total.to(out.dtype)
