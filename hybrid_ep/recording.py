"""What torch's selective activation checkpointing is not shown.

Its two dispatch modes (torch.utils.checkpoint.create_selective_checkpoint_contexts) count every operation of the
forward and expect the same ones in the recomputed forward, in the same order. What a verb of a buffer makes for
itself does not keep to that: rows lie in the arena where there is room and in other memory where there is none, a
call by a handle has no routing, the first product of a process probes its backend. An operation too many ends the
backward, or gives another operation the result of ours. So these run unseen, and what they make is made again in the
recomputed forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils import _python_dispatch as modes
from torch.utils import checkpoint

# Of torch 2.9 to 2.15; where a release has none of them it is as if no such mode were there.
_RECORDERS = tuple(
    getattr(checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(checkpoint, name)
)


def recorded() -> bool:
    """Whether operations are shown to selective checkpointing now, in a forward or in its recomputation."""
    return any(isinstance(mode, _RECORDERS) for mode in modes._get_current_dispatch_mode_stack())


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, they are shown to whatever else there is, and not to it."""
    if not recorded():
        yield
        return
    every = [modes._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]  # the innermost first
    others = [mode for mode in reversed(every) if not isinstance(mode, _RECORDERS)]
    try:
        for mode in others:
            modes._push_mode(mode)
        yield
    finally:
        for _ in others:
            modes._pop_mode()
        for mode in reversed(every):
            modes._push_mode(mode)
