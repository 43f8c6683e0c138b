"""grouped_mm: a matrix product per expert, exact for experts that received nothing and for rows behind the last.

Three things go wrong in grouped GEMMs with ragged groups, and each has its exact answer here: gradients of experts
without rows that nobody writes (`probe` decides the remedy), rows behind the last group that nobody writes, in the
output and, unseen, in the gradient that autograd hands on (both are stored as zeros), and calls without any row
(answered with zeros of the right shapes). Raising a count instead of adding rows is never an answer: the expert
would multiply its neighbour's rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hybrid_ep import recording
from hybrid_ep.errors import BufferFailedError
from hybrid_ep.moe import arguments, checks, padding, probing
from hybrid_ep.moe.backends import BACKENDS, Backend, Groups
from hybrid_ep.moe.precisions import backend_of, backends_of

log = logging.getLogger("hybrid_ep.moe")
_said: set[tuple[Any, ...]] = set()
Machine = tuple[Backend, str]  # with the remedy for groups without rows
Delay = Callable[[Callable[[], torch.Tensor]], None]
Remake = tuple[Callable[..., torch.Tensor], Sequence[torch.Tensor | None]]


class Place(Protocol):
    """Memory for results, as HybridEPBuffer lends it."""

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns], uninitialised."""
        ...

    def registered(
        self, function: Callable[[], torch.Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """function(), whose result torch makes there, if it can."""
        ...


class Arrivals(Protocol):
    """Stacks behind the first, whose weights others are bringing: what they are multiplied by comes last, and their
    gradients are handed over first, so that what travels does so beside the first stack's products."""

    def under_way(self) -> bool:
        """Whether somebody has yet to wait for them; in the backward anew, where they are brought again."""
        ...

    def wait(self) -> None:
        """Behind it, on the caller's stream, their weights are there. Called before they are read; nothing to do where
        they are not under way."""
        ...

    def gradients(self, made: list[torch.Tensor]) -> None:
        """Weight gradients [E_i, K, F] of these stacks, as soon as the backward has them; autograd gets none."""
        ...


def grouped_mm(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    offsets: torch.Tensor,
    *,
    backend: str = "auto",
    tail: bool = True,
    first_rows: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    arriving: Arrivals | None = None,
    precision: str = "params",
    delay: Delay | None = None,
    remake: Remake | None = None,
    place: Place | None = None,
    gradient_place: Place | None = None,
) -> torch.Tensor:
    """[N, F]: rows of group e of x times w[e]; rows from offsets[-1] on are zero. Differentiable in x and w.

    x [N, K] and w [E, K, F] of one dtype (bf16, fp16, fp32), any strides; a weight stored as [E, F, K] goes in as
    w.transpose(1, 2), without a copy. offsets int32 or int64 [E], on x's device: the row where each group ends,
    ascending, the last at most N; groups may be empty. tail: False promises that offsets[-1] is N, and saves clearing.

    backend: "torch", "triton", "loop", "te", or "auto": on a CPU torch's where it takes the shape and the probe finds
    it usable, else the loop; on a GPU torch's, Triton's or the loop, the first that is usable, Triton's before torch's
    where that would wait for the device or copy its result. A choice that is not the first is said once in the log.

    w may be several stacks [E_i, K, F] of weights that live in different memory, their experts one after the other:
    E is then the sum of E_i. No weight is copied. first_rows: at which row the experts of each stack begin, where the
    host knows it; "torch" reads it from the device otherwise, the others do not use it.

    out [N, F], contiguous and not part of a graph: where the product is stored and what is returned, e.g. of
    buffer.empty(), whose rows combine reads where they lie. "loop" and "triton" store there; results of the others
    are copied, so that "auto" takes the loop for it on a CPU and Triton's kernel on a GPU.

    arriving: the stacks behind the first are on their way here (`Arrivals`), and what does not need their weights is
    computed before they are waited for: the first stack's rows, in the backward all weight gradients too, of which
    theirs are handed over as soon as they are made. "te" waits before all. "auto" takes Triton's kernels for it on a
    GPU, whose programs leave SMs to kernels that run beside. Bits are those of the same backend without it.

    precision: "params", products in the dtype of x and w, or "fp8", products of e4m3 values as DeepSeek-V3 trains
    (arXiv 2412.19437, section 3.3; `hybrid_ep.moe.block_scaled` says it in torch). x, w and the gradient of the result
    are quantised on the way, with an fp32 scale for 128 values of a row, for 128 x 128 of a weight and, in the weight
    gradient, for 128 rows of a group; sums are fp32, dtypes of results as without. A value is off by at most 1/16 of
    itself or, where that is more, 2.2e-6 of its block's largest: an element by at most 0.13 of its sum of magnitudes
    and what such small values add, in normal data by 3.7 % (root mean square). A NaN or an infinity makes NaN
    of all that its block takes part in. (Blocks below 5.3e-36 lose more.) "loop", the reference, and "triton" do it;
    "auto" the latter where it runs.

    delay: in a backward that asks for it, it is called with a function that makes the first stack's gradient [E_0, K,
    F], in place of making it; autograd gets none. The function holds x and the result's gradient, and gives the bits
    of no delay. What does not wait for weight gradients can be started before it is called.

    remake: a function and the tensors that it takes: it makes x again, with the same bits, in the backward, where
    weight gradients ask for it; x itself is not kept, and the tensors are, as autograd keeps what it saves.

    place, gradient_place: a HybridEPBuffer, or what lends memory as one does: the result, and x's gradient, are stored
    there, where combine reads experts' outputs, and the combine of a dispatch's backward the gradient of its rows, in
    place. By empty() or, of "torch" with one stack, by registered(); "te" makes more than its result, and stays
    outside. "auto" takes the loop for it on a CPU, and on a GPU what it takes without. out goes before place.

    Gradients: rows behind the last group get and give nothing, whatever they or their gradients hold (NaN too);
    weight gradients of experts without rows are exact zeros. With "triton", and with "torch" for one stack or with
    first_rows, nothing waits for the device (the first call per device and dtype, which probes, does). Raises
    ValueError for a wrong argument; on a CPU offsets are checked too."""
    stacks = (w,) if isinstance(w, torch.Tensor) else arguments.stacks_of(w)
    known = (
        None if first_rows is None else checks.integers("first_rows", first_rows, "the first row of each stack of w")
    )
    arguments.operands(x, stacks, offsets, tail, known)
    if out is not None:
        arguments.out_memory(out, x, stacks)
    if arriving is not None:
        arguments.arriving_weights(arriving)
    arguments.lender("place", place)
    arguments.lender("gradient_place", gradient_place)
    if delay is not None and not callable(delay):
        raise ValueError(f"delay={delay!r:.80} is not callable; give a function of a function, or None")
    takes = isinstance(remake, tuple) and len(remake) == 2 and callable(remake[0])
    if remake is not None and not takes:
        raise ValueError(f"remake={remake!r:.80} is no (function, tensors); give what makes x again, or None")
    groups = Groups(offsets.to(torch.int32), tuple(stack.shape[0] for stack in stacks), known)
    arriving = arriving if len(stacks) > 1 else None
    lent = place is not None or gradient_place is not None
    stores = out is not None or (lent and x.device.type == "cpu")
    machine = _choose(backend, x, stacks, groups, stores, arriving is not None, precision)
    wishes = _Wishes(arriving, delay, remake, gradient_place)

    def product(into: torch.Tensor | None) -> torch.Tensor:
        return _GroupedMM.apply(into, x, groups, machine, tail, wishes, *stacks)

    if out is not None:
        return product(out)
    return _placed(product, place, machine[0], len(stacks), (x.shape[0], stacks[0].shape[2], x.dtype), x.device)


class _Wishes(NamedTuple):
    """What the caller asks of the backward beside gradients."""

    arriving: Arrivals | None = None
    delay: Delay | None = None
    remake: Remake | None = None
    gradient_place: Place | None = None


class _Rows:
    """x in the backward: what was kept, or what is made again when it is first asked for."""

    def __init__(self, kept: Sequence[torch.Tensor | None], remake: Remake | None, like: tuple[Any, ...]):
        self._x = kept[0] if remake is None else None
        self._remake, self._of, self._like = remake, kept, like

    def __call__(self) -> torch.Tensor:
        if self._x is None:
            assert self._remake is not None
            with torch.no_grad():
                made = self._remake[0](*self._of)
            if (made.shape, made.dtype, made.device) != self._like:
                raise ValueError(
                    f"remake made {made.dtype} {tuple(made.shape)} on {made.device} in the backward, where x was "
                    f"{self._like[1]} {tuple(self._like[0])} on {self._like[2]}; make the same again"
                )
            self._x, self._of = made, ()
        return self._x


class _GroupedMM(torch.autograd.Function):
    """`out` comes first, for that is where autograd looks for what is stored in place: where it is a slice of other
    memory, it takes the first argument's gradient for the slice's."""

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor | None,
        x: torch.Tensor,
        groups: Groups,
        machine: Machine,
        tail: bool,
        wishes: _Wishes,
        *stacks: torch.Tensor,
    ) -> torch.Tensor:
        kept = (x,) if wishes.remake is None else tuple(wishes.remake[1])
        ctx.save_for_backward(groups.ends, *stacks, *kept)
        ctx.wishes = wishes._replace(remake=None if wishes.remake is None else (wishes.remake[0], ()))
        ctx.facts = groups.sizes, groups.first_rows, machine, tail
        ctx.like = x.shape, x.dtype, x.device
        arriving = wishes.arriving
        if out is not None:
            ctx.mark_dirty(out)
        elif recording.recorded() and x.numel() and stacks[0].shape[2]:
            # A product that selective checkpointing keeps must stay as it was made: the result is other memory.
            out = x.new_empty(x.shape[0], stacks[0].shape[2])
        if arriving is None or not arriving.under_way():
            return _rows_times_stacks(x, stacks, groups, machine, tail, out)
        if _in_turns(machine):
            out = _rows_times_stacks(x, stacks, groups, machine, tail, out, range(1))
        arriving.wait()
        further = range(1, len(stacks)) if _in_turns(machine) else None
        return _rows_times_stacks(x, stacks, groups, machine, tail, out, further)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wishes: _Wishes = ctx.wishes
        num_stacks = len(ctx.facts[0])
        ends, *saved = ctx.saved_tensors
        stacks, kept = saved[:num_stacks], saved[num_stacks:]
        x = _Rows(kept, wishes.remake, ctx.like)
        sizes, first_rows, machine, tail = ctx.facts
        groups = Groups(ends, sizes, first_rows)
        grad = grad.contiguous()  # of a sum it is one number seen [N, F] times, which GEMMs do not take
        asks_dx, wanted = ctx.needs_input_grad[1], ctx.needs_input_grad[6:]
        turned = [w.transpose(1, 2) for w in stacks]
        if wishes.arriving is not None or wishes.delay is not None:
            # Who hands gradients over must be asked for them: not so where a caller wants those of other inputs alone.
            # needs_input_grad does not tell, and torch has no public name for what does (its own graph.py calls it).
            nodes = [node for node, _ in ctx.next_functions[-len(stacks) :]]
            asked = [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
            wanted = tuple(w and a for w, a in zip(wanted, asked, strict=True))
        dw: list[torch.Tensor | None] = [None] * len(stacks)
        if wishes.arriving is not None:
            dx, dw = _backward_in_turns(x, grad, turned, groups, machine, tail, wishes, asks_dx, wanted)
            return None, dx, None, None, None, None, *dw
        dx = _gradient_of_rows(grad, turned, groups, machine, tail, wishes) if asks_dx else None
        made: list[torch.Tensor] = []
        if any(wanted[1:]) or (wanted[0] and wishes.delay is None):
            made = _weight_gradients(x(), grad, groups, machine)
            dw = [gradient if asked else None for gradient, asked in zip(made, wanted, strict=True)]
        if wanted[0] and wishes.delay is not None:
            dw[0] = _first_gradient(wishes.delay, x, grad, groups, machine, made[0] if made else None)
        return None, dx, None, None, None, None, *dw


def _in_turns(machine: Machine) -> bool:
    backend, remedy = machine
    return backend.in_turns and remedy != "pad_empty"  # which copies all rows, once for all stacks


def _first_gradient(
    delay: Delay | None, x: _Rows, grad: torch.Tensor, groups: Groups, machine: Machine, made: torch.Tensor | None
) -> torch.Tensor | None:
    """Of the first stack's weights; None where `delay` is handed how it is made. made: it is there, for it came with
    other stacks' gradients."""
    of = range(1) if len(groups.sizes) > 1 and _in_turns(machine) else None

    @torch.no_grad()
    def make() -> torch.Tensor:
        return _weight_gradients(x(), grad, groups, machine, of)[0] if made is None else made

    if delay is None:
        return make()
    delay(make)
    return None


def _backward_in_turns(
    x: _Rows,
    grad: torch.Tensor,
    turned: Sequence[torch.Tensor],
    groups: Groups,
    machine: Machine,
    tail: bool,
    wishes: _Wishes,
    asks_dx: bool,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """(dx, gradients for autograd). Weights that are under way are waited for behind all that does without them, and
    their gradients are handed over before the most that does not need to be behind these."""
    own, further = range(1), range(1, len(turned))
    arriving, delay = wishes.arriving, wishes.delay
    assert arriving is not None
    dx: torch.Tensor | None = None
    dw: list[torch.Tensor | None] = [None] * len(turned)
    under_way, in_turns = arriving.under_way(), _in_turns(machine)
    if asks_dx and under_way and in_turns:
        dx = _gradient_of_rows(grad, turned, groups, machine, tail, wishes, own)
    made: list[torch.Tensor] = []
    if any(wanted[1:]):
        made = _weight_gradients(x(), grad, groups, machine, further if in_turns else None)
        arriving.gradients(made[-len(further) :])
    if asks_dx and not under_way:
        dx = _gradient_of_rows(grad, turned, groups, machine, tail, wishes, range(len(turned)) if in_turns else None)
    if wanted[0]:
        dw[0] = _first_gradient(delay, x, grad, groups, machine, made[0] if made and not in_turns else None)
    if under_way:
        arriving.wait()
        if asks_dx and dx is None:
            dx = _gradient_of_rows(grad, turned, groups, machine, tail, wishes)
        elif asks_dx:
            dx = _rows_times_stacks(grad, turned, groups, machine, tail, dx, further)
    return dx, dw


def _gradient_of_rows(
    grad: torch.Tensor,
    turned: Sequence[torch.Tensor],
    groups: Groups,
    machine: Machine,
    tail: bool,
    wishes: _Wishes,
    of: range | None = None,
) -> torch.Tensor:
    """[N, K], where the caller wants it; of: of these stacks' rows, for now."""

    def product(out: torch.Tensor | None) -> torch.Tensor:
        return _rows_times_stacks(grad, turned, groups, machine, tail, out, of)

    like = grad.shape[0], turned[0].shape[2], grad.dtype
    try:
        return _placed(product, wishes.gradient_place, machine[0], len(turned), like, grad.device)
    except BufferFailedError:  # since the forward; whoever combines the gradient will hear of it
        return product(None)


def _placed(
    product: Callable[[torch.Tensor | None], torch.Tensor],
    place: Place | None,
    backend: Backend,
    num_stacks: int,
    like: tuple[int, int, torch.dtype],
    device: torch.device,
) -> torch.Tensor:
    """product(where to store, or None for where it chooses), of a shape and a type, in a lender's memory. Of several
    stacks who chooses makes more than the result, which would take its room."""
    if place is None or not like[0] or not like[1]:
        return product(None)
    if backend.stores:
        out = place.empty(*like)
        return product(out if out.device == device else None)
    if backend.makes_one and num_stacks == 1:
        return place.registered(lambda: product(None), *like)
    return product(None)


def _rows_times_stacks(
    x: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    groups: Groups,
    machine: Machine,
    tail: bool,
    out: torch.Tensor | None = None,
    of: range | None = None,
) -> torch.Tensor:
    """of: the stacks whose rows are computed, of a machine that does so; those behind the last group come with the last
    stack's."""
    backend, remedy = machine
    if x.numel() == 0 or stacks[0].shape[2] == 0:
        return x.new_zeros(x.shape[0], stacks[0].shape[2]) if out is None else out.zero_()
    if remedy == "pad_empty":
        padded = padding.pad_groups(x, groups.ends, probing.PAD_ROWS, empty_only=True)
        made = backend.mm(padded.rows, stacks, Groups(padded.offsets, groups.sizes))[padded.row_of]
        out = made if out is None else out.copy_(made)
    else:
        out = backend.mm(x, stacks, groups, out, of)
    return padding.zero_tail_(out, groups.ends) if tail and (of is None or of.stop == len(stacks)) else out


def _weight_gradients(
    x: torch.Tensor, grad: torch.Tensor, groups: Groups, machine: Machine, of: range | None = None
) -> list[torch.Tensor]:
    """One a stack, of all or of some."""
    backend, remedy = machine
    sizes = groups.sizes if of is None else groups.sizes[of.start : of.stop]
    if x.numel() == 0 or grad.shape[1] == 0:
        return [x.new_zeros(size, x.shape[1], grad.shape[1]) for size in sizes]
    if remedy == "pad_empty":
        x, at, _ = padding.pad_groups(x, groups.ends, probing.PAD_ROWS, empty_only=True)
        grad = padding.pad_groups(grad, groups.ends, probing.PAD_ROWS, empty_only=True).rows
        return backend.wgrad(x, grad, Groups(at, groups.sizes))
    made = backend.wgrad(x, grad, groups, of)
    if remedy == "zero_empty_wgrad":
        asked = slice(groups.first_group(of), groups.past_group(of))
        all_ends = groups.ends[asked].split(sizes)
        starts = torch.cat([groups.ends.new_zeros(1), groups.ends[:-1]])[asked].split(sizes)
        for dw, ends, start in zip(made, all_ends, starts, strict=True):
            padding.zero_empty_groups_(dw, ends - start[:1])
    return made


def _choose(
    name: str,
    x: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    groups: Groups,
    stores: bool,
    beside: bool = False,
    precision: str = "params",
) -> Machine:
    """(backend, remedy). stores: the result has a place. beside: kernels that bring weights run beside it."""
    known_backends = backends_of(precision)
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown; give 'auto' or one of {', '.join(BACKENDS)}")
    if name != "auto":
        backend_of(name, precision)  # ValueError: it makes no such products
    reasons: list[str] = []
    shape = (sum(groups.sizes), *stacks[0].shape[1:])
    waits = len(stacks) > 1 and groups.first_rows is None
    order = (name,) if name != "auto" else _best(x.device, stores, waits or beside, precision)
    for candidate in order:
        backend = known_backends[candidate]
        why = backend.refusal(x.device, x.dtype, shape) or backend.objection(stacks, groups)
        if why is None:
            known = probing.probe(x.device, x.dtype, candidate, precision)
            if known.remedy != "unusable":
                _say_once(name, candidate, reasons, x, shape, precision)
                return backend, known.remedy
            why = known.found
        reasons.append(f"{candidate}: {why}")
    raise ValueError(
        f"backend={name!r} cannot multiply {tuple(x.shape)} rows of {x.dtype} on {x.device} by weights "
        f"{shape}{_in(precision)}: {'; '.join(reasons)}"
    )


def _in(precision: str) -> str:
    return "" if precision == "params" else f" in {precision}"


def _best(device: torch.device, stores: bool, waits: bool, precision: str) -> tuple[str, ...]:
    """What "auto" tries, in this order. stores: the result has a place. waits: torch would wait for the device, or take
    all of its SMs while others are to run on some: its kernel's blocks, one an SM, would come in two waves."""
    if precision == "fp8":
        return ("loop",) if device.type == "cpu" else ("triton", "loop")
    if device.type == "cpu":
        return ("loop", "torch") if stores else ("torch", "loop")
    return ("triton", "torch", "loop") if stores or waits else ("torch", "triton", "loop")


def _say_once(
    name: str, candidate: str, reasons: list[str], x: torch.Tensor, shape: tuple[int, ...], precision: str
) -> None:
    key = (name, candidate, x.device, x.dtype, shape, precision)
    if reasons and key not in _said:
        _said.add(key)
        log.warning(
            "grouped GEMM of %s %s weights%s on %s runs in backend %s (%s)",
            x.dtype,
            shape,
            _in(precision),
            x.device,
            candidate,
            "; ".join(reasons),
        )
