"""Router guards inside training: gates before the first step, ties and load at every logged step, ties broken.

    gate        checked at the first forward, and after loading (router_guard.py)
    top-k       an object in TopKRouter.router_replay's place sees the scores that selection is made of: it counts
                exact ties at the boundary and choices per expert on the device, and decides exact ties when asked to
    reduction   the counts of all layers ride behind the values of one of Megatron's auxiliary losses, which are
                reduced anyway: not one collective more. Then a guard a layer judges, the same way on every rank

Without an auxiliary loss there is nothing to ride on, and each rank judges its own tokens. Counts are of training's
forward passes only, recomputation not counted twice.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybrid_ep.moe import RouterGuard, check_gates, routing_statistics, tie_break
from megatron_patches import graphs, hooks, router_guard, settings

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_patches.patch_set import Replace
    from megatron_patches.settings import Router

log = logging.getLogger("hybrid_ep.moe")
_ComputeTopk = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# (names that are reduced, a name's values, set them)
_Access = tuple[list[str], Callable[[str], torch.Tensor], Callable[[str, torch.Tensor], None]]
_watched: dict[int, TopK] = {}  # hooks.layer_number -> TopK; a rank's routers, replaced when a model is built anew
_guards: dict[int, RouterGuard] = {}  # hooks.layer_number -> RouterGuard


class TopK:
    """What `topk_routing_with_score_function` asks for the top-k of its selection scores, bias and groups included.

    Has the one method of Megatron's RouterReplay that the router calls. Probabilities are gathered from the scores,
    so the tie-break changes who is chosen among equals and nothing else."""

    def __init__(self, router: TopKRouter, wanted: Router) -> None:
        self.router, self.wanted = router, wanted
        self.layer_number: int | None = None  # as RouterReplay's; Megatron sets it
        self.counted: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: _ComputeTopk | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, indices), each [T, topk], of scores [T, num_experts]."""
        if self.wanted.tie_break:
            first_token = _first_token(self.router, scores.shape[0])
            indices = untied_topk(scores.detach(), topk, num_groups, group_topk, first_token)
            values = scores.gather(1, indices)
        else:
            if default_compute_topk is None:
                raise ValueError("default_compute_topk is None: give the function that chooses without a tie-break")
            values, indices = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.wanted.guard != "off" and self.router.training and torch.is_grad_enabled():
            self._count(scores, topk, indices)
        return values, indices

    def _count(self, scores: torch.Tensor, topk: int, indices: torch.Tensor) -> None:
        number = hooks.layer_number(self.router)
        if not number:
            return
        _watched[number] = self
        with torch.no_grad():
            here = routing_statistics(scores, topk, indices)
        self.counted = here if self.counted is None else self.counted + here


def untied_topk(
    scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, first_token: int
) -> torch.Tensor:
    """int64 [T, topk]: what Megatron's top-k chooses, limited to groups or not, exact ties decided by tie_break."""
    places = tie_break(scores, first_token)
    if group_topk:
        if num_groups is None:
            raise ValueError(f"num_groups is None with group_topk={group_topk}: give the number of groups of experts")
        # group_limited_topk's own comparison, by sums of scores: places say nothing about sums.
        grouped = scores.view(scores.shape[0], num_groups, -1)
        sums = grouped.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
        # Hashes of tokens that nobody has: with those of the experts, the first group would favour some of its own.
        left_out = tie_break(sums, first_token - (1 << 31)) < num_groups - group_topk
        places = places.view_as(grouped).masked_fill(left_out.unsqueeze(-1), -1).view_as(scores)
    return places.topk(topk, dim=1).indices


def _first_token(router: TopKRouter, num_tokens: int) -> int:
    """Index of this rank's first token among all tokens of the micro-batch; tensor parallel replicas agree on it."""
    group = router.tp_dp_cp_group if hasattr(router, "tp_dp_cp_group") else None
    if group is None:
        return 0
    rank = group.rank()
    replicas = 1 if router.config.sequence_parallel or router.tp_group is None else router.tp_group.size()
    return rank // replicas * num_tokens


