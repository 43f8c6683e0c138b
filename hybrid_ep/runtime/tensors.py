"""Tensors as the compiled core wants them: contiguous, 16-byte aligned, with their sizes stated."""

from __future__ import annotations

from typing import NoReturn

import torch

from hybrid_ep import _core

_ALIGNMENT = 16
_ELEMENTS = {getattr(torch, name): code for name, code in _core.TensorView.elements.items() if hasattr(torch, name)}

_DTYPES = {code: dtype for dtype, code in _ELEMENTS.items()}


def element_code(x: torch.Tensor) -> int:
    """x's element type as the core tells them apart; 0: some other."""
    return _ELEMENTS.get(x.dtype, 0)


def code_of(dtype: torch.dtype) -> int:
    """The same of a type that the core knows."""
    return _ELEMENTS[dtype]


def dtype_of(code: int) -> torch.dtype | None:
    """The inverse of element_code; None of 0, and of a type that this torch does not have."""
    return _DTYPES.get(code)


def require_memory(name: str, x: torch.Tensor) -> int:
    """The address of x's elements. ValueError for a tensor whose elements lie in no memory of its own: a wrapper around
    other tensors, a result that is still on its way, a freed storage, an implied zero."""
    try:
        address = x.data_ptr()
    except RuntimeError:  # traced, batched and fake tensors
        address = 0
    if address == 0 and x.numel() > 0:
        raise ValueError(
            f"{name} is a {type(x).__name__} of {x.numel()} elements without memory of its own; {_remedy(x)}"
        )
    return address


def _remedy(x: torch.Tensor) -> str:
    if hasattr(x, "to_local"):
        return "give this rank's part of it: .to_local()"
    if hasattr(x, "wait"):
        return "wait for the collective that makes it: .wait()"
    if x.is_meta:
        return "give a tensor that holds values, not a meta tensor"
    if type(x) in (torch.Tensor, torch.nn.Parameter) and not x._is_zerotensor():
        return "its storage was freed: give it before that, or a copy, .clone()"
    return "give a plain tensor: .to_local() of a DTensor, .wait() of an asynchronous result, .clone() of an implied 0"


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x without its autograd history, contiguous, aligned and with its conjugation and sign carried out; a copy only
    where needed."""
    if x.requires_grad:
        x = x.detach()
    if x.is_neg() or x.is_conj():
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def view(name: str, x: torch.Tensor | None) -> _core.TensorView | None:
    """x as it crosses into the core: address, bytes, element type, device. None for None; ValueError, naming it, for
    a tensor whose bytes are not all in one piece of memory."""
    return None if x is None else _core.TensorView.of(name, x)


def refuse(name: str, x: torch.Tensor) -> NoReturn:
    """ValueError: why the core cannot read x."""
    require_memory(name, x)
    if not (x.is_cpu or x.is_cuda):
        raise ValueError(f"{name} is memory of a '{x.device.type}' device; the core reads 'cpu' and 'cuda'")
    raise ValueError(
        f"{name} of shape {tuple(x.shape)} and stride {x.stride()} does not fill one piece of its "
        "storage; give .contiguous(), and no storage that was made smaller"
    )


def row_bytes(x: torch.Tensor) -> int:
    return x.shape[1] * x.element_size()


def padded_row_bytes(x: torch.Tensor) -> int:
    return -(-row_bytes(x) // _ALIGNMENT) * _ALIGNMENT


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of x as bytes, each padded with zeros to a multiple of 16: uint8 [rows, padded bytes]."""
    # By way of one dimension: with one column, or no row, a contiguous tensor may have any strides, and view() minds.
    # One with one element may have any even then.
    flat = aligned(x).reshape(-1)
    if flat.numel() == 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    as_bytes = flat.view(torch.uint8).reshape(x.shape[0], row_bytes(x))
    if as_bytes.shape[1] == padded_row_bytes(x):
        return as_bytes
    out = torch.zeros(x.shape[0], padded_row_bytes(x), dtype=torch.uint8, device=x.device)
    out[:, : as_bytes.shape[1]] = as_bytes
    return out


def unpad_rows(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undoes pad_rows for rows with the width and dtype of `like`."""
    return padded[:, : row_bytes(like)].contiguous().view(like.dtype)
