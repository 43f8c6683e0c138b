"""The machines that multiply groups, each with the same verbs and each as it is, bugs included.

Experts lie in one or more stacks [E_i, K, F] of weights, one after the other; `Groups` says which rows are whose.

    mm(x, stacks, groups, out, of)
                                  x [N, K] -> [N, F]: rows of group e times the weights of expert e; with `out` [N, F]
                                  stored there, which is returned
    wgrad(x, g, groups, of)       x [N, K], g [N, F] -> a tensor [E_i, K, F] a stack, of x_e.T @ g_e

    absence()                     None, or why it is not installed
    refusal(device, dtype, (E, K, F))
                                  None, or why it cannot run there
    objection(stacks, groups)     None, or why it cannot multiply by these stacks

of: a range of stacks, whose experts alone are computed and whose weights alone are read, while other rows of `out` stay
as they are; None: all. Who has `in_turns` takes one, and computes an element alike whichever way it is asked. Who
`stores` puts the result where it is told; the others copy it there. Who `makes_one` makes no large tensor beside the
result of one stack.

What they leave undefined (rows from ends[-1] on, weight gradients of groups without rows) is `grouped`'s business,
with what `probing` found out about them.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Stacks = Sequence[torch.Tensor]


class Groups(NamedTuple):
    """The rows of each expert. ends: int32 [E], where each expert's rows end. sizes: (E_i), how many experts each stack
    has, E in all. first_rows: at which row the experts of each stack begin, where the host knows it."""

    ends: torch.Tensor
    sizes: tuple[int, ...]
    first_rows: tuple[int, ...] | None = None

    def first_group(self, of: range | None) -> int:
        """Of a range of stacks."""
        return 0 if of is None else sum(self.sizes[: of.start])

    def past_group(self, of: range | None) -> int:
        """Behind the last of a range of stacks."""
        return sum(self.sizes) if of is None else sum(self.sizes[: of.stop])


class Backend(Protocol):
    """Its verbs; see the head of the module."""

    name: str
    in_turns: bool
    stores: bool
    makes_one: bool

    def absence(self) -> str | None: ...

    def refusal(self, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None: ...

    def objection(self, stacks: Stacks, groups: Groups) -> str | None: ...

    def mm(
        self, x: torch.Tensor, stacks: Stacks, groups: Groups, out: torch.Tensor | None = None, of: range | None = None
    ) -> torch.Tensor: ...

    def wgrad(
        self, x: torch.Tensor, g: torch.Tensor, groups: Groups, of: range | None = None
    ) -> list[torch.Tensor]: ...


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Rows [N, K] one behind the other. contiguous() leaves a single row its stride, which GEMMs mind."""
    x = x.contiguous()
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)


