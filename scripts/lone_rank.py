"""One rank of a world whose other ranks are memory: what a rank of 64 or 72 does, on a device that cannot hold them.

Every rank has its segment, and this one's kernels run as in a whole world. The others' flags stand as if they had
always been ahead, so nobody is waited for, and their count vectors say what `peers` is:
"silent": they have no tokens. Dispatch writes this rank's rows into their segments, combine reads rows back from there;
          what it reads nobody has computed.
"alike":  everybody's routing is this rank's. For route alone: a dispatch would wait for no row, and find none.
Nothing is missing from this rank's part but the wait for others."""

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hybrid_ep import _core  # noqa: E402  (the checkout first, installed or not)
from hybrid_ep.runtime import devices  # noqa: E402  (the checkout first, installed or not)
from hybrid_ep.runtime.plan import PlanMemory  # noqa: E402
from hybrid_ep.runtime.tensors import aligned, row_bytes, view  # noqa: E402
from hybrid_ep.testing import PrivateSegments  # noqa: E402
from hybrid_ep.traffic import exchange, metadata_bytes  # noqa: E402

CPU = torch.device("cpu")
AHEAD = 1 << 62  # of every exchange, operation and chunk
WORDS = _core.BufferShape.count_words


def bytes_at(where: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes]: memory that somebody else owns."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(where), dtype=torch.uint8)

    class Raw:
        __cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (where, False), "version": 2}

    return torch.as_tensor(Raw(), device=device)


def region(shape: _core.BufferShape, own: _core.Segment, name: str, device: torch.device) -> torch.Tensor:
    """uint8: a region of a rank's segment."""
    at, size = {name: (at, size) for name, at, size in shape.regions()}[name]
    return bytes_at(own.address + at, size, device) if size else torch.empty(0, device=device).view(torch.uint8)


