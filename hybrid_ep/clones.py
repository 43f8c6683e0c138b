"""plan_clones: clones of hot experts for one micro-batch, planned by all ranks together, with nothing on the host.

One launch before the dispatch's: every rank counts its tokens by logical expert, tells the group, plans as the others
do, and writes its routing over physical slots. On a GPU the host waits for nothing, so that it can be captured in a
CUDA graph. hybrid_ep.balance has the same planner for counts that a host knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybrid_ep import streams
from hybrid_ep.runtime import clones
from hybrid_ep.runtime.clones import ClonedRouting, ClonePlan, PlannerOptions

if TYPE_CHECKING:
    from hybrid_ep.config import HybridEpConfigInstance
    from hybrid_ep.runtime.clones import ExpertOwners
    from hybrid_ep.runtime.session import Session

__all__ = ["ClonePlan", "ClonedRouting", "PlannerOptions", "PlansClones"]


class PlansClones:
    """The part of a buffer that plans clones."""

    config: HybridEpConfigInstance
    comm_stream: Any

    def _busy(self) -> Session:
        raise NotImplementedError

    @streams.on_comm_stream
    def plan_clones(
        self,
        topk_idx: Tensor | None = None,
        routing_map: Tensor | None = None,
        *,
        owners: ExpertOwners | None = None,
        plan: ClonePlan | None = None,
    ) -> ClonedRouting:
        """Clones hot experts into spare slots for this micro-batch, and says where this rank's tokens go. Collective.

        topk_idx [T, K], signed integers (-1 drops a choice), or routing_map bool or uint8 [T, E]: over the E logical
        experts, (num_local_experts - spare_slots) of every rank; T may differ between ranks and be 0. owners:
        `hybrid_ep.balance.owners.Owners`, where experts live (default: in their order); they must be the same on all
        ranks, else all end with a DeadlineError of the site headers_differ. What is returned, a dispatch takes for
        its routing. For a buffer that was made with `clones=`.

        plan: of an earlier call, to go by; of the same routing on this rank it gives the same result, as activation
        recomputation needs it. Then nothing is planned or sent, and the call is no collective.

        Raises ValueError, DeadlineError."""
        with self._busy() as session:
            return clones.plan(session, topk_idx, routing_map, owners, plan, self.config)
