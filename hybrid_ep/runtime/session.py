"""One buffer's engine and everything about it that all ranks must decide alike: routing, capacity, growth.

Every rank learns every rank's header with the counts, so disagreement is an error on all ranks at once and
growth is the same decision everywhere; only growth talks to the store."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from hybrid_ep import _core, env
from hybrid_ep.buffer_sizes import first_recv_rows, recv_capacity
from hybrid_ep.config import HybridEpConfigInstance
from hybrid_ep.errors import BootstrapError, BufferFailedError, CapacityError, DeadlineError, ReentrantCallError
from hybrid_ep.hardware import block_split
from hybrid_ep.runtime import clones, devices, nvshmem, placing, validation
from hybrid_ep.runtime.bootstrap import Part, Rendezvous, agree, open_segments
from hybrid_ep.runtime.call import Call
from hybrid_ep.runtime.known import Known, KnownCalls
from hybrid_ep.runtime.metered import Metered
from hybrid_ep.runtime.options import Options
from hybrid_ep.runtime.plan import Plan
from hybrid_ep.runtime.results import ResultMemory
from hybrid_ep.runtime.routing import Routing
from hybrid_ep.runtime.tensors import dtype_of, padded_row_bytes, row_bytes
from hybrid_ep.runtime.topology import Topology

_SHAPE_FIELDS = (
    "num_experts",
    "max_tokens",
    "max_topk",
    "row_bytes",
    "scale_bytes",
    "recv_rows",
    "partial_row_bytes",
    "chunk_tokens",
    "arena_bytes",
)
_TOKENS_OF_A_BLOCK = 128  # that make it worth while for the exchange kernel to have one more


@functools.lru_cache(maxsize=64)
def _launch_shape(blocks: int, local: int | None, chunk_tokens: int, landing: str | None) -> _core.LaunchShape:
    return _core.LaunchShape(num_blocks=blocks, local_blocks=local, chunk_tokens=chunk_tokens, landing=landing)


# How a rank's answer reads, where ranks gave different ones.
_WORDS: dict[str, Callable[[_core.CallHeader], str]] = {
    "hidden": lambda h: str(h.hidden),
    "dtype": lambda h: str(dtype_of(h.dtype)),
    "scale_width": lambda h: str(h.scale_width),
    "scale_dtype": lambda h: str(dtype_of(h.scale_dtype)) if h.scale_width else "no scaling_factor",
    "num_experts": lambda h: str(h.num_experts),
    "pad_multiple": lambda h: str(h.pad_multiple),
    "routing": lambda h: "routing_map (or topk_idx with probs)" if h.routing_map else "topk_idx",
    "pad_empty_experts": lambda h: str(h.pad_empty_experts),
    "weights": lambda h: "given" if h.weights else "none",
    "verb": lambda h: (
        "dispatch_with_permute(non_blocking=True)"
        if h.non_blocking
        else "dispatch_with_permute"
        if h.permute
        else "dispatch"
    ),
    "chunk_dispatch": lambda h: str(h.chunk_dispatch),
    "chunk_combine": lambda h: str(h.chunk_combine),
}


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted while waiting for other ranks"
    if isinstance(error, (DeadlineError, BootstrapError)):
        return str(error)
    return f"{type(error).__name__}: {error} (raised in the middle of an operation, which the other ranks go on with)"


def _raised_here(error: BaseException) -> bool:
    """By hybrid_ep or its compiled core, which has no frames of its own; not by a signal handler that ran meanwhile."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_globals.get("__name__", "").split(".")[0] == "hybrid_ep"


