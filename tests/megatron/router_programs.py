"""What a rank does in the tests of the router guards: real MoE layers, a few steps, Megatron's own log of metrics."""

import torch
from experts_programs import HIDDEN, config, configured
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer

import megatron_patches
from hybrid_ep.moe import RouterError
from megatron_patches import router_training

OPTIONS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "add_bias_linear": False}


def layer(of_config, **options):
    """One MoE layer, number 1, whose gate is drawn anew."""
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False).submodules.mlp
    made = MoELayer(of_config, **(getattr(spec, "keywords", None) or {"submodules": spec.submodules}), **options)
    made.set_layer_number(1)
    torch.manual_seed(4)
    with torch.no_grad():
        made.router.weight.copy_(torch.randn(made.router.weight.shape))
    return made


def tokens(seed):
    torch.manual_seed(100 * torch.distributed.get_rank() + seed)
    return torch.randn(16, 2, HIDDEN)


def logged(iteration, **options):
    """Megatron's end of a step: (its loss, how many collectives it took)."""
    honest, count, losses = torch.distributed.all_reduce, [0], {}

    def counted(*args, **keywords):
        count[0] += 1
        return honest(*args, **keywords)

    torch.distributed.all_reduce = counted
    try:
        moe_utils.track_moe_metrics(
            1.0,
            iteration,
            None,
            total_loss_dict=losses,
            force_initialize=True,
            track_names=["load_balancing_loss"],
            num_layers=2,
            **options,
        )
    finally:
        torch.distributed.all_reduce = honest
    return float(losses["load_balancing_loss"]), count[0]


def message(function, *args):
    try:
        function(*args)
    except (RouterError, ValueError) as error:
        return str(error)
    return ""


def in_training():
    """Gate before the first step, statistics on the reduction, a stop after three bad steps."""
    said = {}
    of_config = configured(2, **OPTIONS)
    for mode in ("off", "stop"):
        megatron_patches.apply(router_guard=mode)
        made = layer(of_config)
        seen = {}
        honest = router_training.judge
        router_training.judge = lambda tables, honest=honest, seen=seen: seen.update(honest(tables))
        made(tokens(0))[0].sum().backward()
        made(tokens(1))[0].sum().backward()
        router_training.judge = honest if mode == "off" else router_training.judge
        suffix = "off" if mode == "off" else "on"
        said[f"loss_{suffix}"], said[f"collectives_{suffix}"] = logged(1)
        router_training.judge = honest
        if mode == "off":
            megatron_patches.revert()
    said["statistics"] = seen[1]
    with torch.no_grad():
        loads = sum(made.router(tokens(s))[1].sum(0).double() for s in (0, 1))
    torch.distributed.all_reduce(loads)
    said["load_of_all_ranks"] = float(loads.max() / loads.mean())
    with torch.no_grad():
        made.router.weight.zero_()  # after the first forward: only the statistics can see it
    for step in range(3):
        made(tokens(step))[0].sum().backward()
        said["stopped"] = message(logged, step)
        assert bool(said["stopped"]) == (step == 2)
    fresh = layer(of_config)
    with torch.no_grad():
        fresh.router.weight.zero_()
    said["gate"] = message(fresh, tokens(0))
    megatron_patches.revert()
    return said


def with_a_layer_that_predicts_further():
    """Statistics by layer of two that Megatron both calls number 1: one of two layers, and one that predicts further
    tokens, all of whose choices tie."""
    of_config = configured(2, **OPTIONS, mtp_num_layers=1)
    megatron_patches.apply(router_guard="warn")
    made, seen, honest = [layer(of_config), layer(of_config, is_mtp_layer=True)], {}, router_training.judge
    for each in made:
        each(tokens(0))[0].sum().backward()
    with torch.no_grad():
        made[1].router.weight.zero_()
    made[1](tokens(1))[0].sum().backward()
    router_training.judge = lambda tables: seen.update(honest(tables))
    try:
        logged(1, mtp_num_layers=1)
    finally:
        router_training.judge = honest
    megatron_patches.revert()
    return {number: said["tie_fraction"] for number, said in seen.items()}


