"""Types of the compiled core. Written by scripts/core_stubs.py: change csrc/bindings, then run it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
import torch
from numpy.typing import NDArray

class ArenaBlock:
    """Registered memory that is lent to a result."""

    no_room: ClassVar[str]

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class BufferShape:
    """What a registered buffer must hold; layout/buffer.h turns it into offsets."""

    count_words: ClassVar[dict[str, int]]
    default_chunk_tokens: ClassVar[int]
    flag_stride: ClassVar[int]
    most_exchange_blocks: ClassVar[int]
    sum_tile_elements: ClassVar[int]

    def __init__(self, *, num_nodes: int, num_local_ranks: int, num_experts: int, max_tokens: int = 1,
                 max_topk: int = 1, row_bytes: int = 16, scale_bytes: int = 0, recv_rows: int = 1,
                 partial_row_bytes: int = 16, chunk_tokens: int = 16, rail_slots: int | None = None,
                 arena_bytes: int = 0, arena_apart: bool = False, latency_tokens: int = 0,
                 clones: MicrobatchShape | None = None, spares: SpareShape | None = None) -> None: ...

    @property
    def arena_apart(self) -> bool: ...

    @property
    def arena_bytes(self) -> int: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def latency_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_topk(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def num_local_ranks(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def partial_row_bytes(self) -> int: ...

    @property
    def rail_slots(self) -> int: ...

    @staticmethod
    def rail_slots_of(num_nodes: int) -> int:
        """Chunks in flight per rail peer where nobody says how many."""

    @property
    def recv_rows(self) -> int: ...

    def regions(self) -> list[tuple[str, int, int]]:
        """(name, offset, bytes) of every region of a rank's segment, in order; an arena apart comes behind its end."""

    @property
    def row_bytes(self) -> int: ...

    @property
    def scale_bytes(self) -> int: ...

    @property
    def segment_bytes(self) -> int:
        """Of a rank's segment: the total, less an arena that lies apart."""

    @property
    def total_bytes(self) -> int: ...


