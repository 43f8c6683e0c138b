"""`--hybrid-ep` and its companions in Megatron's own argument parser, on every Megatron-LM since 0.16.

`parse_args` looks up `add_megatron_arguments` when it runs, in all releases, before it calls the script's own
`extra_args_provider`: wrapping that one function adds the flags and leaves the script's provider alone. The
parsed values stay in `args` and go into `settings`, where the dispatcher reads them. Which flags there are, and what
they say, stands in the fields of `settings`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hybrid_ep.balance.statistics import parse_range
from megatron_patches import hooks, settings

MODULE = "megatron.training.arguments"
_BY_NAME = {option.name: option for option in settings.OPTIONS}


def arguments_module() -> ModuleType:
    """Megatron's argument module. Raises HookError when it is not importable or has moved."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise hooks.HookError(
            f"{MODULE} is not importable ({error}): run a script of a Megatron-LM checkout, or put "
            "its root on PYTHONPATH (the megatron-core 0.16 wheel does not contain it)"
        ) from error
    if not callable(getattr(module, "add_megatron_arguments", None)):
        raise hooks.HookError(f"{MODULE}.add_megatron_arguments moved: the --hybrid-ep flags cannot be added")
    return module


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group of flags to an argparse parser and return it."""
    group = parser.add_argument_group(title="hybrid_ep")
    group.add_argument(
        "--hybrid-ep",
        action="store_true",
        help="Dispatch MoE tokens through hybrid_ep. Needs --moe-token-dispatcher-type flex and "
        "--moe-flex-dispatcher-backend hybridep.",
    )
    for option in settings.OPTIONS:
        if option.flag is not None:
            group.add_argument(option.flag, **option.argparse)
    return parser


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """{keyword of `apply`: value} of the flags that were given, in the order of the settings."""
    values = {option.name: getattr(args, option.attribute, None) for option in settings.OPTIONS if option.flag}
    return {name: value for name, value in values.items() if value is not None}


def _flag(name: str) -> str:
    return _BY_NAME[name].flag or name


def _take_load_stats(given: dict[str, Any]) -> dict[str, Any]:
    """Move what is asked about load statistics out of `given`. ValueError when one flag lacks the other."""
    path, text = given.pop("load_stats", None), given.pop("load_stats_range", None)
    if (path is None) != (text is None):
        have, lack = ("", "-range 100-200") if text is None else ("-range", " PATH")
        raise ValueError(f"--hybrid-ep-load-stats{have} needs --hybrid-ep-load-stats{lack}: add it")
    return {} if path is None else {"load_stats": path, "load_stats_range": parse_range(text)}


def _check_compute(given: dict[str, Any]) -> None:
    """ValueError for flags around the exchange that nothing would read."""
    limits = [_flag(name) for name in ("router_max_tie_fraction", "router_max_load_ratio") if name in given]
    if limits and given.get("router_guard", "off") == "off":
        raise ValueError(f"{', '.join(limits)} without --hybrid-ep-router-guard warn or stop does nothing: add it")
    for name in ("grouped_gemm_backend", "grouped_gemm_precision"):
        if name in given and "grouped_gemm" not in given:
            raise ValueError(f"{_flag(name)} without --hybrid-ep-grouped-gemm does nothing: add it")


def _check_balance(given: dict[str, Any], args: argparse.Namespace) -> None:
    """ValueError for flags of a balancing mode that is not asked for, and for flags it does not work with."""
    mode = given.get("balance", "off")
    for modes in (settings.CLONING, settings.MIGRATING):
        needing = [_flag(name) for name in given if _BY_NAME[name].modes == modes]
        if needing and mode not in modes:
            raise ValueError(f"{', '.join(needing)} needs --hybrid-ep-balance {' or '.join(modes)}, not {mode}")
    if mode != "off" and getattr(args, "overlap_param_gather", False):
        raise ValueError(f"--hybrid-ep-balance {mode} does not work with --overlap-param-gather: drop one of them")
    if mode in settings.MIGRATING and getattr(args, "async_save", False):
        raise ValueError(f"--hybrid-ep-balance {mode} does not work with --async-save: drop one of them")


def _check_weights(given: dict[str, Any], args: argparse.Namespace) -> None:
    """ValueError for flags that only weights which travel would read, and for Megatron's that do not work with them."""
    move = given.get("move", "tokens")
    needing = [_flag(name) for name in ("weight_group", "local_experts", "weight_buffers") if name in given]
    if needing and move == "tokens":
        raise ValueError(f"{', '.join(needing)} needs --hybrid-ep-move weights or auto: add it")
    for name in ("overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp", "use_torch_fsdp2"):
        if move != "tokens" and getattr(args, name, False):
            raise ValueError(f"--hybrid-ep-move {move} does not work with --{name.replace('_', '-')}: drop one of them")


def settings_from_args(args: argparse.Namespace) -> settings.Settings:
    """`Settings` from parsed Megatron arguments. Raises ValueError when they would leave hybrid_ep unused."""
    given = _given(args)
    load_stats = _take_load_stats(given)
    _check_compute(given)
    if not args.hybrid_ep:
        if given:
            stray = ", ".join(_flag(name) for name in given)
            raise ValueError(f"{stray} without --hybrid-ep does nothing: add --hybrid-ep")
        return settings.Settings.of(enabled=False, **load_stats)
    if getattr(args, "yaml_cfg", None) is not None:
        raise ValueError("--hybrid-ep does not work with --yaml-cfg, which replaces all flags: give flags instead")
    for flag, needed in (("--moe-token-dispatcher-type", "flex"), ("--moe-flex-dispatcher-backend", "hybridep")):
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if value != needed:
            raise ValueError(f"--hybrid-ep needs {flag} {needed}, not {value}: add it")
    _check_balance(given, args)
    _check_weights(given, args)
    return settings.Settings.of(**given, **load_stats)


def wrapper(
    in_force: Callable[[settings.Settings], None],
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """A replacement for `add_megatron_arguments`: Megatron's flags and ours, in force once parsed.

    in_force: called with the settings then, to put in place what they ask for."""
    original = arguments_module().add_megatron_arguments

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_arguments(original(parser))
        parse_known_args = parser.parse_known_args  # parse_args goes through it too

        def parse_and_configure(*arguments: Any, **keywords: Any) -> tuple[argparse.Namespace, list[str]]:
            namespace, rest = parse_known_args(*arguments, **keywords)
            try:
                settings.configure(settings_from_args(namespace))
            except ValueError as error:
                parser.error(str(error))
            in_force(settings.current())
            return namespace, rest

        setattr(parser, "parse_known_args", parse_and_configure)  # noqa: B010 - an instance attribute over a method
        return parser

    return add_megatron_arguments
