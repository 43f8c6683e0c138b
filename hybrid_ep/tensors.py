"""Tensors as the compiled core wants them: contiguous, 16-byte aligned, named by address."""

from __future__ import annotations

import torch

_ALIGNMENT = 16
_NOWHERE = torch.zeros(64, dtype=torch.uint8)  # an address for tensors without elements, which have none


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x without its autograd history, contiguous and aligned; a copy only where needed."""
    x = x.detach().contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def address(x: torch.Tensor | None) -> int:
    """0 for None; never 0 for a tensor."""
    return 0 if x is None else x.data_ptr() or _NOWHERE.data_ptr()


def row_bytes(x: torch.Tensor) -> int:
    return x.shape[1] * x.element_size()


def padded_row_bytes(x: torch.Tensor) -> int:
    return -(-row_bytes(x) // _ALIGNMENT) * _ALIGNMENT


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of x as bytes, each padded with zeros to a multiple of 16: uint8 [rows, padded bytes]."""
    x = aligned(x)
    as_bytes = x.view(torch.uint8)
    if as_bytes.shape[1] == padded_row_bytes(x):
        return as_bytes
    out = torch.zeros(x.shape[0], padded_row_bytes(x), dtype=torch.uint8, device=x.device)
    out[:, :as_bytes.shape[1]] = as_bytes
    return out


def unpad_rows(padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undoes pad_rows for rows with the width and dtype of `like`."""
    return padded[:, :row_bytes(like)].contiguous().view(like.dtype)