class CallHeader:
    """What a rank says of its call to all others; see layout/headers.h."""

    def __init__(self, *, num_tokens: int, topk: int, budget: int | None = None, want_tokens: int = 0,
                 want_hidden: int = 0, num_experts: int, hidden: int = 0, scale_width: int = 0,
                 pad_multiple: int = 1, chunk_dispatch: int = 0, chunk_combine: int = 0, dtype: int = 0,
                 scale_dtype: int = 0, permute: bool = False, non_blocking: bool = False, routing_map: bool = False,
                 weights: bool = False, pad_empty_experts: bool = False) -> None:
        """dtype, scale_dtype: codes of TensorView.elements. ValueError for a number that its word cannot hold."""

    @property
    def budget(self) -> int | None: ...

    @property
    def chunk_combine(self) -> int: ...

    @property
    def chunk_dispatch(self) -> int: ...

    @property
    def dtype(self) -> int: ...

    @property
    def excess(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def non_blocking(self) -> bool: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def pad_empty_experts(self) -> bool: ...

    @property
    def pad_multiple(self) -> int: ...

    @property
    def permute(self) -> bool: ...

    @property
    def routing_map(self) -> bool: ...

    @property
    def scale_dtype(self) -> int: ...

    @property
    def scale_width(self) -> int: ...

    @property
    def topk(self) -> int: ...

    @property
    def weights(self) -> bool: ...


class CombineRequest:
    """Rows on their way back, for Engine.combine."""

    def __init__(self, *, x: torch.Tensor, hidden: int, weights: torch.Tensor | None = None, out_x: torch.Tensor,
                 out_weights: torch.Tensor | None = None, permuted: bool, multiply: bool = False,
                 fp32_partials: bool = False, launch: LaunchShape) -> None: ...

    @staticmethod
    def of(x: torch.Tensor, hidden: int, weights: torch.Tensor | None, out_x: torch.Tensor,
           out_weights: torch.Tensor | None, permuted: bool, multiply: bool, fp32_partials: bool,
           launch: LaunchShape) -> CombineRequest:
        """All of them, by position."""

    @property
    def out_weights(self) -> TensorView | None: ...

    @property
    def out_x(self) -> TensorView: ...

    @property
    def weights(self) -> TensorView | None: ...

    @property
    def x(self) -> TensorView: ...


class DispatchRequest:
    """The rows of a plan on their way, for Engine.dispatch."""

    def __init__(self, *, x: torch.Tensor, scale: torch.Tensor | None = None, weights: torch.Tensor | None = None,
                 routed_weights: bool = False, out_x: torch.Tensor, out_scale: torch.Tensor | None = None,
                 out_weights: torch.Tensor | None = None, row_bytes: int, scale_bytes: int = 0,
                 permuted: int | None = None, launch: LaunchShape, looked_at: bool = False) -> None:
        """weights: in plan order; routed_weights: those that the plan's routing brought. permuted: rows of the
        permuted result; None: receive order."""

    @staticmethod
    def of(x: torch.Tensor, scale: torch.Tensor | None, weights: torch.Tensor | None, routed_weights: bool,
           out_x: torch.Tensor, out_scale: torch.Tensor | None, out_weights: torch.Tensor | None, row_bytes: int,
           scale_bytes: int, permuted: int | None, launch: LaunchShape, looked_at: bool) -> DispatchRequest:
        """All of them, by position."""

    @property
    def out_scale(self) -> TensorView | None: ...

    @property
    def out_weights(self) -> TensorView | None: ...

    @property
    def out_x(self) -> TensorView: ...

    @property
    def scale(self) -> TensorView | None: ...

    @property
    def weights(self) -> TensorView | None: ...

    @property
    def x(self) -> TensorView: ...


class Engine:
    """One rank's registered buffer and the operations on it; see runtime/engine.h."""

    def __init__(self, rank: int, shape: BufferShape, segments: Sequence[Segment], timeout_s: float,
                 executor: str = 'host', seed: int = 0, arenas: Sequence[Segment] = []) -> None: ...

    @property
    def arena_bytes_lent(self) -> int: ...

    @property
    def arena_gap(self) -> int:
        """Bytes of the largest block to be had."""

    def await_weights(self, slot_expert: torch.Tensor, columns: torch.Tensor, experts: torch.Tensor | None,
                      num_blocks: int) -> None:
        """Engine::await_weights; experts: None."""

    def collect_gradients(self, slot_expert: torch.Tensor, columns: torch.Tensor, experts: torch.Tensor | None,
                          num_blocks: int) -> None:
        """Engine::collect_gradients; experts: addresses of fp32 sums."""

    def combine(self, plan: Plan, request: CombineRequest) -> None: ...

    def dispatch(self, plan: Plan, request: DispatchRequest) -> None: ...

    def latency_combine(self, plan: Plan, request: CombineRequest) -> None: ...

    def latency_dispatch(self, plan: Plan, request: DispatchRequest) -> None: ...

    def latency_route(self, place: PlaceRequest, request: DispatchRequest) -> Plan:
        """The latency path: routes and dispatches in one launch. The plan lies in the memory of `place`."""

    def lend(self, rows: int, columns: int, element: int) -> torch.Tensor | None:
        """A tensor in the arena, uninitialised; None: no gap holds it. Where exchanges_tensors()."""

    @property
    def most_blocks(self) -> int:
        """Of a launch: they are resident together."""

    @property
    def num_launches(self) -> int:
        """Kernels launched by this engine."""

    def offer_arena(self, offered: bool) -> None:
        """To hep_pool_allocate in this thread, until False; see runtime/arena_pool.h."""

    def place(self, request: PlaceRequest) -> Placed:
        """A plan that lies in the request's memory."""

    def plan_clones(self, topk_idx: torch.Tensor | None, routing_map: torch.Tensor | None, num_tokens: int,
                    topk: int, columns: torch.Tensor, owners_digest: int, out: torch.Tensor,
                    out_columns: torch.Tensor | None, slot_expert: torch.Tensor, slots: torch.Tensor,
                    counts: torch.Tensor, numbers: torch.Tensor, replayed: bool, num_blocks: int) -> None:
        """Engine::balance. topk_idx int64 [T, topk] or routing_map bool [T, E] over logical experts; columns int64
        [E]; written: out, of the same kind over physical slots; out_columns int64 [T, E] or None; slot_expert int32
        [R, S], slots int64 [3, R, S] (tokens, take, first), counts int64 [R, E], numbers int64 [4], which replayed
        reads instead."""

    def plan_memory(self, num_tokens: int, topk: int, worst_case: bool) -> PlanMemory:
        """Offsets in the memory of a plan; worst_case: with room for what its dispatch learns."""

    def poison(self) -> None:
        """For tests, between operations: 0xFF into the rings and receive rows."""

    def push_weights(self, slot_expert: torch.Tensor, columns: torch.Tensor, experts: torch.Tensor | None,
                     num_blocks: int) -> None:
        """Engine::push_weights. slot_expert int32 [R, S], columns int64 [E]; experts int64 [owners, matrices]:
        addresses of this rank's weights."""

    def require_blocks(self, name: str, blocks: int) -> None:
        """ValueError unless a launch may have so many blocks."""

    def require_spares(self, num_blocks: int) -> None:
        """ValueError where a push of so many blocks cannot be launched."""

    def reset_traffic(self) -> None: ...

    def set_stream(self, stream: int) -> None:
        """CUDA: the stream of the next operations, in order with those before."""

    def spare_memory(self, gradients: bool) -> ArenaBlock:
        """The registered spare slots, weights or gradients, for as long as this lives."""

    def take(self, num_bytes: int) -> ArenaBlock | None:
        """Bytes of the arena, aligned to 128; None: no gap holds so many."""

    def traffic(self) -> dict[str, int]: ...

    @staticmethod
    def unlaunched(rank: int, shape: BufferShape, segments: Sequence[Segment], timeout_s: float,
                   arenas: Sequence[Segment] = []) -> Engine:
        """For measuring the host's own work: launches nothing, moves nothing; see runtime/unlaunched.h."""

    def waited_ns(self) -> dict[str, list[int]]:
        """For each kind of operation, the nanoseconds that it waited for each rank."""


class HeaderRanges:
    """The headers of all ranks together."""

    @property
    def excess(self) -> bool: ...

    @property
    def least_topk(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...

    @property
    def most_topk(self) -> int: ...

    @property
    def most_want_hidden(self) -> int: ...

    @property
    def most_want_tokens(self) -> int: ...


class LaunchShape:
    """How an operation is launched: what calls of one kind have in common."""

    def __init__(self, *, num_blocks: int = 1, local_blocks: int | None = None, chunk_tokens: int | None = None,
                 landing: str | None = None) -> None:
        """local_blocks: for local work, behind num_blocks that feed links (None: these do it). chunk_tokens: of a
        rail message, the same on all ranks (None: what ring slots hold). landing: where permuted rows land in the
        arena, 'all' in the row of each of a token's pairs on a rank, 'first' in that of the first, which is copied
        there (None: all on hosts, first on GPUs)."""


class MicrobatchPlanner:
    """Clones and quotas of one micro-batch."""

    def __init__(self, shape: MicrobatchShape) -> None: ...

    def plan(self, counts: NDArray[Any], owner: NDArray[Any]) -> tuple[NDArray[numpy.int32], NDArray[numpy.int64],
             Any]:
        """counts int64 [R, E] or [L, R, E], owner int32 [E]: (slot_expert, slot_tokens, target or targets)."""

    def plan_of_rank(self, counts: NDArray[Any], owner: NDArray[Any], columns: NDArray[Any],
                     rank: int) -> tuple[NDArray[numpy.int32], NDArray[numpy.int64], int, NDArray[numpy.int64],
                     NDArray[numpy.int64]]:
        """counts int64 [R, E], owner int32 [E], columns int64 [E]: (slot_expert, slot_tokens, target, redirects
        int64 [n, 3], pushes int64 [m, 5]); RankPart of hybrid_ep/balance/microbatch.py."""


class MicrobatchShape:
    """What does not change between micro-batches; balance/microbatch.h."""

    def __init__(self, *, num_ranks: int, num_experts: int, spare_slots: int, num_nodes: int, within_node: bool,
                 near: bool, epsilon_ppm: int, skip_below_ppm: int, min_chunk: int, instance_cost: int, tile: int,
                 fan_out: int, search_nodes: int, strategy: str) -> None: ...


class NvshmemWorld:
    """NVSHMEM in this process; see runtime/nvshmem_world.h."""

    def __init__(self, host_library: str, kernels: str) -> None: ...

    def allocate(self, num_bytes: int) -> int: ...

    @property
    def built_with(self) -> tuple[int, int, int]: ...

    def free(self, address: int) -> None: ...

    def own(self, address: int, num_bytes: int) -> Segment: ...

    def peer(self, address: int, num_bytes: int, pe: int) -> Segment | None:
        """PE's twin as a Segment, None where only the NIC reaches it."""

    def quiet(self) -> None:
        """Until all verbs of this PE's kernels so far are complete at their targets."""

    @property
    def running(self) -> tuple[int, int, int]: ...

    def start(self, unique_id: bytes, pe: int, num_pes: int, device: int = -1) -> None: ...

    @property
    def started(self) -> bool: ...

    def stop(self) -> None: ...

    def unique_id(self) -> bytes: ...


class PlaceRequest:
    """A routed call, for Engine.place."""

    def __init__(self, header: CallHeader, *, topk_idx: torch.Tensor | None = None,
                 routing_map: torch.Tensor | None = None, weights: torch.Tensor | None = None, memory: torch.Tensor,
                 topk_in: int = 0, count: bool, num_blocks: int = 1, looked_at: bool = False) -> None:
        """Of topk_idx int64 [T, topk_in] and routing_map bool [T, E] one; weights fp32 of its shape; memory: int64,
        plan_memory() bytes. count: wait for the counts, else the host never learns them. num_blocks: of the
        exchange kernel."""

    @property
    def memory(self) -> TensorView: ...

    @staticmethod
    def of(header: CallHeader, topk_idx: torch.Tensor | None, routing_map: torch.Tensor | None,
           weights: torch.Tensor | None, memory: torch.Tensor, topk_in: int, count: bool, num_blocks: int,
           looked_at: bool) -> PlaceRequest:
        """All of them, by position."""

    @property
    def routing_map(self) -> TensorView | None: ...

    @property
    def topk_idx(self) -> TensorView | None: ...

    @property
    def weights(self) -> TensorView | None: ...


class Placed:
    """A call that the exchange kernel was asked to place."""

    @property
    def any_dropped(self) -> bool:
        """Whether a budget of some rank dropped pairs."""

    @property
    def complete(self) -> Plan:
        """The plan, when nobody waited for counts."""

    @property
    def differing(self) -> list[str]:
        """Names of what the headers must say alike and do not."""

    @property
    def from_nodes(self) -> list[int]: ...

    @property
    def headers(self) -> list[CallHeader]:
        """By rank."""

    @property
    def learned(self) -> PlanMemory: ...

    @property
    def most_recv_rows(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...

    @property
    def num_dropped_per_rank(self) -> list[int]: ...

    @property
    def placed(self) -> bool: ...

    def plan(self, memory: TensorView) -> Plan:
        """The plan, with learned.total bytes, 128-byte aligned, for what its dispatch learns."""

    @property
    def ranges(self) -> HeaderRanges: ...

    @property
    def recv_rows(self) -> list[int]: ...

    def settled(self, topk: int, most_tokens: int, most_hidden: int, recv_rows: int) -> bool:
        """Whether all ranks made one kind of call, with that topk, and fit: rows are placed, none is dropped or
        more than recv_rows, and no rank has or wants more than most_tokens and most_hidden."""


class Plan:
    """One routing decision, ready for dispatch and combine."""

    @property
    def from_nodes(self) -> list[int]: ...

    @property
    def has_holes(self) -> bool: ...

    def maps(self, *, memory: TensorView, sparse_to_dense: TensorView, rail_to_node: TensorView,
             node_to_rail: TensorView, local_routing: TensorView, permuted_rows: TensorView | None = None,
             source_ends: TensorView | None = None) -> None: ...

    @property
    def max_recv_rows(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...

    @property
    def num_dropped(self) -> int: ...

    @property
    def num_permuted_rows(self) -> int: ...

    def num_rail_tokens(self, node: int) -> int: ...

    @property
    def num_recv_rows(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def overflow(self) -> bool: ...

    def padded_tensor(self) -> torch.Tensor:
        """padded_tokens_per_expert as a tensor. Where exchanges_tensors()."""

    @property
    def padded_tokens_per_expert(self) -> bytearray:
        """int64 [num_local_experts], a copy."""

    @property
    def tokens_per_expert(self) -> list[int]: ...

    @property
    def topk(self) -> int: ...

    @property
    def weight_stride(self) -> int: ...

    def weights_from_dense(self, *, pair_expert: TensorView, probs: TensorView, out: TensorView) -> None: ...

    def weights_from_topk(self, *, pair_expert: TensorView, topk_idx: TensorView, topk: int,
                          topk_weights: TensorView, out: TensorView) -> None: ...

    def weights_to_dense(self, *, pair_expert: TensorView, weights: TensorView, out: TensorView) -> None: ...


class PlanMemory:
    """Where a plan's arrays lie in its memory, in bytes; see layout/plan_memory.h."""

    @property
    def dsts_at(self) -> int: ...

    @property
    def max_dsts(self) -> int: ...

    @property
    def node_pos(self) -> int: ...

    @property
    def numbers(self) -> int: ...

    @property
    def padded_tokens_per_expert(self) -> int: ...

    @property
    def pair_expert(self) -> int: ...

    @property
    def pairs_at(self) -> int: ...

    @property
    def rail_record_stride(self) -> int: ...

    @property
    def rail_records(self) -> int: ...

    @property
    def record_bytes(self) -> int: ...

    @property
    def records(self) -> int: ...

    @property
    def row_records(self) -> int: ...

    @property
    def tokens_per_expert(self) -> int: ...

    @property
    def total(self) -> int: ...


class Segment:
    """Memory that peers can map."""

    @property
    def address(self) -> int: ...

    @staticmethod
    def attach(name: str, num_bytes: int) -> Segment: ...

    @staticmethod
    def create(name: str, num_bytes: int) -> Segment: ...

    @property
    def num_bytes(self) -> int: ...

    def observe(self, offset: int) -> int:
        """The counter there; what came before it is seen, too."""

    @staticmethod
    def private(num_bytes: int) -> Segment: ...

    def publish(self, offset: int, value: int) -> None:
        """Store a counter behind all before it."""

    def pull(self, sources: Sequence[Segment], pieces: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy pieces (place in sources, from, to, bytes) in their order, without the interpreter's lock."""

    def unlink(self) -> None: ...


class SpareShape:
    """Registered spare slots for weights of clones; see layout/spare_shape.h."""

    def __init__(self, *, spare_slots: int, num_owners: int, element_bytes: int, elements: Sequence[int],
                 rail_chunk_bytes: int = 32768, gradients: bool = True) -> None:
        """elements: of each matrix of an expert. rail_chunk_bytes: 0 where clones stay on their owners' nodes.
        gradients: False has no memory for them."""

    def gradients_at(self, matrix: int) -> int:
        """The same of spare_gradients."""

    def weights_at(self, matrix: int) -> int:
        """Where its stack begins in spare_weights."""


class TensorView:
    """A tensor on its way into the core."""

    elements: ClassVar[dict[str, int]]

    def __init__(self, address: int, num_bytes: int, element: int, device: str, tensor: Any = None) -> None:
        """num_bytes of memory at `address` on a 'cpu' or 'cuda' device; element: a code of `elements`; tensor: what
        must live as long as the view. ValueError for a null address with bytes."""

    @property
    def address(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def element(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> TensorView:
        """All bytes of a tensor. ValueError, naming it, when they are not in one piece of memory of its own."""

    @property
    def tensor(self) -> Any: ...


class cuda:
    """The CUDA library, loaded at run time. A module; its names are read as those of a class."""

    class CopyStream:
        """A stream of the current device on which nothing but copies run."""

        def __init__(self) -> None: ...

        def pull(self, to: int, num_bytes: int, sources: Sequence[Segment],
                 pieces: Sequence[tuple[int, int, int, int]]) -> None:
            """Copy pieces (place in sources, from, to, bytes) of device memory into num_bytes at the address `to`, in
            their order and behind what the stream holds; waits for none."""

        @property
        def stream(self) -> int:
            """For events."""

    class CounterReader:
        """Reads counters of device memory for the host; for any thread."""

        def __init__(self) -> None: ...

        def observe(self, segment: Segment, offset: int, patience_s: float) -> int | None:
            """The counter there; what came before it is seen, too. None: the copy engines had no turn by then."""

    class DeviceMemory:
        """Device memory that peers can map."""

        @staticmethod
        def attach(kind: str, num_bytes: int, handle: bytes = b'', fd: int = -1) -> cuda.DeviceMemory: ...

        @staticmethod
        def create(kind: str, num_bytes: int) -> cuda.DeviceMemory:
            """Zeroed memory of the current device. kind: 'none' (this process), 'fabric', 'file' or 'ipc'."""

        def segment(self) -> Segment:
            """The same memory as a Segment of an Engine."""

        def share(self) -> tuple[bytes, int]:
            """(handle bytes, file descriptor or -1) by which a peer attaches."""

    @staticmethod
    def load(path: str) -> dict[str, Any]:
        """Loads the library and adds its executors; {'devices': [...], 'why_none': str}. RuntimeError when it is
        not this build's."""

    @staticmethod
    def offer_small_memory(offered: bool) -> None:
        """To hep_pool_allocate in this thread, until False: memory of this process, 2 MiB at once at most; see
        runtime/arena_pool.h."""

    @staticmethod
    def publish(segment: Segment, offset: int, value: int, stream: int) -> None:
        """Store a counter behind all that the stream holds."""

    @staticmethod
    def run_at_once(streams: Sequence[int], patience_s: float) -> bool:
        """Whether kernels on these streams of the current device run at once: they wait for one another, for so
        long."""

    @staticmethod
    def set_device(ordinal: int) -> None: ...


def clones_fit(load: NDArray[Any], owner: NDArray[Any], num_ranks: int, spare_slots: int) -> int:
    """load int64 [E], owner int32 [E]: tokens of the fullest rank that no plan beats; bounds.clones_fit."""


def exchange_tensors(exchange: bool) -> None:
    """For tests: False does as with a torch that has no such table."""


def exchanges_tensors() -> bool:
    """Whether tensors are read and made through torch's table of C functions, which torch 2.10 and later have."""


def executors() -> list[str]:
    """Names of the executors in this build."""


def host_words(num_words: int) -> torch.Tensor:
    """An int64 tensor of the host, uninitialised, whose address is a multiple of 128. Where
    exchanges_tensors()."""


def improve_layers(*, load: NDArray[Any], current: NDArray[Any], fresh: NDArray[Any], num_layers: int,
                   num_experts: int, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int,
                   target_ppm: int, max_moves: int) -> NDArray[numpy.int32]:
    """From a placement in force, int32 [L, slots], measured against a fresh one."""


def part_of_rank(shape: MicrobatchShape, counts: NDArray[Any], owner: NDArray[Any], columns: NDArray[Any],
                 slot_expert: NDArray[Any], slot_tokens: NDArray[Any], rank: int) -> tuple[NDArray[numpy.int64],
                 NDArray[numpy.int64]]:
    """(redirects int64 [n, 3], pushes int64 [m, 5]) of a plan, as in plan_of_rank."""


def place_layers(*, load: NDArray[Any], single: NDArray[Any], group: NDArray[Any], num_layers: int,
                 num_experts: int, num_slots: int, num_groups: int, num_nodes: int,
                 num_ranks: int) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.int32]]:
    """load int64 [L, E]; single and group the same in float32, by expert and by group of experts: (our
    placement, EPLB's, int32 [L, slots] each, and by layer: below 0 where ours is lower, above 0 where EPLB's
    is)."""


def share_of_source(shape: MicrobatchShape, counts: NDArray[Any], owner: NDArray[Any],
                    slot_expert: NDArray[Any], slot_tokens: NDArray[Any],
                    source: int) -> NDArray[numpy.int64]: ...


def signature(*args: Any) -> Any:
    """A key, bytes, that calls with arguments alike have in common: tensors, integers, flags and None. None
    where an argument is something else, or a tensor out of the ordinary; and where tensors are not exchanged."""


def sim_cost_fields() -> list[str]:
    """Names of the costs."""


def sim_defaults() -> dict[str, int]:
    """The fields of a simulated world with their defaults."""


def sim_random_world(seed: int, strategy: int = -1) -> dict[str, int]:
    """The world that a seed of the soak stands for."""


def sim_soak(first: int, count: int, strategy: int = -1) -> tuple[int, int, int | None]:
    """Random worlds first .. first + count - 1 until one fails: (worlds run, steps, failing seed or None)."""


def sim_strategies() -> list[str]:
    """Names of the strategies; spec['strategy'] is an index of this list."""


def simulate(spec: dict[str, int], *, costs: dict[str, int] | None = None,
             topk_idx: Sequence[Sequence[int]] = [], timeout_s: float = 100.0, log: bool = False,
             trace: bool = False) -> dict[str, Any]:
    """Runs a whole world of the real kernels in one thread.

    spec: {name: int}, the fields of csrc/sim/world_spec.h (what is missing keeps its default; see
    sim_defaults()).
    costs: None explores: the interleaving is drawn from spec['seed'] by spec['strategy'], all bytes are moved
    and
        compared with an oracle. A dictionary of csrc/arch/sim/costs.h (times in picoseconds, rates in MB/s, 0 =
        free)
        runs on a virtual clock instead: deterministic, payload is not moved, nothing is compared.
    topk_idx: by rank, a flat list [tokens * topk] of expert numbers, -1 = dropped; empty = drawn from
    spec['data_seed'].

    Returns a dictionary:
      failure  None or {kind: deadlock | rule | wrong | error, rule, what}
      ranks    by rank {error, site, role, peer, waited_s}: the timeout report of a rank that waited in vain,
      else None in
               them
      steps    choices of the scheduler; log: lines, if asked for
      kernels  (kernel, rank, start_ps, end_ps) in order of their ends
      links    (link, rank, block, busy_ps, bytes, copies); link = tma_read | tma_write | line_store (by block),
      hbm,
               nvlink_egress, nvlink_ingress, nic_egress, nic_ingress (block -1); bytes are what really crosses
               it
      roles    (rank, role, busy_ps, {site: waited_ps}), summed over blocks
      spans    with trace: (operation, role, rank, block, link, start_ps, end_ps, bytes)
    Raises ValueError for a spec or cost that makes no sense."""
