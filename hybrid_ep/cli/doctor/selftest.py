"""Done for real: grouped GEMMs with empty experts, and a dispatch and combine inside this process, on the host between
four ranks and on the GPU by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_ep.cli.doctor.finding import FAIL, OK, SKIP, WARN, Found, rebuild_remedy
from hybrid_ep.cli.outputs import count

if TYPE_CHECKING:
    from hybrid_ep.testing import VirtualGroup

LOOPBACK_TIMEOUT_S = 20.0


def grouped_gemm() -> Found:
    import torch

    from hybrid_ep.moe.precisions import PRECISIONS
    from hybrid_ep.moe.probing import examine as probe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable = 0
    for precision, backend in ((name, machine) for name, made in PRECISIONS.items() for machine in made.values()):
        if backend.name in ("te", "triton") and (device.type == "cpu" or backend.absence()):
            continue  # made for GPUs, and not of every installation
        found = probe(backend, device, torch.bfloat16, precision)
        text = f"{backend.name}, {found.dtype} on {found.device}: {found.found}"
        text += "" if found.remedy == "none" else f"; remedy {found.remedy}"
        usable += found.remedy != "unusable"
        if found.remedy == "unusable":
            yield WARN, text, "grouped_mm uses another backend; a newer torch may lift this"
        else:
            yield OK, text + (" (grouped_mm applies it by itself)" if found.remedy != "none" else "")
    if not usable:
        yield FAIL, "no backend multiplies groups correctly here", "install torch >= 2.10"


def loopback() -> Found:
    """On the host, whatever HYBRID_EP_EXECUTOR says: its tensors are the host's."""
    import torch

    yield from exchange(2, 2, torch.device("cpu"), "host")


def gpu_loopback() -> Found:
    """On the current GPU, by a single rank: several on one device would need a hardware queue each."""
    import torch

    from hybrid_ep.runtime import devices

    if not torch.cuda.is_available():
        yield SKIP, "torch sees no GPU"
        return
    try:
        device = devices.current()
    except ValueError as error:
        yield WARN, f"skipped: {error}", "the line 'cuda library' has the remedy"
        return
    yield from exchange(1, 1, device, "cuda")


def exchange(num_nodes: int, num_local_ranks: int, device: Any, executor: str) -> Found:
    """Integers, so that every sum is exact: each token must come back as often as it was sent."""
    import torch

    from hybrid_ep import HybridEPBuffer
    from hybrid_ep.testing import VirtualWorld

    experts, tokens, hidden, topk = 8, 64, 256, 3
    world = VirtualWorld(num_nodes, num_local_ranks)
    ranks = world.size

    def body(rank: int, group: VirtualGroup) -> bool:
        g = torch.Generator().manual_seed(rank)
        x = torch.randint(-8, 9, (tokens + rank, hidden), generator=g, dtype=torch.int64, device="cpu")
        x = x.bfloat16().to(device)
        idx = torch.rand(tokens + rank, experts, generator=g, dtype=torch.float32, device="cpu").argsort(1)
        idx = idx[:, :topk].to(device)
        # tuning: a file of the environment is for other shapes
        with HybridEPBuffer(
            group,
            hidden,
            tokens + ranks,
            experts // ranks,
            timeout_s=LOOPBACK_TIMEOUT_S,
            num_of_hybrid_ep_ranks_per_nvlink_domain=num_local_ranks,
            executor=executor,
            tuning="",
        ) as buffer:
            rows, _, _, _, handle = buffer.dispatch_with_permute(
                hidden=x, topk_idx=idx, num_of_experts=experts, pad_multiple=8, pad_empty_experts=True
            )
            out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
            return torch.equal(out, x * topk)

    wrong = [rank for rank, right in enumerate(world.run(body)) if not right]
    who = "by one rank" if ranks == 1 else f"between {ranks} ranks ({count(num_nodes, 'node')} x {num_local_ranks})"
    text = f"dispatch and combine {who} in this process, executor {executor} on {device}"
    if wrong:
        yield FAIL, f"{text}: wrong sums on ranks {wrong}", rebuild_remedy()
    else:
        yield OK, f"{text}: every sum exact"
