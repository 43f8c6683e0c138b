"""The expert balancer: planners, their lower bounds, load statistics and the offline tools on them.

* `plan_microbatch`: exact replication after the router, one micro-batch and layer at a time
* `plan_placement`: where experts and replicas live until the next placement
* `placement_front`: changed slots against imbalance, where a placement is in force
* `rebalance_experts`: EPLB's call on plan_placement

docs/balancer.md is the guide. Nothing here imports Megatron; `megatron_patches.balance` puts it to work there.
"""

from hybrid_ep.balance.front import FrontPoint, placement_front
from hybrid_ep.balance.microbatch import (
    MicrobatchOptions,
    MicrobatchPlan,
    MicrobatchPlanner,
    imbalance_ratio,
    plan_microbatch,
)
from hybrid_ep.balance.placement import PlacementPlan, plan_placement, rebalance_experts

__all__ = [
    "FrontPoint",
    "MicrobatchOptions",
    "MicrobatchPlan",
    "MicrobatchPlanner",
    "PlacementPlan",
    "imbalance_ratio",
    "placement_front",
    "plan_microbatch",
    "plan_placement",
    "rebalance_experts",
]
