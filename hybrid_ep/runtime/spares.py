"""What spare slots ask of the core: their layout, tensors over registered memory, addresses of experts' matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from hybrid_ep import _core
from hybrid_ep.runtime import clones, validation
from hybrid_ep.runtime.tensors import require_memory

if TYPE_CHECKING:
    from hybrid_ep.runtime.session import Session

MOST_MATRICES = 16  # of an expert; SpareShape::kMostMatrices
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16
_MOST_TABLES = 4096  # of addresses, that a session keeps


@dataclass(frozen=True)
class SpareLayout:
    """Of a rank's slots. shapes: of the matrices of one expert."""

    spare_slots: int
    num_owners: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    within_node: bool = False  # clones lie on their owners' nodes
    gradients: bool = True  # False: weights alone

    @functools.cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @functools.cached_property
    def stacked_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of a matrix of all owners."""
        return tuple((self.num_owners, *shape) for shape in self.shapes)

    @property
    def num_bytes(self) -> int:
        """Of weights and gradients."""
        gradient = torch.float32.itemsize if self.gradients else 0
        return self.spare_slots * sum(self.sizes) * (self.dtype.itemsize + gradient)

    def core_shape(self) -> _core.SpareShape:
        """What the core lays memory out for."""
        return _core.SpareShape(
            spare_slots=self.spare_slots,
            num_owners=self.num_owners,
            element_bytes=self.dtype.itemsize,
            elements=self.sizes,
            gradients=self.gradients,
            **({"rail_chunk_bytes": 0} if self.within_node else {}),
        )


def why_not(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> str | None:
    """Why matrices of these shapes cannot be pushed, in words; None: they can."""
    if dtype not in DTYPES:
        return f"dtype is {dtype}; give one of {', '.join(str(d) for d in DTYPES)}"
    if not 1 <= len(shapes) <= MOST_MATRICES:
        return f"shapes has {len(shapes)} matrices of an expert; give 1 to {MOST_MATRICES}"
    for shape in shapes:
        if math.prod(shape) == 0 or math.prod(shape) * dtype.itemsize % _ALIGNMENT:
            return (
                f"shapes has {tuple(shape)}, {math.prod(shape) * dtype.itemsize} bytes of {dtype}; give matrices of a "
                f"positive multiple of {_ALIGNMENT} bytes"
            )
    return None


def layout(
    spare_slots: Any, num_owners: Any, shapes: Any, dtype: Any, within_node: Any = False, gradients: Any = True
) -> SpareLayout:
    """The constructor's arguments, checked. ValueError that names one."""
    spare_slots = validation.integer("spare_slots", spare_slots, 1)
    num_owners = validation.integer("num_owners", num_owners, 1)
    try:
        given = [list(shape) for shape in shapes]
    except TypeError as error:
        raise ValueError(f"shapes={shapes!r} must be the shapes of the matrices of one expert") from error
    known = tuple(
        tuple(validation.integer(f"shapes[{i}][{j}]", n, 1) for j, n in enumerate(shape))
        for i, shape in enumerate(given)
    )
    if (why := why_not(known, dtype)) is not None:
        raise ValueError(why)
    within_node = validation.flag("clones_within_node", within_node)
    return SpareLayout(spare_slots, num_owners, dtype, known, within_node, validation.flag("gradients", gradients))