def ahead(shape: _core.BufferShape, own: _core.Segment, device: torch.device = CPU) -> None:
    """Others' flags in rank 0's segment: nobody is waited for."""
    for name in (
        "ready_flags",
        "done_flags",
        "counts_rail_flags",
        "counts_node_flags",
        "rail_full_flags",
        "rail_free_flags",
    ):
        entries = region(shape, own, name, device).view(torch.int64).view(-1, shape.flag_stride // 8)
        entries[0 if name.startswith("rail") else 1 :, 0] = AHEAD  # rings have no entry of this rank's own
    partials = region(shape, own, "partial_flags", device).view(torch.int64)
    partials.view(2, shape.num_local_ranks, -1)[:, 1:] = AHEAD  # of payload and of weights, by rank of the node


def _line(at: int) -> int:
    """The begin of the line of memory at `at`, or the next."""
    return -(-at // 128) * 128


def others_land(
    shape: _core.BufferShape,
    own: _core.Segment,
    row_bytes: int,
    scale_bytes: int = 0,
    topk: int = 8,
    weights: bool = True,
    device: torch.device = CPU,
) -> None:
    """Where others want rows of these sizes (layout/landing.h), in any operation: behind the
    metadata of as many rows as they might have."""
    lines = region(shape, own, "ready_flags", device).view(-1, shape.flag_stride)[1:]
    longs, words = lines.view(torch.int64), lines.view(torch.int32)
    metadata = metadata_bytes(topk, shape.num_local_ranks, weights)
    longs[:, 2] = _line(shape.recv_rows * metadata)
    longs[:, 3] = _line(longs[0, 2].item() + shape.recv_rows * row_bytes) if len(longs) else 0
    words[:, 9], words[:, 10], words[:, 11] = shape.recv_rows, row_bytes, scale_bytes
    longs[:, 6], words[:, 14] = AHEAD, metadata


def others_count(
    shape: _core.BufferShape, own: _core.Segment, peers: str = "silent", device: torch.device = CPU
) -> None:
    """Writes the others' count vectors, once rank 0's own are there: of any exchange, in the parity that it had."""
    num_ranks = shape.num_nodes * shape.num_local_ranks
    vectors = region(shape, own, "counts", device).view(torch.int32).view(2, num_ranks, -1)
    mine = vectors[:, 0].clone()
    mine = mine[mine[:, WORDS["topk"]].argmax()]  # the word topk, which only the parity in use has
    if peers == "silent":
        mine = mine.clone()
        mine[WORDS["num_tokens"]] = 0
        mine[WORDS["header"] :] = 0
    vectors[:, 1:] = mine


class LoneRank:
    """Rank 0 of num_nodes x num_local_ranks, with `tokens` tokens of `topk` choices at most."""

    def __init__(
        self,
        num_nodes: int,
        num_local_ranks: int,
        num_experts: int,
        tokens: int,
        topk: int,
        *,
        hidden: int = 8,
        scale_bytes: int = 0,
        peers: str = "silent",
        executor: str = "cuda",
    ):
        self.num_nodes, self.num_local_ranks, self.num_experts = num_nodes, num_local_ranks, num_experts
        self.num_ranks, self.tokens, self.topk, self.peers = num_nodes * num_local_ranks, tokens, topk, peers
        self.device = devices.current() if devices.is_cuda(executor) else torch.device("cpu")
        self.shape = _core.BufferShape(
            num_nodes=num_nodes,
            num_local_ranks=num_local_ranks,
            num_experts=num_experts,
            max_tokens=tokens,
            max_topk=topk,
            row_bytes=2 * hidden,
            scale_bytes=scale_bytes,
            partial_row_bytes=2 * hidden,
            recv_rows=tokens * (self.num_ranks if peers == "alike" else 1),
        )
        made = PrivateSegments()
        if self.device.type == "cuda":
            devices.enter(self.device)
            made = made.on_device()
        self.segments = [made.create(str(r), self.shape.total_bytes) for r in range(self.num_ranks)]
        self.engine = _core.Engine(0, self.shape, self.segments, 20.0, executor)
        self._enter()
        ahead(self.shape, self.segments[0], self.device)
        self._told, self._sizes = False, (0, 0)

    def _enter(self) -> None:
        if self.device.type == "cuda":
            self.engine.set_stream(devices.enter(self.device))

    @property
    def vector_bytes(self) -> int:
        """Of one rank's counts."""
        return region(self.shape, self.segments[0], "counts", self.device).numel() // (2 * self.num_ranks)

    def route(self, idx: torch.Tensor, weights: torch.Tensor):
        """The plan of topk_idx [tokens, topk] with weights fp32; waits for its counts, as a blocking dispatch does."""
        self._enter()
        idx, weights = aligned(idx), aligned(weights)
        if not self._told:
            self._place(idx, weights)  # the others' headers are empty: nothing is placed, but our counts are written
            others_count(self.shape, self.segments[0], self.peers, self.device)
            self._told = True
        placed = self._place(idx, weights)
        assert placed.placed, placed.headers
        return placed.plan(view("learned", PlanMemory.of(placed.learned, self.device).block))

    def _place(self, idx: torch.Tensor, weights: torch.Tensor):
        memory = PlanMemory.of(self.engine.plan_memory(len(idx), self.topk, worst_case=False), self.device)
        header = _core.CallHeader(num_tokens=len(idx), topk=self.topk, num_experts=self.num_experts)
        return self.engine.place(
            _core.PlaceRequest(
                header, topk_idx=idx, weights=weights, topk_in=idx.shape[1], memory=memory.block, count=True
            )
        )

    def dispatch(self, plan, x: torch.Tensor, scales: torch.Tensor | None, num_sms: int, permute_sms: int = 0):
        """Permuted rows of this rank; plan: of route. scales: rows of a multiple of 16 bytes."""
        self._enter()
        sizes = row_bytes(x), 0 if scales is None else row_bytes(scales)
        if sizes != self._sizes:
            others_land(self.shape, self.segments[0], *sizes, self.topk, device=self.device)
            self._sizes = sizes
        rows = plan.num_permuted_rows
        out = torch.empty(rows, x.shape[1], dtype=x.dtype, device=self.device)
        out_scales = None if scales is None else scales.new_empty(rows, scales.shape[1])
        out_weights = torch.empty(rows, device=self.device)
        request = _core.DispatchRequest(
            x=x,
            scale=scales,
            routed_weights=True,
            out_x=out,
            out_scale=out_scales,
            out_weights=out_weights,
            row_bytes=sizes[0],
            scale_bytes=sizes[1],
            permuted=rows,
            launch=_core.LaunchShape(num_blocks=num_sms, local_blocks=permute_sms or None),
        )
        self.engine.dispatch(plan, request)
        return out, out_weights, out_scales

    def combine(self, plan, rows: torch.Tensor, num_sms: int):
        """Sums of this rank's tokens; plan: of route, dispatched. rows: as many as dispatch returned."""
        self._enter()
        out = torch.empty(plan.num_tokens, rows.shape[1], dtype=rows.dtype, device=self.device)
        launch = _core.LaunchShape(num_blocks=num_sms)
        request = _core.CombineRequest(x=rows, hidden=rows.shape[1], out_x=out, permuted=True, launch=launch)
        self.engine.combine(plan, request)
        return out

    def exchanged(self) -> dict[str, int]:
        """Bytes of one exchange of counts: what this rank sends, what it receives; and what all-gathered routing maps
        of one byte for a token and expert would bring it."""
        others = self.num_ranks - 1
        return {
            "sent": exchange(self.num_nodes, self.num_local_ranks, self.num_experts)["count_bytes"],
            "received": others * self.vector_bytes,
            "received_as_maps": others * self.tokens * self.num_experts,
        }
