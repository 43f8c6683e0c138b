"""The switch and its values: what `apply()` or the command line asked of hybrid_ep, one copy a process.

Each field is written once: its name for `apply(...)` and its `--hybrid-ep` flag with the help text stand in the field
itself (`setting_option.option`), and `flags` makes the parser's group of them. Python callers set them through
`apply(...)`; `python -m megatron_patches` sets them when Megatron parses `--hybrid-ep`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from hybrid_ep import env
from megatron_patches.layer_settings import Experts, Router
from megatron_patches.setting_option import SWITCH, Option, option

DISPATCH_DTYPES = ("bf16", "fp8", "mxfp8")  # hybrid_ep.payload.quantize.CHOICES, which needs torch

BALANCE_MODES = ("off", "exact", "slow", "both")
BALANCE_PUSHES = ("auto", "kernels", "torch")
CLONE_REACHES = ("auto", "node", "near", "anywhere")
CLONING, MIGRATING = ("exact", "both"), ("slow", "both")  # modes with clones; modes whose experts change ranks
RECOMPUTE_MODES = ("reuse", "repeat")
OVERFLOWS = ("grow", "drop", "raise")
MOVES = ("tokens", "weights", "auto")


def _check_integers(*, least: int = 1, **given: int | None) -> None:
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} is {value!r}: give an integer >= {least}, or None for the default")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Dispatch and combine. `None` leaves the choice to Megatron's configuration, then to hybrid_ep's default.

    * `ranks_per_node`: ranks of the whole job in one NVLink domain (`hybrid_ep.runtime.topology`); an EP group
      inside a domain is one node, one that straddles domains unevenly is refused when its first layer is built.
    * `num_sms`: SMs granted to dispatch and to combine (blocks, on the host executor).
    * `tuning`: path of a file of `hybrid-ep tune`; a buffer that finds nothing for its device and shape in it raises.
    * `timeout_s`: seconds a wait inside hybrid_ep may last before it raises.
    * `dispatch_dtype`: what the forward dispatch sends, one of DISPATCH_DTYPES; the backward is not quantised.
    * `latency_tokens`: most tokens of a rank's micro-batch that take the latency path (docs/latency.md): where the
      number of permuted rows is static and sequences are of one length, so that all ranks know that they do.
    * `arena_mib`: registered MiB in which dispatched rows and experts' outputs lie; without room for one it is copied
      once more (`HybridEPBuffer`). Every layer keeps one or two until its backward.
    * `async_finish`: dispatch and combine run on the buffer's own stream, and the layer's waits for them where it uses
      what they return.
    * `recompute`: under activation recompute, "reuse" the handles of a forward's first run
      (`megatron_patches.recompute`) or "repeat" its exchange.
    * `buffer_class`: class with the interface of `hybrid_ep.HybridEPBuffer`; tests pass the reference here.
    """

    ranks_per_node: int | None = option(
        "ranks_per_node",
        None,
        type=int,
        metavar="N",
        help="Ranks of the job in one NVLink domain; may exceed the expert parallel group.",
    )
    num_sms: int | None = option(
        "num_sms",
        None,
        type=int,
        metavar="N",
        help="SMs for dispatch and for combine; wins over Megatron's own setting.",
    )
    tuning: str | None = option(
        "tuning",
        None,
        metavar="FILE",
        help="What `hybrid-ep tune` wrote: SMs and chunks for this device and shape. Given SMs win over the file's.",
    )
    timeout_s: float | None = option(
        "timeout_s",
        None,
        flag="--hybrid-ep-timeout",
        type=float,
        metavar="SECONDS",
        help="Longest wait inside dispatch or combine before it raises.",
    )
    dispatch_dtype: str | None = option(
        "dispatch_dtype",
        None,
        choices=DISPATCH_DTYPES,
        help="What the forward dispatch sends: rows as they are (bf16, the default), or e4m3 with a scale for every "
        "128 values (fp8) or 32 values (mxfp8). Experts get rows of their own dtype; gradients are not quantised.",
    )
    latency_tokens: int | None = option(
        "latency_tokens",
        None,
        type=int,
        metavar="N",
        help="Micro-batches of up to N tokens a rank take the latency path, with a static "
        "number of rows: --moe-pad-expert-input-to-capacity, --moe-expert-rank-capacity-factor or "
        "--hybrid-ep-static-rows.",
    )
    arena_mib: int | None = option(
        "arena_mib",
        None,
        type=int,
        metavar="MIB",
        help="Registered memory for dispatched rows and experts' outputs, which are copied once more where it is full; "
        "0: none (default: two and a half results, at most 1024).",
    )
    async_finish: bool = option(
        "async_finish",
        False,
        **SWITCH,
        help="Dispatch and combine on a stream of their own, from where their inputs are ready to where their results "
        "are first used.",
    )
    recompute: str = option(
        "recompute",
        "reuse",
        choices=RECOMPUTE_MODES,
        help="What a recomputed forward does: go by the handles of its first run (reuse, the default), or exchange "
        "everything again (repeat).",
    )
    buffer_class: type | None = dataclasses.field(default=None, metadata={"option": Option("buffer_class", None, {})})

    @property
    def longest_wait_s(self) -> float:
        """Seconds, of whatever waits for other ranks."""
        return float(self.timeout_s or env.get("HYBRID_EP_TIMEOUT_S"))

    def __post_init__(self) -> None:
        _check_integers(ranks_per_node=self.ranks_per_node, num_sms=self.num_sms, latency_tokens=self.latency_tokens)
        _check_integers(least=0, arena_mib=self.arena_mib)
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {self.timeout_s!r}: give seconds > 0, or None for the default")
        if self.dispatch_dtype not in (None, *DISPATCH_DTYPES):
            raise ValueError(
                f"dispatch_dtype is {self.dispatch_dtype!r}: give one of {', '.join(DISPATCH_DTYPES)}, or None"
            )
        if self.recompute not in RECOMPUTE_MODES:
            raise ValueError(f"recompute is {self.recompute!r}: choose one of {', '.join(RECOMPUTE_MODES)}")
        if self.tuning:
            from hybrid_ep import tuning

            tuning.load(self.tuning, "")  # ValueError: before there is a layer