class LoopBackend:
    """One matrix product per expert that has rows. Exact everywhere; needs the counts on the host."""

    name = "loop"
    in_turns = stores = makes_one = True
    in_a_graph = "give 16-bit rows to 'torch'"

    @staticmethod
    def absence() -> str | None:
        return None

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        if dtype not in FLOATS:
            return f"dtype {dtype} is not one of {', '.join(map(str, FLOATS))}"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return f"it reads the counts on the host, which a CUDA graph cannot capture; {cls.in_a_graph}"
        return None

    @staticmethod
    def objection(stacks: Stacks, groups: Groups) -> str | None:
        return None

    @staticmethod
    def product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """Of an expert's rows [n, K] and its weight [K, F]."""
        torch.mm(x, w, out=out)

    @staticmethod
    def gradient(x: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
        """Of an expert's weight [K, F], of its rows [n, K] and their gradients [n, F]."""
        torch.mm(x.t(), g, out=out)

    @classmethod
    def mm(
        cls, x: torch.Tensor, stacks: Stacks, groups: Groups, out: torch.Tensor | None = None, of: range | None = None
    ) -> torch.Tensor:
        if out is None:
            out = x.new_empty(x.shape[0], stacks[0].shape[2])
        weights = [weight for stack in stacks for weight in stack]
        for e, rows in _rows_of(groups, of):
            cls.product(x[rows], weights[e], out[rows])
        return out

    @classmethod
    def wgrad(cls, x: torch.Tensor, g: torch.Tensor, groups: Groups, of: range | None = None) -> list[torch.Tensor]:
        made = {i: x.new_zeros(groups.sizes[i], x.shape[1], g.shape[1]) for i in asked(groups, of)}
        first = groups.first_group(of)
        weights = [weight for stack in made.values() for weight in stack]
        for e, rows in _rows_of(groups, of):
            cls.gradient(x[rows], g[rows], weights[e - first])
        return list(made.values())


class TorchBackend:
    """torch's grouped GEMM: a kernel a stack, counts on the device. On GPUs bf16 from compute capability 9.0 on;
    torch's own fallback for the rest reads the counts on the host, so it is refused here."""

    name = "torch"
    in_turns, stores, makes_one = True, False, True

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
        return _not_in_16_bytes(dtype, k, f)

    @staticmethod
    def objection(stacks: Stacks, groups: Groups) -> str | None:
        reads = len(stacks) > 1 and groups.first_rows is None and stacks[0].device.type == "cuda"
        if reads and torch.cuda.is_current_stream_capturing():
            return "it reads where a stack's rows begin on the host, which a CUDA graph cannot capture; give first_rows"
        return next((why for stack in stacks if (why := _unlike_a_matrix(stack)) is not None), None)

    @classmethod
    def mm(
        cls, x: torch.Tensor, stacks: Stacks, groups: Groups, out: torch.Tensor | None = None, of: range | None = None
    ) -> torch.Tensor:
        """Of several stacks the first one's product goes over all rows and leaves those of the others to them."""
        parts = list(cls._parts(x, groups))
        for i in asked(groups, of):
            stack, (first, last, ends) = stacks[i], parts[i]
            if out is None and first == 0 and (last or len(stacks) == 1):
                out = cls._product(x, stack, ends)
                continue
            if out is None:
                out = x.new_empty(x.shape[0], stack.shape[2])
            if last > first:
                out[first:last] = cls._product(x[first:last], stack, ends)
        assert out is not None  # there is at least one stack
        return out

    @classmethod
    def wgrad(cls, x: torch.Tensor, g: torch.Tensor, groups: Groups, of: range | None = None) -> list[torch.Tensor]:
        parts = list(zip(groups.sizes, cls._parts(x, groups), strict=True))
        return [
            # A transposed view keeps the ragged dimension off the contiguous one, where it would need alignment.
            _required_grouped_mm()(_dense(x[first:last]).t(), _dense(g[first:last]), offs=ends)
            if last > first
            else x.new_zeros(size, x.shape[1], g.shape[1])
            for size, (first, last, ends) in (parts[i] for i in asked(groups, of))
        ]

    @staticmethod
    def _product(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return _required_grouped_mm()(_dense(x), w, offs=ends)

    @staticmethod
    def _parts(x: torch.Tensor, groups: Groups) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first row, last row, ends of its groups counted from the first row) of every stack."""
        first_rows = groups.first_rows
        if first_rows is None:
            cuts = list(accumulate(groups.sizes))[:-1]
            before = groups.ends[[cut - 1 for cut in cuts if cut]].tolist() if cuts else []
            first_rows = (0, *(before.pop(0) if cut else 0 for cut in cuts))
        bounds = (*first_rows, x.shape[0])
        for first, last, own in zip(bounds, bounds[1:], groups.ends.split(groups.sizes), strict=False):
            yield first, last, own - first if first else own


class TritonBackend:
    """Our kernels: all stacks in one launch, counts on the device, stored where one asks, zeros for empty experts."""

    name = "triton"
    in_turns = stores = makes_one = True

    @staticmethod
    def absence() -> str | None:
        return None if importlib.util.find_spec("triton") else "Triton is not installed"

    @staticmethod
    def wrong_device(device: torch.device) -> str | None:
        """None, or why our kernels do not run there."""
        if device.type != "cuda":
            return "Triton's kernels need a GPU"
        if torch.cuda.get_device_capability(device)[0] not in (9, 10):
            return "its tiles are made for GPUs of compute capability 9.x and 10.x"
        return None

    @classmethod
    def refusal(cls, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> str | None:
        if why := cls.absence():
            return why
        if dtype not in (torch.bfloat16, torch.float16):
            return f"its kernels take bfloat16 or float16 rows, not {dtype}"
        if (why := cls.wrong_device(device)) is not None:
            return why
        _, k, f = shape
        if k * f >= 2**31:
            return f"a weight of {k} x {f} elements is beyond offsets of 32 bits"
        return _not_in_16_bytes(dtype, k, f)

    @staticmethod
    def objection(stacks: Stacks, groups: Groups) -> str | None:
        from hybrid_ep.moe import triton_grouped as kernels

        if len(stacks) > kernels.MAX_STACKS:
            return f"it takes at most {kernels.MAX_STACKS} stacks, not {len(stacks)}"
        if (experts := sum(groups.sizes)) > kernels.MAX_GROUPS:
            return f"it takes at most {kernels.MAX_GROUPS} experts a rank, not {experts}"
        steps = {tuple(stack.stride()[1:]) for stack in stacks}
        if len(steps) > 1:
            return f"matrices of the stacks have different strides {sorted(steps)}"
        if sum((n - 1) * step for n, step in zip(stacks[0].shape[1:], steps.pop(), strict=True)) >= 2**31:
            return "a weight spans more than offsets of 32 bits reach"
        return None

    @staticmethod
    def mm(
        x: torch.Tensor, stacks: Stacks, groups: Groups, out: torch.Tensor | None = None, of: range | None = None
    ) -> torch.Tensor:
        from hybrid_ep.moe import triton_grouped

        if out is None:
            out = x.new_empty(x.shape[0], stacks[0].shape[2])
        some = None if of is None else (groups.first_group(of), groups.past_group(of))
        triton_grouped.rows_times_stacks(x.contiguous(), stacks, groups.ends, out, some)
        return out

    @staticmethod
    def wgrad(x: torch.Tensor, g: torch.Tensor, groups: Groups, of: range | None = None) -> list[torch.Tensor]:
        from hybrid_ep.moe import triton_grouped

        x, g, made = x.contiguous(), g.contiguous(), []
        firsts = [0, *accumulate(groups.sizes)]
        for i in asked(groups, of):
            made.append(x.new_empty(groups.sizes[i], x.shape[1], g.shape[1]))
            if groups.sizes[i]:
                triton_grouped.weight_gradient(x, g, groups.ends, firsts[i], made[-1])
        return made


class TransformerEngineBackend:
    """Transformer Engine's GroupedLinear, through its public module. Takes a list of counts, so the host waits."""

    name = "te"
    in_turns = stores = makes_one = False

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

    @staticmethod
    def objection(stacks: Stacks, groups: Groups) -> str | None:
        return None

    @classmethod
    def mm(
        cls, x: torch.Tensor, stacks: Stacks, groups: Groups, out: torch.Tensor | None = None, of: range | None = None
    ) -> torch.Tensor:
        assert of is None
        if out is None:
            out = x.new_zeros(x.shape[0], stacks[0].shape[2])
        counts = _counts(groups.ends)
        if total := sum(counts):
            weights = [weight.t().contiguous() for stack in stacks for weight in stack]
            out[:total] = cls._apply(x[:total].contiguous(), weights, counts)
        return out

    @classmethod
    def wgrad(cls, x: torch.Tensor, g: torch.Tensor, groups: Groups, of: range | None = None) -> list[torch.Tensor]:
        assert of is None
        counts = _counts(groups.ends)
        total = sum(counts)
        if not total:
            return [x.new_zeros(size, x.shape[1], g.shape[1]) for size in groups.sizes]
        with torch.enable_grad():
            weights = [x.new_zeros(g.shape[1], x.shape[1], requires_grad=True) for _ in counts]
            y = cls._apply(x[:total].detach().contiguous(), weights, counts)
            gradients = torch.stack(torch.autograd.grad(y, weights, g[:total].contiguous()))
        return list(gradients.transpose(1, 2).split(groups.sizes))

    @staticmethod
    def _apply(x: torch.Tensor, weights: Sequence[torch.Tensor], counts: list[int]) -> torch.Tensor:
        """weights: E tensors [F, K]."""
        f, k = weights[0].shape
        module = _te_module(len(counts), k, f, x.dtype)
        named = {f"weight{e}": weight for e, weight in enumerate(weights)}
        return torch.func.functional_call(module, named, (x, counts))


BACKENDS: dict[str, Backend] = {
    b.name: b for b in (TorchBackend(), TritonBackend(), LoopBackend(), TransformerEngineBackend())
}


def _unlike_a_matrix(stack: torch.Tensor) -> str | None:
    """Why torch's kernel does not take the strides of [E, K, F]; None: it does."""
    (experts, k, f), (apart, over_k, over_f), step = stack.shape, stack.stride(), 16 // stack.element_size()
    if not stack.numel():
        return None
    rows = over_f == 1 and over_k >= f and over_k % step == 0
    columns = over_k == 1 and over_f >= k and over_f % step == 0
    if (rows or columns) and (experts == 1 or apart % step == 0):
        return None
    return f"strides {stack.stride()} of weights {tuple(stack.shape)} are not those of matrices by rows or by columns"


def _not_in_16_bytes(dtype: torch.dtype, k: int, f: int) -> str | None:
    step = 16 // dtype.itemsize
    if k % step or f % step:
        return f"rows of {k} and {f} elements of {dtype} must be multiples of 16 bytes ({step} elements)"
    return None


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


def _counts(ends: torch.Tensor) -> list[int]:
    known = ends.tolist()
    return [end - start for start, end in zip([0, *known[:-1]], known, strict=True)]


def asked(groups: Groups, of: range | None) -> range:
    """The stacks that are computed."""
    return range(len(groups.sizes)) if of is None else of


def _rows_of(groups: Groups, of: range | None) -> Iterator[tuple[int, slice]]:
    """(e, its rows as a slice) of the groups of these stacks that have rows."""
    start, asked = 0, range(groups.first_group(of), groups.past_group(of))
    for e, end in enumerate(groups.ends.tolist()):
        if end > start and e in asked:
            yield e, slice(start, end)
        start = end
