"""Settings of what a MoE layer itself computes, its experts and its router; `settings` has those around them."""

from __future__ import annotations

import dataclasses

from megatron_patches.setting_option import SWITCH, option

GEMM_BACKENDS = ("auto", "torch", "triton", "te", "loop")  # hybrid_ep.moe.backends.BACKENDS, which need torch
GEMM_PRECISIONS = ("params", "fp8")  # hybrid_ep.moe.precisions.PRECISIONS, which needs torch
GUARD_MODES = ("off", "warn", "stop")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The routed experts' arithmetic (`megatron_patches.experts`).

    * `grouped` (grouped_gemm): experts as grouped GEMMs without Transformer Engine.
    * `backend` (grouped_gemm_backend): who multiplies in them, one of GEMM_BACKENDS, as in `hybrid_ep.moe.grouped_mm`.
    * `precision` (grouped_gemm_precision): in what they multiply, one of GEMM_PRECISIONS, as there; None: in the
      parameters' dtype, and Megatron's --fp8-format is refused, which says nothing of these experts.
    """

    grouped: bool = option(
        "grouped_gemm",
        False,
        **SWITCH,
        help="Run the routed experts as grouped GEMMs, exact for experts without tokens; needs no Transformer Engine. "
        "Checkpoints stay Megatron's.",
    )
    backend: str = option(
        "grouped_gemm_backend",
        "auto",
        choices=GEMM_BACKENDS,
        help="Who multiplies in these experts: torch's grouped GEMM, our Triton kernels, Transformer Engine's "
        "GroupedLinear (its counts wait for the device), a loop, or the first usable of torch, triton on GPUs, and "
        "loop, triton before torch where torch would wait for the device (auto, the default).",
    )

    precision: str | None = option(
        "grouped_gemm_precision",
        None,
        choices=GEMM_PRECISIONS,
        help="In what these experts multiply: their parameters' dtype (params, the default), or e4m3 with a scale for "
        "every 128 values and sums in fp32 (fp8), as DeepSeek-V3 trains, by triton or loop. Needed with Megatron's "
        "--fp8-format; parameters stay as they are, and are quantised where they are multiplied.",
    )

    def _check_precision(self) -> None:
        if self.precision is None:
            return
        given = f"grouped_gemm_precision (--hybrid-ep-grouped-gemm-precision) is {self.precision!r}"
        if self.precision not in GEMM_PRECISIONS:
            raise ValueError(f"{given}: choose one of {', '.join(GEMM_PRECISIONS)}")
        if not self.grouped:
            raise ValueError(f"{given} without grouped_gemm (--hybrid-ep-grouped-gemm) and does nothing: add it")
        if self.precision == "fp8" and self.backend not in ("auto", "triton", "loop"):
            raise ValueError(
                f"{given}, but grouped_gemm_backend (--hybrid-ep-grouped-gemm-backend) is {self.backend!r}, which "
                "multiplies in the dtype of the parameters: choose auto, triton or loop"
            )

    def __post_init__(self) -> None:
        given = f"grouped_gemm_backend (--hybrid-ep-grouped-gemm-backend) is {self.backend!r}"
        if self.backend not in GEMM_BACKENDS:
            raise ValueError(f"{given}: choose one of {', '.join(GEMM_BACKENDS)}")
        self._check_precision()
        if self.backend == "auto":
            return
        if not self.grouped:
            raise ValueError(f"{given} without grouped_gemm (--hybrid-ep-grouped-gemm) and does nothing: add it")
        from hybrid_ep.moe.backends import BACKENDS

        if why := BACKENDS[self.backend].absence():
            raise ValueError(f"{given}, but {why}: install it, or choose auto")


@dataclasses.dataclass(frozen=True)
class Router:
    """Watching routers (`megatron_patches.router_training`); the keywords of `apply` begin with `router_`.

    * `guard`: "off", "warn" or "stop", with its thresholds `max_tie_fraction`, the largest fraction of tokens that tie
      at the top-k boundary, and `max_load_ratio`, the largest load of an expert over the mean (None: any).
    * `tie_break`: among scores that are exactly equal, a hash of token and expert chooses.
    """

    guard: str = option(
        "router_guard",
        "off",
        choices=GUARD_MODES,
        help="Watch routers: gates before the first step, ties and load at every logged step.",
    )
    max_tie_fraction: float = option(
        "router_max_tie_fraction",
        0.5,
        type=float,
        metavar="FRACTION",
        help="Tokens that may tie exactly at the top-k boundary (default 0.5).",
    )
    max_load_ratio: float | None = option(
        "router_max_load_ratio",
        None,
        type=float,
        metavar="RATIO",
        help="Largest load of an expert over the mean (default: any).",
    )
    tie_break: bool = option(
        "router_tie_break",
        False,
        **SWITCH,
        help="Decide exact ties, and nothing else, by a hash of token and expert; probabilities stay as they are.",
    )

    @property
    def watches(self) -> bool:
        """Whether anything is asked of `megatron_patches.router_training`."""
        return self.guard != "off" or self.tie_break

    def __post_init__(self) -> None:
        if self.guard not in GUARD_MODES:
            raise ValueError(f"router_guard is {self.guard!r}: choose one of {', '.join(GUARD_MODES)}")
        if not 0 <= self.max_tie_fraction <= 1:
            raise ValueError(f"router_max_tie_fraction is {self.max_tie_fraction!r}: give a fraction 0 to 1")
        if self.max_load_ratio is not None and not self.max_load_ratio >= 1:
            raise ValueError(f"router_max_load_ratio is {self.max_load_ratio!r}: give 1 (balance) or more")