class _OnDevice:
    """Memory of a GPU as torch.as_tensor takes it, which keeps this object."""

    def __init__(self, block: _core.ArenaBlock) -> None:
        self.block = block
        self.__cuda_array_interface__ = {
            "shape": (block.num_bytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
            "strides": None,
        }


def _bytes(engine: Any, gradients: bool, device: torch.device) -> torch.Tensor:
    """uint8: a region of this rank's registered memory, which lives as long as the tensor."""
    block = engine.spare_memory(gradients)
    if device.type == "cpu":
        return torch.frombuffer(block, dtype=torch.uint8)
    return torch.as_tensor(_OnDevice(block), device=device)


def stacks(engine: Any, slots: SpareLayout, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(weights [S, *shape] a matrix, gradients fp32 likewise, if there are any), in registered memory, zeros."""
    core, found = slots.core_shape(), []
    regions = ((False, core.weights_at, slots.dtype), (True, core.gradients_at, torch.float32))
    for gradients, begin, dtype in regions[: 1 + slots.gradients]:
        region, parts = _bytes(engine, gradients, device), []
        for n, shape in enumerate(slots.shapes):
            size = slots.spare_slots * math.prod(shape) * dtype.itemsize
            part = region[begin(n) : begin(n) + size].view(dtype)
            parts.append(part.zero_().view(slots.spare_slots, *shape))
        found.append(parts)
    return found[0], found[1] if slots.gradients else []


def slot_expert(plan: Any, slots: SpareLayout, num_ranks: int, look: bool) -> torch.Tensor:
    """int32 [R, S] of a plan or of the tensor itself. ValueError. look: at the values, where the host may."""
    given = plan.slot_expert if isinstance(plan, clones.ClonePlan) else plan
    x = validation.tensor(
        "plan", given, 2, "the ClonePlan of plan_clones, or its slot_expert int32 [ranks, spare slots]"
    )
    shape = (num_ranks, slots.spare_slots)
    if tuple(x.shape) != shape or x.dtype != torch.int32 or not x.is_contiguous():
        raise ValueError(
            f"plan is {validation.describe(x)}; give a contiguous int32 {list(shape)}, -1 for an empty slot"
        )
    x = x.resolve_neg()  # kernels read what lies in memory
    experts = num_ranks * slots.num_owners
    if look and (int(x.min()) < -1 or int(x.max()) >= experts):
        raise ValueError(f"plan names experts {int(x.min())} to {int(x.max())}; give -1 to {experts - 1}")
    return x


def addresses(
    session: Session,
    tables: dict[tuple[int, ...], torch.Tensor],
    name: str,
    given: Any,
    slots: SpareLayout,
    dtype: torch.dtype,
    alignment: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(int64 [owners, matrices] on the device, made once for the same tensors; those tensors): of experts' matrices,
    each by itself, or those of all owners in a stack. ValueError."""
    tensors, stacked = _matrices(name, given, slots)
    shapes = slots.stacked_shapes if stacked else slots.shapes * slots.num_owners
    how, key = (dtype, session.options.device, alignment), [dtype.itemsize if stacked else 0]
    for n, (x, shape) in enumerate(zip(tensors, shapes, strict=True)):
        address = _address(x, shape, *how)
        if address == 0:
            expert, matrix = divmod(n, len(slots.shapes))
            _refuse(f"{name}[{n}]" if stacked else f"{name}[{expert}][{matrix}]", x, shape, *how)
        key.append(address)
    known = tables.get(tuple(key))
    if known is None:
        if len(tables) >= _MOST_TABLES and not session.captured:
            tables.clear()
        of = torch.tensor(key[1:], dtype=torch.int64, device="cpu").view(-1, len(slots.shapes))
        if stacked:
            steps = torch.tensor([size * dtype.itemsize for size in slots.sizes], dtype=torch.int64, device="cpu")
            of = of + torch.arange(slots.num_owners, dtype=torch.int64, device="cpu")[:, None] * steps
        known = tables[tuple(key)] = of.to(session.options.device)
    return known, tensors


def _matrices(name: str, given: Any, slots: SpareLayout) -> tuple[list[Any], bool]:
    """The tensors of experts' matrices, one expert after the other, and whether they are stacks. ValueError."""
    count = len(slots.shapes)
    wanted = (
        f"give {count} of each of the {slots.num_owners} experts of this rank, in the order of their slots, or "
        f"{count} tensors, each of a matrix of all {slots.num_owners}"
    )
    try:
        parts = list(given)
        if parts and all(isinstance(part, torch.Tensor) for part in parts):
            if len(parts) != count:
                raise ValueError(f"{name} has {len(parts)} tensors; {wanted}")
            return parts, True
        matrices = [len(one) for one in parts]
    except TypeError:
        raise ValueError(f"{name} is {validation.describe(given)}, no matrices by expert; {wanted}") from None
    if matrices != [count] * slots.num_owners:
        raise ValueError(f"{name} has {matrices} matrices of {len(matrices)} experts; {wanted}")
    return [x for one in parts for x in one], False


def _address(x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, alignment: int) -> int:
    """Where kernels find a tensor's elements; 0: they cannot, and _refuse says why. Every push asks it of every tensor,
    so that it says nothing itself."""
    if not isinstance(x, torch.Tensor) or x.dtype != dtype or x.shape != shape or x.device != device:
        return 0
    if x.is_neg() or not x.is_contiguous():
        return 0
    try:
        address = x.data_ptr()
    except RuntimeError:  # traced, batched and fake tensors
        return 0
    return 0 if address % alignment else address


def _refuse(
    which: str, x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, alignment: int
) -> NoReturn:
    if not isinstance(x, torch.Tensor) or x.dtype != dtype or x.shape != shape or x.device != device:
        raise ValueError(f"{which} is {validation.describe(x)}; give {dtype} {list(shape)} on {device}")
    if x.is_neg():  # the kernels read and write what lies in memory, where the sign is not carried out
        raise ValueError(f"{which} is a view of the negative of its memory; give it as .resolve_neg()")
    require_memory(which, x)
    raise ValueError(
        f"{which} is not contiguous from an address that is a multiple of {alignment} bytes; "
        "give it as .clone(memory_format=torch.contiguous_format)"
    )


def require_within(slot_expert: torch.Tensor, columns: torch.Tensor, slots: SpareLayout, local: int) -> None:
    """ValueError for a clone on another node than its owner's, of any node: all ranks raise it. Where the host may
    look: on a GPU nobody reads the plan. columns: int64 [E], of experts' owners. local: ranks of a node."""
    if slot_expert.device.type != "cpu":
        return
    experts, owner_of = slot_expert.numpy(), columns.numpy() // (slots.num_owners + slots.spare_slots)
    holders = np.arange(len(experts))[:, None] // local
    crossing = np.argwhere((experts >= 0) & (owner_of[experts] // local != holders))
    if len(crossing):
        rank, slot = crossing[0].tolist()
        expert = int(experts[rank, slot])
        raise ValueError(
            f"plan gives slot {slot} of rank {rank}, on node {rank // local}, to expert {expert} of rank "
            f"{owner_of[expert]}, on node {owner_of[expert] // local}, and these slots were made with "
            "clones_within_node=True; plan with MicrobatchOptions(num_nodes=..., within_node=True), or leave it out"
        )
