"""Spare slots: weights of clones pushed by the ranks' own kernels, and their gradients brought home in fp32.

A plan of clones (`buffer.plan_clones`, or a host's) says whose expert goes to which slot. Owners store the weights into
the holders' registered memory, chunk by chunk, on a stream of their own, beside what the caller's stream has meanwhile;
no host reads the plan, and nothing is allocated::

    slots = SpareSlots(group, spare_slots=1, num_owners=2, shapes=[(4096, 2048), (2048, 4096)], dtype=torch.bfloat16)
    routed = buffer.plan_clones(topk_idx=topk_idx)
    slots.push(routed.plan, weights)       # a tensor [num_owners, *shape] of each matrix
    ...                                    # the dispatch
    slots.wait()                           # from here on slots.weights hold the clones of this micro-batch
    ...                                    # experts and clones, forward and backward
    slots.gradients[n].copy_(...)          # of each stack of matrices
    slots.collect(routed.plan, sums)       # likewise in fp32: clones' gradients are added to them

`collect` is `start_collect` and `wait_collect`, for what a GPU computes meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybrid_ep import memory
from hybrid_ep.errors import BufferFailedError
from hybrid_ep.runtime import clones, options, spares, validation
from hybrid_ep.runtime.bootstrap import GroupView, Rendezvous
from hybrid_ep.runtime.session import Session

if TYPE_CHECKING:
    import torch.distributed as dist

    from hybrid_ep.runtime.clones import ClonePlan, ExpertOwners
    from hybrid_ep.runtime.signatures import GroupLike

__all__ = ["SpareSlots"]

Matrices = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]  # of all owners each; [owners][matrices]

# Of a launch on a GPU of its own. A push copies in bulk, and a few SMs beside a dispatch's fill the links; a collection
# loads: 64 blocks have a mebibyte on its way, what a link brings in one or two microseconds. Between nodes a third of
# the blocks, which have nearly twice the warps, serve the node.
PUSH_BLOCKS, PUSH_BLOCKS_OF_NODES, COLLECT_BLOCKS = 8, 12, 64


class SpareSlots:
    """Registered spare slots of one rank, for all layers whose experts are alike. Collective: every rank constructs it
    and calls push, wait and collect in the same order.

    * `group`: of one node, or of several, as HybridEPBuffer finds them or num_of_hybrid_ep_ranks_per_nvlink_domain
      says. Between nodes weights and gradients go along the rails, by the transport of the executor.
    * `clones_within_node`: of several nodes, plans have clones on their owners' nodes alone
      (MicrobatchOptions(num_nodes=..., within_node=True)). Then there are no rings for what goes along rails.
    * `spare_slots`, `num_owners`: slots for clones, and experts that live here, of every rank.
    * `shapes`, `dtype`: of the matrices of one expert (bf16, fp16 or fp32; each a multiple of 16 bytes).
    * `gradients`: False for slots whose clones are computed forward alone, or whose gradients other slots collect:
      there is no memory for gradients.
    * `timeout_s`, `executor`: as for HybridEPBuffer. `num_blocks`: of a launch (default: on GPUs with ranks of
      their own 8 of a push, 12 where clones go to other nodes, and 64 of a collection; else 1). Where they go to other
      nodes there are two at least, of which a third, or one, serve the node and the others the rails.

    weights: a tensor ``[spare_slots, *shape]`` of dtype for each matrix; gradients: the same in fp32, or none. All are
    zeros at first, and registered memory for the life of the object.

    A push overwrites the slots of ranks whose own push has begun: whatever reads them must be on the caller's stream
    before that rank's next push. Raises ValueError when an argument is wrong or differs between ranks, BootstrapError
    when ranks are missing, DeadlineError when one stops, which names it where it can; after it the object is
    unusable."""

    def __init__(
        self,
        group: dist.ProcessGroup | GroupLike,
        *,
        spare_slots: int,
        num_owners: int,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        clones_within_node: bool = False,
        gradients: bool = True,
        num_blocks: int | None = None,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        timeout_s: float | None = None,
        executor: str | None = None,
    ) -> None:
        self._session: Session | None = None
        view = GroupView.of(group)
        try:
            self._layout = spares.layout(spare_slots, num_owners, shapes, dtype, clones_within_node, gradients)
            o = options.parse(
                hidden_dim=8,
                max_num_of_tokens_per_rank=0,
                num_local_experts=1,  # spares say how many there are
                use_fp8=False,
                num_sms_dispatch_api=None,
                num_sms_combine_api=None,
                num_blocks_permute=None,
                num_blocks_unpermute=None,
                ranks_per_node=num_of_hybrid_ep_ranks_per_nvlink_domain,
                capacity_factor=None,
                overflow="raise",
                timeout_s=timeout_s,
                executor=options.asked_executor(executor, view),
                tuning_file="",
                arena_mib=0,
            )
            o.spares = self._layout
            if num_blocks is not None:
                validation.integer("num_blocks", num_blocks, 1)
        except Exception as error:
            with contextlib.suppress(Exception):  # the first error is what the caller must hear of
                Rendezvous(view, 0.0).refuse(options.TOPIC, error)
            raise
        meet = Rendezvous(view, o.timeout_s)
        topology = o.agree(meet)
        alone = o.device.type == "cuda" and not view.virtual
        most = torch.cuda.get_device_properties(o.device).multi_processor_count if alone else 1
        between = topology.num_nodes > 1 and not clones_within_node
        self._num_blocks = num_blocks or min(PUSH_BLOCKS_OF_NODES if between else PUSH_BLOCKS, most)
        self._collect_blocks = num_blocks or min(COLLECT_BLOCKS, most)
        self._session = Session(meet, topology, o)
        self._session.engine.require_spares(self._num_blocks)
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._stream = torch.cuda.Stream(o.device) if alone else None
        self._pushed: tuple[torch.Tensor, ...] | None = None  # of the push under way, what its kernel reads
        self._collecting: tuple[torch.Tensor, ...] | None = None  # likewise
        with torch.inference_mode(False):
            stacks = spares.stacks(self._session.engine, self._layout, o.device)
        self.weights, self.gradients = map(tuple, stacks)
        if o.device.type == "cuda":
            torch.cuda.current_stream(o.device).synchronize()  # zeros, before another rank's weights
        meet.exchange("spare slots are zeros", None)

    def push(self, plan: ClonePlan | torch.Tensor, weights: Matrices, owners: ExpertOwners | None = None) -> None:
        """Starts to store weights of this rank's experts into the slots that the plan gives them. Collective.

        plan: of plan_clones, or slot_expert int32 [ranks, spare_slots] on the device, the same on all ranks. weights: a
        tensor ``[num_owners, *shape]`` of each matrix, or tensors [owners][matrices], of which the host looks at each;
        of dtype, contiguous at 16 bytes, and they stay as they are until wait(). owners:
        `hybrid_ep.balance.owners.Owners`, where experts live (default: in their order). On a host it returns when what
        this rank sends has arrived, and what comes to it along rails; on a GPU nobody waits.

        With clones_within_node, a clone on another node than its owner's: on a host a ValueError on all ranks, and the
        slots stay usable. On a GPU, where nobody reads the plan, such a slot is as if it were empty, here, in wait and
        in collect: it keeps what it holds, and its gradients go nowhere. Raises ValueError, DeadlineError."""
        with self._open() as session:
            if self._pushed is not None:
                raise ValueError("push: the push before this one was not waited for; call wait() first")
            slot_expert, columns = self._plan(session, plan, owners)
            dtype = self._layout.dtype
            table, read = spares.addresses(session, self._tables, "weights", weights, self._layout, dtype, 16)
            used = slot_expert, columns, table, *read
            self._fork(session, used)  # behind all that has used the slots so far, beside what comes now
            session.engine.push_weights(slot_expert, columns, table, self._num_blocks)
            self._pushed = used

    def wait(self) -> None:
        """Until the slots of this rank hold the weights of the last push; on a GPU the stream waits, not the host.
        Raises ValueError where nothing was pushed, DeadlineError, which names the owner, or a rank that was to pass its
        weights on."""
        with self._open() as session:
            if self._pushed is None:
                raise ValueError("wait: no push is under way; call push(plan, weights) first")
            (slot_expert, columns, *_), self._pushed = self._pushed, None
            session.engine.await_weights(slot_expert, columns, None, 1)
            device = session.options.device
            if device.type == "cuda" and not session.capturing:  # the caller's stream may be another than in push()
                for used in (slot_expert, columns):
                    used.record_stream(torch.cuda.current_stream(device))

    def collect(self, plan: ClonePlan | torch.Tensor, sums: Matrices, owners: ExpertOwners | None = None) -> None:
        """Adds the gradients of clones, which lie in `gradients` of the ranks that hold them, to their owners' sums:
        in fp32, those of a node summed in the order of the plan, (rank, slot) ascending: first those of the nodes
        behind the owner's, one after the other, then those of its own. Collective.

        sums: as the weights of a push, but in fp32, contiguous. plan, owners: of the push. `gradients` are used up:
        ranks form sums of several clones in them. Behind it they may be written again. Raises ValueError,
        DeadlineError."""
        self.start_collect(plan, sums, owners)
        self.wait_collect()

    def start_collect(self, plan: ClonePlan | torch.Tensor, sums: Matrices, owners: ExpertOwners | None = None) -> None:
        """Starts what collect() does; on a GPU of its own it runs beside what the caller's stream has next, until
        wait_collect(). Till then `gradients` and `sums` are the kernels'. Collective. Raises ValueError, DeadlineError.
        """
        with self._open() as session:
            if not self._layout.gradients:
                raise ValueError("start_collect: these slots were made with gradients=False; make them with True")
            if self._collecting is not None:
                raise ValueError(
                    "start_collect: the collection before this one was not waited for; call wait_collect()"
                )
            slot_expert, columns = self._plan(session, plan, owners)
            table, written = spares.addresses(session, self._tables, "sums", sums, self._layout, torch.float32, 4)
            used = slot_expert, columns, table, *written
            self._fork(session, used)  # behind the caller's stream, which wrote the gradients
            session.engine.collect_gradients(slot_expert, columns, table, self._collect_blocks)
            self._collecting = used

    def wait_collect(self) -> None:
        """Until the last start_collect() is done: on a GPU the caller's stream waits, not the host. Raises ValueError
        where none was started."""
        session = self._open()
        if self._collecting is None:
            raise ValueError("wait_collect: no collection is under way; call start_collect(plan, sums) first")
        if self._stream is not None:
            torch.cuda.current_stream(session.options.device).wait_stream(self._stream)
        self._collecting = None

    def memory_report(self) -> memory.MemoryReport:
        """Registered bytes of this rank by region, exact."""
        session = self._open()
        return memory.report(session.shape, session.topology.num_ranks)

    def destroy(self) -> None:
        """Gives the registered memory back, as soon as no tensor refers to it; over NVSHMEM at once, so that no tensor
        of it may be used any more. May be called twice. Local."""
        if self._session is not None:
            self._session.close("these spare slots were destroyed; make new ones", together=True)

    def _fork(self, session: Session, used: Sequence[torch.Tensor]) -> None:
        """The next launch is on this rank's own stream, behind the caller's; nothing where it has none. Launches of an
        engine follow each other whatever their streams, so that wait()'s joins the two. used: what the launch reads and
        writes, kept by the caller until then, which is enough in a capture."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(session.options.device))
        session.engine.set_stream(self._stream.cuda_stream)
        if not session.capturing:
            for tensor in used:
                tensor.record_stream(self._stream)

    def _plan(self, session: Session, plan: Any, owners: ExpertOwners | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As the engine takes it: slots' experts, and the columns of experts' owners."""
        slots = self._layout
        slot_expert = spares.slot_expert(plan, slots, session.topology.num_ranks, not session.runs_beside)
        columns = clones.columns(session, owners, slots.num_owners, slots.spare_slots)
        if slots.within_node:
            spares.require_within(slot_expert, columns.on_device, slots, session.topology.num_local_ranks)
        return slot_expert, columns.on_device

    def _open(self) -> Session:
        if self._session is None or self._session.why_closed:
            raise BufferFailedError(self._session.why_closed if self._session else "these slots were never set up")
        return self._session
