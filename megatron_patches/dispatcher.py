"""The token dispatcher MoELayer builds, with our manager behind it (`manager`).

The class keeps the six steps of Megatron's flex dispatcher (its map already covers tensor x expert parallel ranks) and
swaps the manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher, MoETokenDispatcher

from megatron_patches import settings
from megatron_patches.manager import HybridEPManager

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class HybridEPTokenDispatcher(MoEFlexTokenDispatcher):
    """Megatron's flex dispatcher, with our manager where the settings ask for it and its own elsewhere.

    Enabled settings with another backend than hybridep raise ValueError: that layer would not use hybrid_ep.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if not settings.current().enabled:
            super().__init__(num_local_experts, local_expert_indices, config=config, pg_collection=pg_collection)
            return
        if config.moe_flex_dispatcher_backend != "hybridep":
            raise ValueError(
                f"moe_flex_dispatcher_backend is {config.moe_flex_dispatcher_backend!r} while hybrid_ep is "
                "enabled: give 'hybridep', or turn hybrid_ep off with megatron_patches.revert()"
            )
        MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self._comm_manager = _manager_class()(
            group=self.tp_ep_group,
            num_local_experts=num_local_experts,
            num_experts=self.tp_size * config.num_moe_experts,
            router_topk=self.tp_size * config.moe_router_topk,
            config=config,
        )
        # Alive when dispatch_preprocess ends: a partial CUDA graph returns them and writes them back.
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.routing_map"]

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the base class, when the sums are there."""
        if isinstance(self._comm_manager, HybridEPManager):
            self._comm_manager.wait()
        return super().combine_postprocess(hidden_states)


def _manager_class() -> type[HybridEPManager]:
    """The manager that the settings ask for; other modules are loaded only if one of theirs is."""
    if settings.current().weights.may_move:
        from megatron_patches import weights

        return weights.WeightsManager
    wanted = settings.current().balance
    if wanted.mode == "off":
        return HybridEPManager
    from megatron_patches import balance

    return balance.ExactManager if wanted.clones else balance.SlowManager