@dataclasses.dataclass(frozen=True)
class Balance:
    """The expert balancer; the keywords of `apply` are in brackets.

    * `mode` (balance): "off"; "exact" for clones of hot experts, micro-batch by micro-batch
      (`megatron_patches.balance`); "slow" for experts that change ranks between steps
      (`megatron_patches.balance_slow`); "both".
    * `spare_slots` (spare_slots): slots for clones on every rank. `epsilon` (balance_epsilon): how far above the mean
      a rank may end. `reach` (balance_clones): ranks that may hold an expert's clones: those of its owner's "node";
      "anywhere"; "near": on other nodes what the owner's has no room for; "auto": the node's, unless `static_rows`
      asks that all be level. `push` (balance_push): what brings weights to clones, and their gradients home: "kernels"
      of the ranks (`hybrid_ep.spares`); "torch", point to point; "auto": kernels where they can.
      `static_rows`: that many permuted rows always; what a micro-batch without a plan does, one of OVERFLOWS
      (`megatron_patches.static_rows`); None: as many rows as there are.
    * `interval` (balance_interval): optimizer steps from one placement to the next. `layer_updates_per_iter`: layers
      that move after one step. `move_cost` (balance_move_cost): what moving one expert costs, in tokens' worth of
      time; an expert moves only if the fullest rank saves more within the interval. 0: every gain counts. `apart`
      (balance_apart): experts whose loads rise and fall together go to different ranks.
    """

    mode: str = option(
        "balance",
        "off",
        choices=BALANCE_MODES,
        help="exact: clone hot experts into spare slots for every micro-batch. slow: move experts to other ranks "
        "between steps. both.",
    )
    spare_slots: int = option("spare_slots", 1, modes=CLONING, type=int, metavar="N", help="Slots for clones on every "
        "rank: 1 levels up to 8 experts a rank, 2 up to 16, 4 up to 32, if these are hot independently.")  # fmt: skip
    epsilon: float = option(
        "balance_epsilon", 0.01, modes=CLONING, type=float, metavar="FRACTION", help="How far above the mean ranks end."
    )
    static_rows: str | None = option(
        "static_rows",
        None,
        modes=CLONING,
        nargs="?",
        const="grow",
        choices=OVERFLOWS,
        help="Permuted rows are (1 + epsilon) x a rank's pairs; without a plan: more (grow), fewer (drop), an error.",
    )
    reach: str = option(
        "balance_clones",
        "auto",
        modes=CLONING,
        choices=CLONE_REACHES,
        help="Where clones may lie in a group of several nodes: on ranks of the owner's node, where weights travel "
        "over NVLink; anywhere; near: on other nodes what the owner's has no room for, and then on few; auto: in the "
        "node, but anywhere with --hybrid-ep-static-rows.",
    )
    push: str = option(
        "balance_push",
        "auto",
        modes=CLONING,
        choices=BALANCE_PUSHES,
        help="What brings weights to clones and their gradients home: the ranks' kernels, within a node; torch's point "
        "to point; auto: kernels where they can (exact).",
    )
    interval: int = option(
        "balance_interval", 100, modes=MIGRATING, type=int, metavar="STEPS", help="Steps between placements (slow)."
    )
    layer_updates_per_iter: int = option(
        "layer_updates_per_iter", 1, modes=MIGRATING, type=int, metavar="N", help="Layers moved a step (slow)."
    )
    move_cost: float = option(
        "balance_move_cost", 0.0, modes=MIGRATING, type=float, metavar="TOKENS", help="Cost of a moved expert (slow)."
    )
    apart: bool = option(
        "balance_apart", False, modes=MIGRATING, **SWITCH, help="Keep experts apart that are hot together (slow)."
    )

    def within_node(self, num_nodes: int) -> bool:
        """Whether clones stay on the nodes of their owners, in a group of so many nodes."""
        return num_nodes > 1 and (self.reach == "node" or (self.reach == "auto" and self.static_rows is None))

    def planner_options(self, num_nodes: int) -> dict[str, Any]:
        """Of the planner of clones. With static rows no layer above epsilon is left as it is."""
        skip = {"skip_below": min(self.epsilon, 0.03)} if self.static_rows else {}
        within = {"num_nodes": num_nodes, "within_node": self.within_node(num_nodes), "near": self.reach == "near"}
        return {"spare_slots": self.spare_slots, "epsilon": self.epsilon, **within, **skip}

    @property
    def clones(self) -> bool:
        """Whether hot experts are cloned for a micro-batch."""
        return self.mode in CLONING

    @property
    def migrates(self) -> bool:
        """Whether experts change ranks between steps."""
        return self.mode in MIGRATING

    def __post_init__(self) -> None:
        _check_integers(
            spare_slots=self.spare_slots,
            balance_interval=self.interval,
            layer_updates_per_iter=self.layer_updates_per_iter,
        )
        if self.mode not in BALANCE_MODES:
            raise ValueError(f"balance is {self.mode!r}: choose one of {', '.join(BALANCE_MODES)}")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"balance_epsilon is {self.epsilon!r}: give a fraction from 0 to 1")
        if self.static_rows not in (None, *OVERFLOWS) or (self.static_rows and not self.clones):
            said = f"static_rows is {self.static_rows!r}, balance {self.mode}"
            raise ValueError(f"{said}: give one of {', '.join(OVERFLOWS)} with exact or both, or None")
        if self.reach not in CLONE_REACHES:
            raise ValueError(f"balance_clones is {self.reach!r}: choose one of {', '.join(CLONE_REACHES)}")
        if self.push not in BALANCE_PUSHES:
            raise ValueError(f"balance_push is {self.push!r}: choose one of {', '.join(BALANCE_PUSHES)}")
        if not 0 <= self.move_cost < float("inf"):
            raise ValueError(f"balance_move_cost is {self.move_cost!r}: give tokens >= 0")