class Session(Metered):
    """Not thread-safe, and says so: `with session:` goes around every operation. In no cycle of references, so that a
    buffer that is dropped lets go of its process group at once, not when the garbage collector comes."""

    def __init__(self, meet: Rendezvous, topology: Topology, options: Options):
        super().__init__()
        self.topology, self.meet, self.options = topology, meet, options
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._began: Any = None
        self._closing: tuple[str, bool] | None = None  # what close() was told while a call was under way
        self.why_closed: str | None = None
        self._generation = 0
        # Whether kernels run beside the host, as on a GPU: then it waits for whatever it looks at, a choice of topk_idx
        # or a count, and non_blocking=True looks at nothing. The host's executors have ended when a launch returns.
        self.runs_beside = devices.is_cuda(options.executor)
        self.runs_on_gpu = options.device.type == "cuda"
        self.map_width = 0  # pairs of a token in the widest routing map so far, of all ranks
        self.clone_columns: dict[bytes, clones.Columns] = {}  # of owners that were planned for
        self.capturing = self.captured = False  # a CUDA graph, now or ever
        idle_limit = env.get("HYBRID_EP_RESULT_CACHE_MIB") << 20
        self.results = ResultMemory(idle_limit, options.device, options.arena_streams)
        self.engine: Any = None
        self._segments, self._executor, self._arenas = self._choose_memory()
        self.shape: Any = None
        self._room: dict[str, int] = {}  # what the shape says
        # Of which the engine was asked, and what came of it.
        self._blocks_allowed: set[tuple[str, int]] = set()
        self._blocks_found: dict[tuple[str, int, int | None], tuple[int, int | None]] = {}
        self.known, self.known_by_lines = KnownCalls(), KnownCalls()
        self.where = {  # this rank, as its plans say it
            "rank": topology.rank,
            "num_ranks": topology.num_ranks,
            "num_local_ranks": topology.num_local_ranks,
        }
        self.chunks = options.chunks  # rows of a rail message by operation; all ranks agree on them
        first = options.first_shape(topology.num_ranks)
        self._open({**first, "arena_bytes": self._arena_bytes(first)})

    # ---- life
    # `with session:` around every operation: in the process that made the buffer, one thread at a time, none after a
    # failure; its tensors lie on the buffer's device.
    def __enter__(self) -> Session:
        self._began = self.enter()  # raises where another thread is inside
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        self.leave(self._began, error)

    def enter(self) -> Any:
        """What began, for leave()."""
        if os.getpid() != self._pid:
            self.require_own_process()
        if not self._lock.acquire(False):
            raise ReentrantCallError(
                "this buffer is busy with a call of another thread; give each thread its own "
                "HybridEPBuffer, or take turns"
            )
        borrowed = None
        try:
            if self.why_closed is not None:
                raise BufferFailedError(self.why_closed)
            if self.runs_on_gpu:
                borrowed = devices.borrow(self.options.device)
                self._enter_device()
            launched = -1 if self.engine is None else self._past_launches + self.engine.num_launches
            return (self._generation, launched), validation.enter(self.options.device), borrowed
        except BaseException:
            devices.give_back(borrowed)
            self._lock.release()
            raise

    def leave(self, began: Any, error: BaseException | None) -> None:
        progress, outer, borrowed = began
        validation.leave(outer)
        if borrowed is not None:
            devices.give_back(borrowed)
        if error is None:
            self._lock.release()
            if self._closing is not None:
                self._close_when_free()
            return
        try:
            if self._is_out_of_step(error, progress):
                self._close(f"this buffer failed earlier: {_reason(error)}; make a new HybridEPBuffer")
        finally:
            self._lock.release()
            self._close_when_free()

    def require_own_process(self) -> None:
        """BufferFailedError in a forked child: the registered memory and its flags are in use by the parent."""
        if os.getpid() != self._pid:
            raise BufferFailedError(
                f"this buffer belongs to process {self._pid}, from which process {os.getpid()} was forked; a child "
                "may only drop it: make the calls in the parent, or start the child with 'spawn' or 'forkserver' and "
                "make a HybridEPBuffer of a process group of its own there"
            )

    def _is_out_of_step(self, error: BaseException, began: tuple[int, int]) -> bool:
        """Whether this rank leaves in the middle of an operation, in which the others now wait for it.

        Arguments are refused before anything is sent, or by all ranks alike. Whatever else ends a call that has sent
        something came from outside: Ctrl-C, memory that ran out, an exception of a signal handler of any type."""
        if isinstance(error, (DeadlineError, BootstrapError)):
            return True
        launched = -1 if self.engine is None else self.num_launches()
        if (self._generation, launched) == began:  # it changes as soon as anything is sent to other ranks
            return False
        return not (isinstance(error, ValueError) and _raised_here(error))

    def _enter_device(self) -> None:
        """CUDA: operations go where torch's would go in this thread."""
        if self.runs_on_gpu:
            stream = devices.enter(self.options.device)
            self.capturing = torch.cuda.is_current_stream_capturing()
            self.captured |= self.capturing
            if self.engine is not None:
                self.engine.set_stream(stream)

    def close(self, why: str = "this buffer was destroyed; make a new HybridEPBuffer", together: bool = False) -> None:
        """Gives the registered memory back. Local; peers keep what they mapped. Memory that only all ranks can give
        back (NVSHMEM's heap) goes at once when all do it together, else when they next meet. While a call is under way,
        in another thread, it is that call's end that does it. In a forked child: nothing is given back, for nothing of
        it is the child's."""
        if os.getpid() != self._pid:
            self.why_closed = self.why_closed or why
            for kept in (self.engine, self.results):  # a destructor of theirs would call into the device
                if kept is not None:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            self.engine = None
            return
        self._closing = why, together
        self._close_when_free()

    def _close_when_free(self) -> None:
        while self._closing is not None and self._lock.acquire(False):
            try:
                (why, together), self._closing = self._closing, None
                self._close(why, together)
            finally:
                self._lock.release()

    def _close(self, why: str, together: bool = False) -> None:
        if first := self.why_closed is None:
            self.why_closed = why
        self.engine = None
        self.results.close()
        for memory in (self._arenas, self._segments) if first else ():
            if hasattr(memory, "close"):
                memory.close(together)

    def __del__(self) -> None:
        try:  # also runs on a half-built object, and at interpreter shutdown when module globals are gone
            self.close()
        except Exception:
            pass

    # ---- memory
    def fit(self, **needs: int) -> None:
        """Grows the registered memory where a need exceeds it. Collective exactly when something must grow;
        all ranks must come with the same needs."""
        now, o = self._room, self.options
        # Nothing grows of which no more is needed: capacity and arena go by the other sizes.
        for name, need in needs.items():
            if need > now[name] or (need != now[name] and name == "num_experts"):
                break
        else:
            return
        wanted = {name: max(now[name], needs.get(name, 0)) for name in _SHAPE_FIELDS}
        wanted["num_experts"] = needs.get("num_experts", now["num_experts"])
        first = first_recv_rows(o.capacity_factor, wanted["max_tokens"], wanted["max_topk"], self.topology.num_ranks)
        wanted["recv_rows"] = max(wanted["recv_rows"], first)
        wanted["arena_bytes"] = max(now["arena_bytes"], self._arena_bytes(wanted))
        if self.captured:
            grown = ", ".join(f"{n} from {now[n]} to {wanted[n]}" for n in now if now[n] != wanted[n])
            raise ValueError(
                f"this buffer would have to grow ({grown}), but a CUDA graph holds addresses of its "
                "memory; run a call of this size before the capture, or make another buffer for it"
            )
        self._open(wanted)

    def _choose_memory(self) -> devices.Memory:
        """Collective on a GPU. There an arena lies apart: of a buffer that ends under its results they alone remain."""
        own, o = self.meet.view.segments, self.options
        if o.device.type != "cuda":
            return devices.Memory(own, o.executor)
        devices.enter(o.device)
        if hasattr(own, "on_device"):  # ranks inside one process
            return devices.Memory(own.on_device(), o.executor, own.on_device())
        lends = o.arena_bytes(o.first_shape(self.topology.num_ranks)) > 0
        return devices.memory(self.meet, self.topology, o.executor, o.device, o.reach, lends)

    def _open(self, wanted: dict[str, int]) -> None:
        generation, self._generation = self._generation, self._generation + 1
        agree(self.meet.exchange(f"{generation}/shape", wanted), "growth of the registered memory")
        shape = _core.BufferShape(
            num_nodes=self.topology.num_nodes,
            num_local_ranks=self.topology.num_local_ranks,
            arena_apart=self._arenas is not None and wanted["arena_bytes"] > 0,
            **(self.options.fixed_shape(self.topology) | wanted),
        )
        if self.engine is not None:
            self.keep_counts()
            self.engine = None
            self.results.part()
        o, apart = self.options, shape.total_bytes - shape.segment_bytes
        try:
            self.engine = open_segments(
                self.meet,
                self._segments,
                generation,
                shape.segment_bytes,
                lambda segments, *arenas: _core.Engine(
                    self.topology.rank, shape, segments, o.timeout_s, self._executor, env.get("HYBRID_EP_SEED"), *arenas
                ),
                o.less_memory(shape.arena_bytes),
                Part(self._arenas, apart, self.topology.ranks_of_node, devices.ARENALESS) if apart else None,
            )
        except BaseException as error:
            self._close(f"this buffer failed when it set up its memory: {error}; make a new HybridEPBuffer")
            raise
        self.results.use(self.engine, shape.arena_bytes)
        if self._clock is not None:
            self.engine = self._clock.around(self.engine)
        self.shape, self._room = shape, wanted
        self._blocks_allowed.clear()
        self._blocks_found.clear()
        self.known.forget()
        self.known_by_lines.forget()
        self._enter_device()

    def _arena_bytes(self, shape: dict[str, int]) -> int:
        """Of a buffer of this shape. None in NVSHMEM's heap: all ranks free that together, under results that live."""
        nowhere = self._executor == nvshmem.EXECUTOR and self._arenas is None
        return 0 if nowhere else self.options.arena_bytes(shape)

    # ---- routing
    def require_capturable(self, non_blocking: bool) -> None:
        """ValueError where a routed call would wait and must not."""
        if self.capturing and not non_blocking:
            raise ValueError(
                "non_blocking=False waits for the counts and cannot be captured in a CUDA graph; give "
                "non_blocking=True and num_permuted_tokens"
            )

    def route(self, routing: Routing, call: Call, template: HybridEpConfigInstance, asked: placing.Asked) -> Plan:
        """Exchanges the counts and places every row. Collective. Inside `with session`."""
        make = placing.static_plan if call.non_blocking and self.runs_beside else placing.blocking_plan
        return make(self, routing, call, template, asked)

    def remember(self, key: bytes | None, told: Known) -> None:
        """What calls of that key need not work out again, now that one of them has its rows."""
        if key is not None:
            shape = self.shape
            self.known.add(key, told._replace(most_tokens=shape.max_tokens, most_hidden=shape.row_bytes // 2))

    @staticmethod
    def check_headers(placed: _core.Placed) -> None:
        """ValueError, the same on all ranks, when they mean different calls."""
        if differing := placed.differing:
            agree([{name: _WORDS[name](h) for name in differing} for h in placed.headers], "dispatch")

    def fit_call(self, ranges: _core.HeaderRanges, topk: int, call: Call, template: HybridEpConfigInstance) -> None:
        """Room for a routed call, of which all ranks know all headers."""
        dispatch, combine = template.chunk("dispatch"), template.chunk("combine")
        self.chunks = {"dispatch": dispatch, "combine": combine}
        self.fit(
            max_tokens=max(1, ranges.most_tokens, ranges.most_want_tokens),
            max_topk=topk,
            row_bytes=max(row_bytes(call.hidden), validation.least_row_bytes(ranges.most_want_hidden)),
            scale_bytes=0 if call.scale is None else padded_row_bytes(call.scale),
            chunk_tokens=max(dispatch, combine),
        )

    def fit_rows(self, placed: _core.Placed) -> None:
        """Room for the receive rows of the fullest rank, which all ranks know, and a quarter more for calls to come.
        Where capacity_factor says how many there are, nothing grows."""
        if self.options.capacity_factor is None and placed.most_recv_rows > self.shape.recv_rows:
            self.fit(recv_rows=min(self.recv_capacity(self.shape.max_tokens), placed.most_recv_rows * 5 // 4))

    def recv_capacity(self, tokens: int) -> int:
        """Receive rows that a call of so many tokens a rank may need at most."""
        return recv_capacity(self.options.capacity_factor, tokens, self.topology.num_ranks)

    def check_capacity(self, placed: _core.Placed, call: Call) -> None:
        """CapacityError, on all ranks, where rows were dropped and must not be."""
        if self.options.overflow != "raise" or call.non_blocking:
            return
        if placed.most_recv_rows > self.shape.recv_rows:
            self._raise_rows(placed.recv_rows)
        if placed.any_dropped:
            self._raise_budgets(placed.num_dropped_per_rank, [h.budget for h in placed.headers])

    def _raise_rows(self, recv_rows: list[int]) -> None:
        capacity = self.shape.recv_rows
        raise CapacityError(
            f"the ranks receive {recv_rows} rows but capacity_factor={self.options.capacity_factor} admits "
            f"{capacity}; raise capacity_factor, or drop rows with overflow='drop'",
            recv_rows,
            [capacity] * len(recv_rows),
        )

    @staticmethod
    def _raise_budgets(dropped: list[int], budgets: list[int | None]) -> None:
        said = ", ".join(
            f"{budget} on rank {rank} ({rows} rows too few)"
            for rank, (rows, budget) in enumerate(zip(dropped, budgets, strict=True))
            if rows
        )
        raise CapacityError(
            f"num_permuted_tokens={said}; raise it, give None, or drop rows with non_blocking=True or overflow='drop'",
            dropped,
            budgets,
        )

    def blocks(self, operation: str, num_sms: Any, template: HybridEpConfigInstance) -> tuple[int, int | None]:
        """Blocks of an operation that feed links, and those beside them for local work (None: the first do it).
        ValueError before anything is launched: behind a dispatch's routing other ranks would go on without this one."""
        if operation == "dispatch":
            verb, blocks, local = "permute", template.num_of_blocks_dispatch_api, template.num_of_blocks_permute
        else:
            verb, blocks, local = "unpermute", template.num_of_blocks_combine_api, template.num_of_blocks_unpermute
        asked = operation, blocks, local
        if num_sms is None and (found := self._blocks_found.get(asked)) is not None:
            return found
        found = self._find_blocks(operation, verb, blocks, local, num_sms)
        if num_sms is None:
            self._blocks_found[asked] = found
        return found

    def _find_blocks(
        self, operation: str, verb: str, blocks: int, local: int | None, num_sms: Any
    ) -> tuple[int, int | None]:
        name = "num_blocks"
        if num_sms is not None:
            name, blocks = "num_sms", validation.integer("num_sms", num_sms, 1, most=env.MOST_BLOCKS)
        self._allow_blocks(name, blocks)
        if not local and self.options.local_work_apart:
            local = block_split.local_blocks(operation, blocks, self.engine.most_blocks)
        if local:
            self._allow_blocks(f"num_blocks_{verb}", local)
            self._allow_blocks(f"{name} + num_blocks_{verb}", blocks + local)
        return blocks, local or None

    def _allow_blocks(self, name: str, blocks: int) -> None:
        if (name, blocks) not in self._blocks_allowed:
            self.engine.require_blocks(name, blocks)
            self._blocks_allowed.add((name, blocks))

    def exchange_blocks(self, num_tokens: int, template: HybridEpConfigInstance) -> int:
        """Blocks of the exchange kernel of this many tokens; ranks need not agree, and rows do not depend on it."""
        asked = template.num_of_blocks_preprocessing_api
        blocks = max(1, -(-num_tokens // _TOKENS_OF_A_BLOCK)) if asked is None else asked
        return min(blocks, _core.BufferShape.most_exchange_blocks)

    def launch(self, operation: str, blocks: tuple[int, int | None], by_lines: bool = False) -> _core.LaunchShape:
        """Of an operation on a plan, once its routing is agreed upon. Lines need no parts: all blocks move them."""
        links, local = (sum(filter(None, blocks)), None) if by_lines else blocks
        return _launch_shape(links, local, self.chunks[operation], self.options.landing)

    def fit_plan(self, plan: Plan, **needs: int) -> None:
        """Before an operation on an existing plan: everything it needs is known on every rank alike."""
        self.fit(
            num_experts=plan.num_experts,
            max_tokens=plan.max_tokens,
            max_topk=plan.topk,
            recv_rows=plan.max_recv_rows,
            **needs,
        )
