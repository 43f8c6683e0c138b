"""Megatron-Core trains through hybrid_ep: one name replaced, no fork, no edit in Megatron.

Three functions are the whole interface: `apply()` installs the token dispatcher, `revert()` restores Megatron
exactly, `status()` tells what was found and what is patched. `python -m megatron_patches SCRIPT ARGS...`
runs any Megatron-LM script with the `--hybrid-ep` flags added. `docs/megatron.md` is the guide.

Importing this package imports neither Megatron nor torch: order of imports stays the caller's choice.
"""

from __future__ import annotations

from megatron_patches.hooks import HookError
from megatron_patches.patch import Status, apply, revert, status

__all__ = ["HookError", "Status", "apply", "release_buffers", "revert", "status"]


def release_buffers() -> None:
    """Free every shared buffer; the next dispatch makes a new one, so all ranks of a group must do the same.

    Call it before `parallel_state.destroy_model_parallel()`: buffers belong to process groups.
    """
    from megatron_patches import buffers

    buffers.release()