@dataclasses.dataclass(frozen=True)
class LoadStats:
    """Where to write tokens per layer and expert (load_stats), of iterations first to last (load_stats_range), both
    included; works with hybrid_ep off too (`megatron_patches.load_stats`)."""

    path: str | None = option(
        "load_stats",
        None,
        metavar="PATH",
        help="Write tokens per layer and expert here: .jsonl, or a folder in TensorRT-LLM's format. Works with every "
        "dispatcher, also without --hybrid-ep.",
    )
    iterations: tuple[int, int] | None = option(
        "load_stats_range", None, metavar="FIRST-LAST", help="Iterations to count, both included."
    )

    def __post_init__(self) -> None:
        if (self.path is None) != (self.iterations is None):
            raise ValueError(f"load_stats is {self.path!r} and load_stats_range {self.iterations!r}: give both or none")


@dataclasses.dataclass(frozen=True)
class Weights:
    """What travels between the ranks of an expert-parallel group (`megatron_patches.weights`).

    * `move`: "tokens", to their experts; "weights", experts to the tokens, which stay on their rank; "auto": what the
      roofline of `hybrid_ep.perf.dwdp` finds faster on `cluster` (weight_cluster), layer by layer.
    * `group` (weight_group): consecutive ranks that hold all experts among them, a divisor of the expert-parallel size;
      None: all. What their owners do not bring into the group is copied there once a step.
    * `local_experts`: experts that a rank has without fetching, its own included; None: its share of its group's.
    * `buffers` (weight_buffers): layers whose fetched experts are there at once, at least 2.
    """

    move: str = option(
        "move",
        "tokens",
        choices=MOVES,
        help="What travels: tokens to their experts (the default), experts' weights to the tokens, or what the "
        "roofline finds faster (auto).",
    )
    group: int | None = option(
        "weight_group",
        None,
        type=int,
        metavar="N",
        help="Ranks that hold all experts among them, and fetch layers from one another alone; a divisor of the expert "
        "parallel size (the default: that).",
    )
    local_experts: int | None = option(
        "local_experts",
        None,
        type=int,
        metavar="N",
        help="Experts that a rank has without fetching, copies of others' included; need not divide their number.",
    )
    buffers: int = option(
        "weight_buffers", 2, type=int, metavar="N", help="Layers whose fetched experts are there at once (default 2)."
    )
    cluster: str | None = option(
        "weight_cluster", None, metavar="NAME", help="The roofline's cluster (auto), a name of `hybrid-ep simulate`."
    )

    def share(self, num_experts: int, num_ranks: int) -> int:
        """The most experts that a rank has of those that its group of the expert-parallel ranks holds."""
        return -(-num_experts // (self.group or num_ranks))

    @property
    def may_move(self) -> bool:
        """Whether weights may travel."""
        return self.move != "tokens"

    def __post_init__(self) -> None:
        _check_integers(weight_group=self.group, local_experts=self.local_experts, weight_buffers=self.buffers)
        if self.move not in MOVES:
            raise ValueError(f"move is {self.move!r}: choose one of {', '.join(MOVES)}")
        if self.buffers < 2:
            raise ValueError(f"weight_buffers is {self.buffers!r}: give at least 2, one computes while one is filled")
        given = {"weight_group": self.group, "local_experts": self.local_experts}
        given["weight_buffers"] = None if self.buffers == 2 else self.buffers
        found = [name for name, value in given.items() if value is not None]
        if found and not self.may_move:
            raise ValueError(f"{', '.join(found)} without move='weights' or 'auto' (--hybrid-ep-move) does nothing")
        if (self.cluster is not None) != (self.move == "auto"):
            raise ValueError(
                f"weight_cluster (--hybrid-ep-weight-cluster) is {self.cluster!r} with move={self.move!r}: give the "
                "name of a cluster with auto, whose roofline it is, and only there"
            )
        if self.cluster is not None:
            from hybrid_ep.hardware import clusters

            clusters.get(self.cluster)  # ValueError with the names there are


@dataclasses.dataclass(frozen=True)
class Settings:
    """Immutable settings, a part for each thing that can be asked.

    `enabled`: build our dispatcher where Megatron asks for flex/hybridep (False: Megatron's own, untouched).
    """

    enabled: bool = True
    exchange: Exchange = Exchange()
    balance: Balance = Balance()
    load_stats: LoadStats = LoadStats()
    experts: Experts = Experts()
    router: Router = Router()
    weights: Weights = Weights()

    def __post_init__(self) -> None:
        if not self.weights.may_move:
            return
        said = f"move={self.weights.move!r} (--hybrid-ep-move)"
        if not self.experts.grouped:
            raise ValueError(f"{said} needs grouped_gemm (--hybrid-ep-grouped-gemm), experts that are stacks: add it")
        refused = {
            "balance (--hybrid-ep-balance)": self.balance.mode != "off",
            "dispatch_dtype (--hybrid-ep-dispatch-dtype)": self.exchange.dispatch_dtype not in (None, "bf16"),
            "async_finish (--hybrid-ep-async-finish)": self.exchange.async_finish,
        }
        found = [name for name, given in refused.items() if given]
        if found:
            raise ValueError(f"{said} does not work with {', '.join(found)}: drop them, or move tokens")

    @classmethod
    def of(cls, enabled: bool = True, **given: Any) -> Settings:
        """Settings of `apply`'s keywords. ValueError for a bad value, TypeError for a keyword nobody knows."""
        parts: dict[str, Any] = {}
        unknown = set(given)
        for part, kind in PARTS.items():
            fields = {field: made.name for field, made in _options_of(kind) if made.name in given}
            unknown -= set(fields.values())
            parts[part] = kind(**{field: given[name] for field, name in fields.items()})
        if unknown:
            raise TypeError(
                f"unknown settings {', '.join(sorted(unknown))}: give some of "
                f"{', '.join(made.name for made in OPTIONS)}"
            )
        mode = parts["balance"].mode
        for field, made in _options_of(Balance):
            idle = made.name in given and made.modes is not None and mode not in made.modes
            if idle and getattr(parts["balance"], field) != getattr(Balance, field):
                modes = " or ".join(f"balance={one!r}" for one in made.modes or ())
                raise ValueError(f"{made.name}={given[made.name]!r} with balance={mode!r} does nothing: give {modes}")
        return cls(enabled, **parts)

    def flat(self) -> dict[str, Any]:
        """Every value under its keyword of `apply`, and `enabled`."""
        values = {
            made.name: getattr(getattr(self, part), field)
            for part, kind in PARTS.items()
            for field, made in _options_of(kind)
        }
        return {"enabled": self.enabled, **values}


def _options_of(kind: type[Any]) -> Iterator[tuple[str, Option]]:
    """(field, option) of one part of the settings."""
    return ((field.name, field.metadata["option"]) for field in dataclasses.fields(kind))


PARTS: dict[str, type[Any]] = {
    "exchange": Exchange,
    "balance": Balance,
    "load_stats": LoadStats,
    "experts": Experts,
    "router": Router,
    "weights": Weights,
}
OPTIONS: tuple[Option, ...] = tuple(made for kind in PARTS.values() for _, made in _options_of(kind))

DISABLED = Settings(enabled=False)
_current = DISABLED


def current() -> Settings:
    """The settings in force."""
    return _current


def configure(settings: Settings) -> Settings:
    """Put `settings` in force and return those they replace."""
    global _current
    previous, _current = _current, settings
    return previous
