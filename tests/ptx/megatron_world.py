"""Megatron-Core's training on CPUs whose dispatch and combine are the CUDA library's, on the PTX machine. Megatron and
its tensors stay on the CPU, with the pieces of megatron_patches.cpu; a buffer carries what it is given to the machine's
memory, runs there and carries the results back. Only within its calls is torch.cuda the machine's."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests/ptx", "tests/gpu", "tests/python", "scripts"):
    sys.path.insert(0, str(ROOT / folder))


def _attributes(torch):
    return {owner: dict(vars(owner)) for owner in (torch, torch.cuda, torch.Tensor, threading.Thread)}


def install(seed: int, races: bool):
    """(the machine's library, a context manager in which torch.cuda is the machine's)."""
    import torch
    import torch_cuda
    from ptx_machine import Choices

    from megatron_patches import cpu

    before = _attributes(torch)
    library = torch_cuda.install(Choices(seed=seed, races=races))
    after = {
        owner: {name: value for name, value in now.items() if before[owner].get(name) is not value}
        for owner, now in _attributes(torch).items()
    }
    # And torch's own functions where megatron_patches.cpu has put some that make CPU tensors whatever is asked for.
    after[torch].update(
        {
            name: value.__wrapped__
            for name, value in before[torch].items()
            if isinstance(value, types.FunctionType) and value.__code__.co_filename == cpu.__file__
        }
    )

    def put(which):
        for owner, names in after.items():
            for name in names:
                if name in which[owner]:
                    setattr(owner, name, which[owner][name])
                else:
                    delattr(owner, name)

    put(before)

    @contextlib.contextmanager
    def on_machine():
        put(after)
        try:
            with library.modes():
                yield
        finally:
            put(before)

    return library, on_machine


def buffer_class(on_machine):
    """With the interface of HybridEPBuffer: takes and returns CPU tensors."""
    from gpu_world import OnDevice

    class Buffer(OnDevice):
        def __init__(self, **options):
            import torch

            from hybrid_ep import HybridEPBuffer

            with on_machine():
                super().__init__(HybridEPBuffer(**options, executor="cuda"), torch.cuda.Stream(), 0, 0)

        def _verb(self, method):
            moved = super()._verb(method)

            def call(*args, **kwargs):
                with on_machine():
                    return moved(*args, **kwargs)

            return call

    return Buffer


def losses(on: str, seed: int, steps: int, races: bool = False) -> dict:
    """Of one rank of a world that parity_world started: a tiny GPT whose two layers have experts. on: "host", the
    host's executor; "machine", the CUDA library's."""
    import os

    import parity_worker

    import megatron_patches

    launches = 0
    if on == "machine":
        library, on_machine = install(seed + int(os.environ["RANK"]), races)
        apply, made = megatron_patches.apply, buffer_class(on_machine)
        megatron_patches.apply = lambda *args, **options: apply(*args, buffer_class=made, **options)
    record = parity_worker.run_cases([parity_worker.Case("plain", "token_dispatcher", 2, steps)])["records"][0]
    if on == "machine":
        assert not library.reports(), library.reports()
        launches = library.counts()["launches"]
    return {"launches": launches, **{name: record[name] for name in ("loss", "grad_norm", "expert_output")}}