def router_init(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for TopKRouter.__init__ that puts guards on the routers the settings ask for."""

    @functools.wraps(original)
    def __init__(self: TopKRouter, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        wanted = settings.current().router
        if not wanted.watches:
            return
        _check_supported(self, wanted)
        self.router_replay = TopK(self, wanted)
        if wanted.guard != "off":
            # With the tie-break gates may be equal, for training to part them; NaN and Inf stay what they are.
            router_guard.attach_one(self, _gate_checker(wanted.guard, not wanted.tie_break))

    return __init__


def _gate_checker(mode: str, distinct: bool) -> Callable[[TopKRouter], None]:
    def check(router: TopKRouter) -> None:
        name = f"layer {hooks.layer_number(router)}"
        try:
            check_gates({name: router.weight}, distinct=distinct)
        except ValueError as error:
            if mode == "stop":
                raise
            log.warning("%s", error)

    return check


def _check_supported(router: TopKRouter, wanted: Router) -> None:
    config, graph = router.config, graphs.with_router(router.config)
    if wanted.guard != "off" and graph is not None:
        raise ValueError(
            f"--hybrid-ep-router-guard {wanted.guard} does not work with {graph}: a replayed graph counts no choices; "
            "drop one"
        )
    found = [
        flag
        for flag, on in (
            ("--moe-router-fusion", config.moe_router_fusion),
            ("--moe-enable-routing-replay", router.router_replay is not None),
            ("--moe-router-load-balancing-type sinkhorn", router.routing_type == "sinkhorn"),
            ("--moe-router-load-balancing-type quantile_balancing", router.routing_type == "quantile_balancing"),
        )
        if on
    ]
    if found:
        raise ValueError(
            f"router_guard and router_tie_break do not work with {', '.join(found)}, which choose experts "
            "elsewhere: drop them, or --hybrid-ep-router-guard and --hybrid-ep-router-tie-break"
        )


# ---- the reduction


def reduction(original: Callable[..., Any], values_of: Callable[..., _Access]) -> Callable[..., Any]:
    """A replacement for Megatron's reduction of auxiliary losses that carries the routers' counts along.

    values_of(arguments) -> (names, get, set): the names that are reduced, and access to a name's values."""

    @functools.wraps(original)
    def reduce(*args: Any, **keywords: Any) -> Any:
        if settings.current().router.guard == "off":
            return original(*args, **keywords)
        names, get, put = values_of(*args, **keywords)
        if not names:
            _say_local()
            original(*args, **keywords)
            judge({number: topk.counted for number, topk in _watched.items() if topk.counted is not None})
            return None
        carrier = min(names)  # the same on every rank, whatever the order of recording
        values = get(carrier)
        num_layers, width = values.numel(), 3 + _num_experts()
        table = values.new_zeros(num_layers, width, dtype=torch.float32)
        for number, topk in _watched.items():
            if topk.counted is not None:
                table[number - 1] = topk.counted
        put(carrier, torch.cat([values.float(), table.flatten()]))
        result = original(*args, **keywords)
        reduced = get(carrier)
        put(carrier, reduced[:num_layers].to(values.dtype).clone())
        rows = reduced[num_layers:].view(num_layers, width)
        seen = (rows[:, 0] > 0).nonzero().flatten().tolist()
        judge({number + 1: rows[number] for number in seen})
        return result

    return reduce


def judge(tables: Mapping[int, torch.Tensor]) -> dict[int, dict[str, float]]:
    """{layer number: {"tie_fraction", "load_ratio"}} of {layer number: statistics}; warns or raises RouterError.

    Megatron averages over data parallel ranks where it does not sum; ties and load are ratios and do not notice."""
    wanted = settings.current().router
    seen = {}
    for number, table in sorted(tables.items()):
        if number not in _guards:
            _guards[number] = RouterGuard(wanted.max_tie_fraction, wanted.max_load_ratio, action=wanted.guard)
        guard = _guards[number]
        if wanted.tie_break:
            guard.max_tie_fraction = None  # ties are taken care of
        seen[number] = guard.step(table, f"layer {number}")
    for topk in _watched.values():
        topk.counted = None
    return seen


def forget() -> None:
    """Forget all routers and their history; a new model starts anew."""
    _watched.clear()
    _guards.clear()


@functools.cache
def _say_local() -> None:
    log.warning(
        "no auxiliary loss is tracked, so that nothing is reduced that router statistics could ride on: each "
        "rank judges the tokens it routed itself"
    )


def _num_experts() -> int:
    """Columns of the table; a pipeline rank without a router asks Megatron's arguments."""
    for topk in _watched.values():
        return topk.router.config.num_moe_experts
    try:
        return importlib.import_module("megatron.training.global_vars").get_args().num_experts
    except (ImportError, AssertionError) as error:
        raise RuntimeError(
            "router_guard: this rank has routed nothing and Megatron's arguments are not there to tell "
            "the number of experts: call it after a training step"
        ) from error


def _old_tracker(track_names: str | list[str] | None = None, pg_collection: object = None) -> _Access:
    tracker = importlib.import_module(f"{hooks.MOE}.moe_utils").get_moe_layer_wise_logging_tracker()
    names = list(tracker) if track_names is None else list(track_names)

    def put(name: str, values: torch.Tensor) -> None:
        tracker[name]["values"] = values

    return names, lambda name: tracker[name]["values"], put


def _new_tracker(tracker: Any, metric_names: Sequence[str], pg_collection: object = None) -> _Access:
    def put(name: str, values: torch.Tensor) -> None:
        tracker.metrics[name].values = values

    return [n for n in metric_names if n in tracker.metrics], lambda name: tracker.metrics[name].values, put


def install(replace: Replace) -> None:
    """Put router_init and the reduction in place through `replace(owner, name, value)`, which can undo it."""
    router = importlib.import_module(f"{hooks.MOE}.router").TopKRouter
    replace(router, "__init__", router_init(router.__init__))
    owner, name = hooks.metrics_reduction()
    replace(owner, name, reduction(getattr(owner, name), _new_tracker if name == "_sync_metrics" else _old_tracker))
    forget()
