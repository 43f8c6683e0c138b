"""A program of unusual ends: prints a digest of all results, then leaves its buffers to the interpreter's end."""

from __future__ import annotations

import atexit
import hashlib
import json

import habit_operations as operations
import torch

from hybrid_ep.testing import VirtualWorld


def digest() -> str:
    """Of every result of every rank, on four threads."""
    results = VirtualWorld(2, 2).run(
        lambda rank, group: operations.run(group, operations.problem(rank), lambda name, x: x, reference=False)
    )
    found = hashlib.sha256()
    for mine in results:
        for name, value in mine.items():
            found.update(name.encode())
            if isinstance(value, torch.Tensor):
                value = value.detach().contiguous().view(torch.uint8).flatten().tolist()
            found.update(json.dumps(value).encode())
    return found.hexdigest()


def use(buffer) -> None:
    rows, _, _, handle = buffer.dispatch(torch.ones(2, 64), topk_idx=torch.tensor([[0], [1]]))
    assert torch.equal(buffer.combine(rows, handle=handle)[0], torch.ones(2, 64))


class Owner:
    """Destroys its buffer when it is collected, as late as that may be."""

    def __init__(self, buffer):
        self.buffer, self.itself = buffer, self

    def __del__(self):
        self.buffer.destroy()
        print("last", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(digest(), flush=True)
    kept = VirtualWorld(1, 1).buffers(64, 8, 2, timeout_s=20)[0]
    atexit.register(lambda: (use(kept), print("atexit", flush=True)))
    owner = Owner(VirtualWorld(1, 1).buffers(64, 8, 2, timeout_s=20)[0])