def ratio(routing_map):
    load = routing_map.sum(0).double()
    torch.distributed.all_reduce(load)
    return float(load.max() / load.mean())


def tie_broken():
    """A router of zeros with and without the tie-break; a router that is none loses nothing."""
    said, maps, probabilities = {}, {}, {}
    of_config = configured(2, **OPTIONS)
    for on in (False, True):
        megatron_patches.apply(router_tie_break=on)
        made = layer(of_config)
        probabilities[on], maps[on] = (t.detach() for t in made.router(tokens(0)))
        with torch.no_grad():
            made.router.weight.zero_()
        probs, routing_map = made.router(tokens(0))
        said["first_ratio" if on else "without"] = ratio(routing_map)
        if not on:
            megatron_patches.revert()
    assert ((probs == 0.5) == routing_map).all(), "the hash is in no probability"
    said["changed"] = int((maps[True] != maps[False]).sum())
    said["probabilities"] = torch.equal(probabilities[True], probabilities[False])
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    target = tokens(7)
    for step in range(25):
        optimizer.zero_grad()
        loss = (made(tokens(0))[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        if step == 0:
            said["first_loss"] = loss.item()
    said["last_loss"] = loss.item()
    assert made.router.weight.abs().sum() > 0
    megatron_patches.revert()
    return said


def finite_with_the_tie_break():
    """Both asked for: zeros may train, what is not finite may not, at the first forward and after loading."""
    of_config = configured(1, **OPTIONS)
    megatron_patches.apply(router_guard="stop", router_tie_break=True)
    router = layer(of_config).router
    with torch.no_grad():
        router.weight.zero_()
    said = [message(router, tokens(0))]
    for value in (float("nan"), float("inf")):
        bad = {**router.state_dict(), "weight": router.weight.detach().clone()}
        bad["weight"][3, 5] = value
        router.load_state_dict(bad)
        said.append(message(router, tokens(0)))
    megatron_patches.revert()
    return said


def groups_of_experts():
    """Group-limited top-k with the tie-break: Megatron's own where nothing ties, spread over groups and experts where
    all do, and counted as it was chosen. Returns the busiest expert's load over the mean, for zeros."""
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 2}
    of_config = configured(1, **OPTIONS, **groups, moe_router_score_function="sigmoid")
    torch.manual_seed(9)
    for scores in (torch.rand(256, 8), 1e3 * torch.randn(256, 8), torch.randn(256, 8).double()):
        for group_topk in (1, 2):
            theirs = moe_utils.group_limited_topk(scores, 2, 256, 8, 4, group_topk)[1]
            assert torch.equal(router_training.untied_topk(scores, 2, 4, group_topk, 0), theirs)
        assert torch.equal(router_training.untied_topk(scores, 2, None, None, 0), scores.topk(2).indices)
    zeros = router_training.untied_topk(torch.zeros(4096, 8), 2, 4, 2, 0)
    assert (zeros[:, 0] != zeros[:, 1]).all()
    loads = zeros.flatten().bincount(minlength=8)
    megatron_patches.apply(router_guard="stop", router_tie_break=True)
    router = layer(of_config).router
    with torch.no_grad():
        router.weight.zero_()
    routing_map = router(tokens(0))[1]
    assert torch.equal(router.router_replay.counted[3:].long(), routing_map.sum(0)), "the load is what was chosen"
    megatron_patches.revert()
    return float(loads.max() / loads.double().mean())


def refused():
    """Guards on a router that does not ask the top-k we stand in for."""
    configured(1)
    megatron_patches.apply(router_guard="warn")
    of_config = config(1, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0, moe_router_topk=1)
    return message(layer, of_config)
