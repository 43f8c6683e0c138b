"""`--hybrid-ep` and its companions in Megatron's own argument parser, on every Megatron-LM since 0.16.

`parse_args` looks up `add_megatron_arguments` when it runs, in all releases, before it calls the script's own
`extra_args_provider`: wrapping that one function adds the flags and leaves the script's provider alone. The
parsed values stay in `args` and go into `settings`, where the dispatcher reads them.
"""

import functools
import importlib

from megatron_patches import load_stats, patch, seams, settings

MODULE = "megatron.training.arguments"


def arguments_module():
    """Megatron's argument module. Raises SeamError when it is not importable or has moved."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise seams.SeamError(
            f"{MODULE} is not importable ({error}): run a script of a Megatron-LM checkout, or put "
            "its root on PYTHONPATH (the megatron-core 0.16 wheel does not contain it)"
        ) from error
    if not callable(getattr(module, "add_megatron_arguments", None)):
        raise seams.SeamError(f"{MODULE}.add_megatron_arguments moved: the --hybrid-ep flags cannot be added")
    return module


def add_arguments(parser):
    """Add our group of flags to an argparse parser and return it."""
    group = parser.add_argument_group(title="hybrid_ep")
    group.add_argument(
        "--hybrid-ep",
        action="store_true",
        help="Dispatch MoE tokens through hybrid_ep. Needs --moe-token-dispatcher-type flex and "
        "--moe-flex-dispatcher-backend hybridep.",
    )
    group.add_argument(
        "--hybrid-ep-ranks-per-node",
        type=int,
        default=None,
        metavar="N",
        help="Ranks of the job in one NVLink domain; may exceed the expert parallel group.",
    )
    group.add_argument(
        "--hybrid-ep-num-sms",
        type=int,
        default=None,
        metavar="N",
        help="SMs for dispatch and for combine; wins over Megatron's own setting.",
    )
    group.add_argument(
        "--hybrid-ep-tuning",
        default=None,
        metavar="FILE",
        help="What `hybrid-ep tune` wrote: SMs and chunks for this device and shape. Given SMs win over the file's.",
    )
    group.add_argument(
        "--hybrid-ep-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="Longest wait inside dispatch or combine before it raises.",
    )
    group.add_argument(
        "--hybrid-ep-dispatch-dtype",
        choices=settings.DISPATCH_DTYPES,
        default=None,
        help="What the forward dispatch sends: rows as they are (bf16, the default), or e4m3 with a scale for every "
        "128 values (fp8) or 32 values (mxfp8). Experts get rows of their own dtype; gradients are not quantised.",
    )
    group.add_argument(
        "--hybrid-ep-balance",
        choices=settings.BALANCE_MODES,
        default=None,
        help="exact: clone hot experts into spare slots for every micro-batch. slow: move experts to other ranks "
        "between steps. both.",
    )
    group.add_argument(
        "--hybrid-ep-spare-slots", type=int, default=None, metavar="N", help="Slots for clones on every rank."
    )
    group.add_argument(
        "--hybrid-ep-balance-epsilon",
        type=float,
        default=None,
        metavar="FRACTION",
        help="How far above the mean a rank may end.",
    )
    group.add_argument(
        "--hybrid-ep-balance-interval", type=int, default=None, metavar="STEPS", help="Steps between placements (slow)."
    )
    group.add_argument(
        "--hybrid-ep-layer-updates-per-iter", type=int, default=None, metavar="N", help="Layers moved a step (slow)."
    )
    group.add_argument(
        "--hybrid-ep-balance-move-cost",
        type=float,
        default=None,
        metavar="TOKENS",
        help="What moving an expert costs, in tokens' worth of time (slow).",
    )
    load_stats.add_arguments(group)
    _add_compute_arguments(group)
    return parser


# Flag of a mode -> the setting it fills.
_OF_CLONES = {"--hybrid-ep-spare-slots": "spare_slots", "--hybrid-ep-balance-epsilon": "balance_epsilon"}
_OF_REHOMING = {
    "--hybrid-ep-balance-interval": "balance_interval",
    "--hybrid-ep-layer-updates-per-iter": "layer_updates_per_iter",
    "--hybrid-ep-balance-move-cost": "balance_move_cost",
}


def _balance_settings(args):
    """dict of the balancer's settings that were given. ValueError for flags of a mode that is not asked for."""
    mode = getattr(args, "hybrid_ep_balance", None) or "off"
    chosen = {"balance": mode}
    for flags, modes in ((_OF_CLONES, ("exact", "both")), (_OF_REHOMING, ("slow", "both"))):
        given = {flag: value for flag in flags if (value := getattr(args, _attribute(flag), None)) is not None}
        if given and mode not in modes:
            raise ValueError(f"{', '.join(given)} needs --hybrid-ep-balance {' or '.join(modes)}, not {mode}")
        chosen |= {flags[flag]: value for flag, value in given.items()}
    if mode != "off" and getattr(args, "overlap_param_gather", False):
        raise ValueError(f"--hybrid-ep-balance {mode} does not work with --overlap-param-gather: drop one of them")
    if mode in ("slow", "both") and getattr(args, "async_save", False):
        raise ValueError(f"--hybrid-ep-balance {mode} does not work with --async-save: drop one of them")
    return chosen


def _attribute(flag):
    return flag.lstrip("-").replace("-", "_")


