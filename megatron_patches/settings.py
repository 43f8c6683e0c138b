"""The switch and its values: what `apply()` or the command line asked of hybrid_ep, one copy a process.

Python callers set them through `apply(...)`; `python -m megatron_patches` sets them when Megatron parses
`--hybrid-ep`.
"""

import dataclasses

DISPATCH_DTYPES = ("bf16", "fp8", "mxfp8")  # hybrid_ep.quantize.CHOICES, which needs torch

BALANCE_MODES = ("off", "exact", "slow", "both")
GEMM_BACKENDS = ("auto", "torch", "te", "loop")  # hybrid_ep.moe.backends.BACKENDS, which need torch
GUARD_MODES = ("off", "warn", "stop")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Immutable settings; `None` leaves the choice to Megatron's configuration, then to hybrid_ep's default.

    * `enabled`: build our dispatcher where Megatron asks for flex/hybridep (False: Megatron's own, untouched).
    * `ranks_per_node`: ranks of the whole job in one NVLink domain (`hybrid_ep.topology`); an EP group inside a domain
      is one node, one that straddles domains unevenly is refused when its first layer is built.
    * `num_sms`: SMs granted to dispatch and to combine (blocks, on the host executor).
    * `tuning`: path of a file of `hybrid-ep tune`; a buffer that finds nothing for its device and shape in it raises.
    * `timeout_s`: seconds a wait inside hybrid_ep may last before it raises.
    * `dispatch_dtype`: what the forward dispatch sends, one of DISPATCH_DTYPES; the backward is not quantised.
    * `balance`: "off"; "exact" for clones of hot experts, micro-batch by micro-batch (`megatron_patches.balance`);
      "slow" for experts that change ranks between steps (`megatron_patches.balance_slow`); "both".
    * `spare_slots`: slots for clones on every rank. `balance_epsilon`: how far above the mean a rank may end.
    * `balance_interval`: optimizer steps from one placement to the next. `layer_updates_per_iter`: layers that move
      after one step. `balance_move_cost`: what moving one expert costs, in tokens' worth of time; an expert moves only
      if the fullest rank saves more within the interval. 0: every gain counts.
    * `load_stats`: where to write tokens per layer and expert, of iterations `load_stats_range` (first, last), both
      included; works without `enabled` too (`megatron_patches.load_stats`).
    * `grouped_gemm`: experts as grouped GEMMs without Transformer Engine (`megatron_patches.experts`).
    * `grouped_gemm_backend`: who multiplies in them, one of GEMM_BACKENDS, as in `hybrid_ep.moe.grouped_mm`.
    * `router_guard`: "off", "warn" or "stop" (`megatron_patches.router_training`), with its thresholds
      `router_max_tie_fraction`, the largest fraction of tokens that tie at the top-k boundary, and
      `router_max_load_ratio`, the largest load of an expert over the mean (None: any).
    * `router_tie_break`: among scores that are exactly equal, a hash of token and expert chooses.
    * `buffer_class`: class with the face of `hybrid_ep.HybridEPBuffer`; tests pass the reference here.
    """

    enabled: bool = True
    ranks_per_node: int | None = None
    num_sms: int | None = None
    timeout_s: float | None = None
    dispatch_dtype: str | None = None
    buffer_class: type | None = None
    balance: str = "off"
    spare_slots: int = 1
    balance_epsilon: float = 0.01
    balance_interval: int = 100
    layer_updates_per_iter: int = 1
    balance_move_cost: float = 0.0
    tuning: str | None = None
    load_stats: str | None = None
    load_stats_range: tuple[int, int] | None = None
    grouped_gemm: bool = False
    grouped_gemm_backend: str = "auto"
    router_guard: str = "off"
    router_max_tie_fraction: float = 0.5
    router_max_load_ratio: float | None = None
    router_tie_break: bool = False

    @property
    def clones(self):
        """Whether hot experts are cloned for a micro-batch."""
        return self.balance in ("exact", "both")

    @property
    def rehomes(self):
        """Whether experts change ranks between steps."""
        return self.balance in ("slow", "both")

    def __post_init__(self):
        for name, minimum in (("ranks_per_node", 1), ("num_sms", 1), ("spare_slots", 1), ("balance_interval", 1),
                              ("layer_updates_per_iter", 1)):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < minimum
            ):
                raise ValueError(
                    f"{name} is {value!r}: give an integer >= {minimum}, or None for the default"
                )
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {self.timeout_s!r}: give seconds > 0, or None for the default")
        if self.dispatch_dtype not in (None, *DISPATCH_DTYPES):
            raise ValueError(
                f"dispatch_dtype is {self.dispatch_dtype!r}: give one of {', '.join(DISPATCH_DTYPES)}, or None"
            )
        if self.balance not in BALANCE_MODES:
            raise ValueError(f"balance is {self.balance!r}: choose one of {', '.join(BALANCE_MODES)}")
        if not 0 <= self.balance_epsilon <= 1:
            raise ValueError(f"balance_epsilon is {self.balance_epsilon!r}: give a fraction from 0 to 1")
        if not 0 <= self.balance_move_cost < float("inf"):
            raise ValueError(f"balance_move_cost is {self.balance_move_cost!r}: give tokens >= 0")
        if (self.load_stats is None) != (self.load_stats_range is None):
            raise ValueError(
                f"load_stats is {self.load_stats!r} and load_stats_range {self.load_stats_range!r}: give both or none"
            )
        self._check_compute()

    def _check_compute(self):
        self._check_gemm_backend()
        if self.router_guard not in GUARD_MODES:
            raise ValueError(f"router_guard is {self.router_guard!r}: choose one of {', '.join(GUARD_MODES)}")
        if not 0 <= self.router_max_tie_fraction <= 1:
            raise ValueError(f"router_max_tie_fraction is {self.router_max_tie_fraction!r}: give a fraction 0 to 1")
        if self.router_max_load_ratio is not None and not self.router_max_load_ratio >= 1:
            raise ValueError(f"router_max_load_ratio is {self.router_max_load_ratio!r}: give 1 (balance) or more")

    def _check_gemm_backend(self):
        name = self.grouped_gemm_backend
        given = f"grouped_gemm_backend (--hybrid-ep-grouped-gemm-backend) is {name!r}"
        if name not in GEMM_BACKENDS:
            raise ValueError(f"{given}: choose one of {', '.join(GEMM_BACKENDS)}")
        if name == "auto":
            return
        if not self.grouped_gemm:
            raise ValueError(f"{given} without grouped_gemm (--hybrid-ep-grouped-gemm) and does nothing: add it")
        from hybrid_ep.moe.backends import BACKENDS

        if why := BACKENDS[name].absence():
            raise ValueError(f"{given}, but {why}: install it, or choose auto")

    @property
    def guards_routers(self):
        """Whether anything is asked of `megatron_patches.router_training`."""
        return self.router_guard != "off" or self.router_tie_break


DISABLED = Settings(enabled=False)
_current = DISABLED


def current():
    """The settings in force."""
    return _current


def configure(settings):
    """Put `settings` in force and return those they replace."""
    global _current
    previous, _current = _current, settings
    return previous
