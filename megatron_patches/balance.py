"""Exact balancing in training: after the router, hot experts are cloned into spare slots for one micro-batch.

    counts of all ranks -> plan -> my tokens to instances -> dispatch over physical slots -> clones of weights pushed
    meanwhile -> experts -> combine;  backward: weights pushed again, clone gradients summed into the home's

Router, auxiliary losses, expert bias, optimizer and checkpoints see logical experts only: the map is rewritten after
all of them, and clones are no parameters. The spare slots are shared by all layers, so a clone's weights are not kept
for the backward: saved tensors name their place in the slots, which the backward refills before it reads them.
"""

import functools

import torch
import torch.distributed as dist

from hybrid_ep.balance import MicrobatchPlanner
from megatron_patches import balance_push, settings
from megatron_patches.dispatcher import HybridEPManager

# attribute of TransformerConfig -> the flag that sets it: what exact balancing does not support, refused when truthy.
UNSUPPORTED = {
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "moe_pad_expert_input_to_capacity": "--moe-pad-expert-input-to-capacity",
    "moe_expert_rank_capacity_factor": "--moe-expert-rank-capacity-factor",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "gradient_accumulation_fusion": "gradient accumulation fusion (give --no-gradient-accumulation-fusion)",
    "add_bias_linear": "linear biases (give --disable-bias-linear)",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser",
    "cuda_graph_impl": "--cuda-graph-impl",
    "enable_cuda_graph": "--enable-cuda-graph",
}


def check_supported(config, tp_size):
    """ValueError that names every flag which exact balancing does not work with."""
    found = [flag for name, flag in UNSUPPORTED.items() if getattr(config, name, None) not in (None, False, "none")]
    if tp_size > 1:
        found.append("--expert-tensor-parallel-size above 1")
    if found:
        raise ValueError(f"--hybrid-ep-balance exact does not work with {', '.join(found)}: drop them, or balance off")


class ExactManager(HybridEPManager):
    """HybridEPManager over physical slots: num_local_experts homes, then the spare slots, on every rank.

    plan_with: counts int64 [R, E] -> MicrobatchPlan; tests put forced plans here.
    last_plan: the plan of the latest dispatch, for meters.
    """

    def __init__(self, group, num_local_experts, num_experts, router_topk, config):
        wanted = settings.current()
        check_supported(config, num_experts // config.num_moe_experts)
        self.num_homes = num_local_experts
        super().__init__(group, num_local_experts + wanted.spare_slots, num_experts, router_topk, config)
        size = group.size()
        self.planner = MicrobatchPlanner(
            size,
            num_experts,
            spare_slots=wanted.spare_slots,
            num_nodes=size // (wanted.ranks_per_node or size),
            epsilon=wanted.balance_epsilon,
        )
        self.plan_with = self.planner.plan
        self.clones = self.last_plan = self.push = None

    def attach(self, experts):
        """Give the layer's experts to the balancer: their forward also runs the clones from now on."""
        self.clones = balance_push.CloneExperts(self, experts)
        experts.forward = self.clones.forward

    def dispatch(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        """As the base class, after planning: rows arrive for homes first, then for the clones on this rank."""
        if self.clones is None:
            raise RuntimeError("exact balancing has no experts to clone: call attach(experts) after building the layer")
        counts = self.routing_map.sum(dim=0)
        gathered = [torch.empty_like(counts) for _ in range(self.group.size())]
        dist.all_gather(gathered, counts, group=self.group)
        self.last_plan = plan = self.plan_with(torch.stack(gathered).cpu().numpy())
        self.push = self.clones.start_push(plan)  # travels while the tokens do
        self.routing_map, self.token_probs = to_physical(self.routing_map, self.token_probs, plan, self.group.rank())
        return super().dispatch(hidden_states)


def to_physical(routing_map, probs, plan, source):
    """Spread this rank's tokens over instances: (map, probs) over logical experts -> over physical slots.

    routing_map bool [T, E], probs [T, E]; columns of the result: for every rank its homes in order of expert id, then
    its spare slots. Of an expert's tokens, in order, the first stay for its home and the rest go to the clones in slot
    order, as many as `plan.share_of_source(source)` says. Gradients of probs flow back.
    """
    num_ranks, spare = plan.slot_expert.shape
    num_experts = routing_map.shape[1]
    per_rank = num_experts // num_ranks + spare
    device = routing_map.device
    seen = [0] * num_ranks
    home = []
    for rank in plan.home.tolist():
        home.append(rank * per_rank + seen[rank])
        seen[rank] += 1
    column = torch.tensor(home, device=device).expand(routing_map.shape[0], -1).clone()
    take = plan.share_of_source(source)
    for expert in sorted(set(plan.slot_expert[take > 0].tolist())):
        tokens = routing_map[:, expert].nonzero().squeeze(1)
        places = [(r, s) for r, s in zip(*(plan.slot_expert == expert).nonzero(), strict=True) if take[r, s]]
        first = len(tokens) - sum(int(take[p]) for p in places)
        for rank, slot in places:
            last = first + int(take[rank, slot])
            column[tokens[first:last], expert] = int(rank * per_rank + num_experts // num_ranks + slot)
            first = last
    shape = (routing_map.shape[0], num_ranks * per_rank)
    physical_map = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, column, routing_map)
    return physical_map, torch.zeros(shape, dtype=probs.dtype, device=device).scatter(1, column, probs)


def layer_init(original):
    """A replacement for MoELayer.__init__ that hands the experts to an exact manager."""

    @functools.wraps(original)
    def __init__(self, *args, **keywords):
        original(self, *args, **keywords)
        manager = getattr(self.token_dispatcher, "_comm_manager", None)
        if isinstance(manager, ExactManager):
            manager.attach(self.experts)

    return __init__