# flag -> field of Settings, for what happens around the exchange
COMPUTE = {
    "--hybrid-ep-grouped-gemm": "grouped_gemm",
    "--hybrid-ep-grouped-gemm-backend": "grouped_gemm_backend",
    "--hybrid-ep-router-guard": "router_guard",
    "--hybrid-ep-router-max-tie-fraction": "router_max_tie_fraction",
    "--hybrid-ep-router-max-load-ratio": "router_max_load_ratio",
    "--hybrid-ep-router-tie-break": "router_tie_break",
}


def _add_compute_arguments(group):
    switch = {"action": "store_const", "const": True, "default": None}
    number = {"type": float, "default": None}
    group.add_argument("--hybrid-ep-grouped-gemm", **switch,
                       help="Run the routed experts as grouped GEMMs, exact for experts without tokens; needs no "
                       "Transformer Engine. Checkpoints stay Megatron's.")
    group.add_argument("--hybrid-ep-grouped-gemm-backend", choices=settings.GEMM_BACKENDS, default=None,
                       help="Who multiplies in these experts: torch's grouped GEMM, Transformer Engine's GroupedLinear "
                       "(its counts wait for the device), a loop, or the first usable of torch and loop (auto, the "
                       "default).")
    group.add_argument("--hybrid-ep-router-guard", choices=settings.GUARD_MODES, default=None,
                       help="Watch routers: gates before the first step, ties and load at every logged step.")
    group.add_argument("--hybrid-ep-router-max-tie-fraction", metavar="FRACTION", **number,
                       help="Tokens that may tie exactly at the top-k boundary (default 0.5).")
    group.add_argument("--hybrid-ep-router-max-load-ratio", metavar="RATIO", **number,
                       help="Largest load of an expert over the mean (default: any).")
    group.add_argument("--hybrid-ep-router-tie-break", **switch,
                       help="Decide exact ties, and nothing else, by a hash of token and expert; probabilities stay as "
                       "they are.")


def _compute_from_args(args):
    """{flag: value} of what was given around the exchange; ValueError for values that nothing would read."""
    given = {flag: getattr(args, "hybrid_ep_" + field, None) for flag, field in COMPUTE.items()}
    limits = [flag for flag, value in given.items() if "-max-" in flag and value is not None]
    if limits and given["--hybrid-ep-router-guard"] in (None, "off"):
        raise ValueError(f"{', '.join(limits)} without --hybrid-ep-router-guard warn or stop does nothing: add it")
    if given["--hybrid-ep-grouped-gemm-backend"] and not given["--hybrid-ep-grouped-gemm"]:
        raise ValueError("--hybrid-ep-grouped-gemm-backend without --hybrid-ep-grouped-gemm does nothing: add it")
    return given


def settings_from_args(args):
    """`Settings` from parsed Megatron arguments. Raises ValueError when they would leave hybrid_ep unused."""
    given = {
        "--hybrid-ep-ranks-per-node": args.hybrid_ep_ranks_per_node,
        "--hybrid-ep-num-sms": args.hybrid_ep_num_sms,
        "--hybrid-ep-tuning": args.hybrid_ep_tuning,
        "--hybrid-ep-timeout": args.hybrid_ep_timeout,
        "--hybrid-ep-dispatch-dtype": args.hybrid_ep_dispatch_dtype,
    }
    for flag in ("--hybrid-ep-balance", *_OF_CLONES, *_OF_REHOMING):
        given[flag] = getattr(args, _attribute(flag), None)
    compute = _compute_from_args(args)
    given |= compute
    if not args.hybrid_ep:
        stray = [flag for flag, value in given.items() if value is not None]
        if stray:
            raise ValueError(f"{', '.join(stray)} without --hybrid-ep does nothing: add --hybrid-ep")
        return settings.Settings(enabled=False, **load_stats.from_args(args))
    if getattr(args, "yaml_cfg", None) is not None:
        raise ValueError(
            "--hybrid-ep does not work with --yaml-cfg, which replaces all flags: give flags instead"
        )
    for flag, needed in (
        ("--moe-token-dispatcher-type", "flex"),
        ("--moe-flex-dispatcher-backend", "hybridep"),
    ):
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value != needed:
            raise ValueError(f"--hybrid-ep needs {flag} {needed}, not {value}: add it")
    return settings.Settings(
        enabled=True,
        ranks_per_node=args.hybrid_ep_ranks_per_node,
        num_sms=args.hybrid_ep_num_sms,
        tuning=args.hybrid_ep_tuning,
        timeout_s=args.hybrid_ep_timeout,
        dispatch_dtype=args.hybrid_ep_dispatch_dtype,
        **_balance_settings(args),
        **{COMPUTE[flag]: value for flag, value in compute.items() if value is not None},
        **load_stats.from_args(args),
    )


def wrapper():
    """A replacement for `add_megatron_arguments`: Megatron's flags and ours, in force once parsed."""
    original = arguments_module().add_megatron_arguments

    @functools.wraps(original)
    def add_megatron_arguments(parser):
        parser = add_arguments(original(parser))
        parse_known_args = parser.parse_known_args  # parse_args goes through it too

        def parse_and_configure(*arguments, **keywords):
            namespace, rest = parse_known_args(*arguments, **keywords)
            try:
                settings.configure(settings_from_args(namespace))
            except ValueError as error:
                parser.error(str(error))
            patch.install_compute(settings.current())
            return namespace, rest

        parser.parse_known_args = parse_and_configure
        return parser

    return add_megatron_arguments
