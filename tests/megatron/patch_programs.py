"""What one rank does in the tests of apply, revert, status, the version guard and the flags: all of it
changes the process, so each runs in a world of one rank that ends afterwards."""

import argparse
import contextlib
import importlib
import io
import json
import sys
import tempfile
import types
import warnings

import pytest

import megatron_patches
from hybrid_ep import tuning
from megatron_patches import cpu, flags, hooks, parts, settings

ARGUMENTS = "megatron.training.arguments"


def modules():
    """(moe_layer, token_dispatcher, fused_a2a)"""
    return [importlib.import_module(f"{hooks.MOE}.{name}") for name in ("moe_layer", "token_dispatcher", "fused_a2a")]


def snapshot():
    """Identity of every global of the modules a patch may touch, and of deep_ep."""
    facts = {(m.__name__, name): id(value) for m in modules() for name, value in vars(m).items()}
    facts["deep_ep"] = id(sys.modules.get("deep_ep"))
    return facts


def apply_and_revert(hook):
    """Twice applied, once reverted: nothing is left. Returns the printed status of each moment."""
    before = snapshot()
    pages = [str(megatron_patches.status())]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FutureWarning)
        first = megatron_patches.apply({name: former for former, name in hooks.FORMER_NAMES.items()}[hook])
    assert len([w for w in said if hook in str(w.message)]) == 1  # the name of another release, which still works
    during = snapshot()
    second = megatron_patches.apply(hook)
    assert during == snapshot() and first == second and first.applied and first.hook == hook
    changed = {key for key in before if before[key] != during.get(key)}
    assert changed, "nothing was patched"
    if hook == "token_dispatcher":
        assert changed == {(f"{hooks.MOE}.moe_layer", "MoEFlexTokenDispatcher")}
    else:
        fused, tokens = modules()[2], modules()[1]
        assert fused.HAVE_HYBRIDEP and callable(tokens.hybrid_ep_dispatch)
        assert fused.HybridEPBuffer is sys.modules["deep_ep"].HybridEPBuffer
    pages.append(str(megatron_patches.status()))
    other = "deep_ep" if hook == "token_dispatcher" else "token_dispatcher"
    assert "in force" in message(ValueError, megatron_patches.apply, other)
    assert not megatron_patches.revert().applied and snapshot() == before
    assert megatron_patches.apply(other).hook == other
    megatron_patches.revert()
    assert snapshot() == before and settings.current() == settings.DISABLED
    pages.append(str(megatron_patches.revert()))
    return pages


def message(kind, function, *args, **keywords):
    """The text of the exception `function` must raise."""
    with pytest.raises(kind) as raised:
        function(*args, **keywords)
    return str(raised.value)


def bad_arguments():
    """One message for each wrong argument of apply."""
    calls = (
        {"hook": "s2"},
        {"ranks_per_node": 0},
        {"ranks_per_node": 2.0},
        {"num_sms": -1},
        {"timeout_s": 0},
        {"hook": "deep_ep", "ranks_per_node": 2},
        {"hook": "deep_ep", "command_line": True},
    )
    texts = [message(ValueError, megatron_patches.apply, **call) for call in calls]
    assert not megatron_patches.status().applied
    return texts


def fake_version(major, minor):
    """The refusal of another megatron-core release; nothing may have changed."""
    info = importlib.import_module("megatron.core.package_info")
    info.MAJOR, info.MINOR = major, minor
    before = snapshot()
    texts = [message(hooks.HookError, megatron_patches.apply, hook) for hook in ("token_dispatcher", "deep_ep")]
    assert snapshot() == before and not megatron_patches.status().applied
    return texts


def moved_hooks():
    """The refusal of each hook when it has moved, by name."""
    layer, tokens, fused = modules()
    flex = tokens.MoEFlexTokenDispatcher
    texts = {}

    def refused(name, hook="token_dispatcher"):
        before = snapshot()
        texts[name] = message(hooks.HookError, megatron_patches.apply, hook)
        assert snapshot() == before
        assert hooks.check((name,))[name] != "ok"

    with replaced(layer, "MoEFlexTokenDispatcher", None):
        refused("moe_layer")
    with replaced(flex, "__init__", lambda self, num_local_experts, config: None):
        refused("moe_layer")
    with replaced(flex, "combine_postprocess", None):
        refused("base_class")
    with replaced(hooks, "MANAGER_INTERFACE", hooks.MANAGER_INTERFACE - {"dispatched_probs"}):
        refused("manager_interface")
    config = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    with replaced(config, "__annotations__", {}):
        refused("backend_name")
    with replaced(fused, "hybrid_ep_dispatch", None, delete=True):
        refused("fused_a2a", "deep_ep")
    assert megatron_patches.apply().applied  # and all is well again
    return texts


@contextlib.contextmanager
def replaced(owner, name, value, delete=False):
    """Set or delete an attribute for a while."""
    before = getattr(owner, name)
    if delete:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def failed_install_is_undone():
    """A failure in the middle of apply leaves nothing behind."""
    before = snapshot()

    def break_off():
        parts.PATCHES.replace("dispatcher", modules()[0], "MoEFlexTokenDispatcher", object)
        raise OSError("no space")

    with replaced(parts, "install_dispatcher", break_off):
        assert message(OSError, megatron_patches.apply) == "no space"
    assert snapshot() == before and not megatron_patches.status().applied
    return True


def cpu_refuses_a_gpu():
    """The CPU pieces do not install where torch sees CUDA."""
    import torch

    with replaced(torch.cuda, "is_available", lambda: True), replaced(torch.cuda, "device_count", lambda: 8):
        return message(RuntimeError, cpu.install)


def fake_arguments_module():
    """megatron.training.arguments as every release has it, in small: parse_args looks up
    add_megatron_arguments."""
    module = types.ModuleType(ARGUMENTS)

    def add_megatron_arguments(parser):
        parser.add_argument("--moe-token-dispatcher-type", default="allgather")
        parser.add_argument("--moe-flex-dispatcher-backend", default="deepep")
        parser.add_argument("--yaml-cfg", default=None)
        return parser

    def parse_args(extra_args_provider=None, ignore_unknown_args=False, argv=()):
        parser = module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        return parser.parse_known_args(argv)[0] if ignore_unknown_args else parser.parse_args(argv)

    module.add_megatron_arguments, module.parse_args = add_megatron_arguments, parse_args
    sys.modules.setdefault("megatron.training", types.ModuleType("megatron.training"))
    sys.modules[ARGUMENTS] = module
    return module


FLEX = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]


def parsed_flags():
    """Flags through Megatron's parser shape: values, the script's own provider, off by default, refusals."""
    module = fake_arguments_module()
    original = module.add_megatron_arguments
    megatron_patches.apply(command_line=True)
    assert not settings.current().enabled, "off until --hybrid-ep is given"

    def provider(parser):
        parser.add_argument("--own", type=int, default=0)
        return parser

    tuned = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115 - gone with this process
    json.dump({"schema": tuning.SCHEMA, "entries": []}, tuned)
    tuned.flush()
    full = [
        "--hybrid-ep",
        "--hybrid-ep-ranks-per-node",
        "4",
        "--hybrid-ep-num-sms",
        "24",
        "--hybrid-ep-timeout",
        "7.5",
        "--hybrid-ep-dispatch-dtype",
        "mxfp8",
        "--hybrid-ep-tuning",
        tuned.name,
    ]
    args = module.parse_args(provider, argv=FLEX + full + ["--own", "3"])
    assert (args.own, args.hybrid_ep, args.hybrid_ep_ranks_per_node) == (3, True, 4)
    assert (args.hybrid_ep_num_sms, args.hybrid_ep_timeout) == (24, 7.5)
    assert settings.current() == settings.Settings.of(
        ranks_per_node=4, num_sms=24, timeout_s=7.5, dispatch_dtype="mxfp8", tuning=tuned.name
    )
    args = module.parse_args(provider, ignore_unknown_args=True, argv=["--unknown"])
    assert not args.hybrid_ep and settings.current() == settings.DISABLED
    errors = []
    for argv in (
        ["--hybrid-ep"],
        FLEX[:2] + ["--hybrid-ep"],
        ["--hybrid-ep-timeout", "5"],
        ["--hybrid-ep-dispatch-dtype", "fp8"],
        ["--hybrid-ep-tuning", "t.json"],
        FLEX + ["--hybrid-ep", "--hybrid-ep-dispatch-dtype", "fp4"],
        FLEX + ["--hybrid-ep", "--hybrid-ep-num-sms", "0"],
        FLEX + ["--hybrid-ep", "--yaml-cfg", "x"],
    ):
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as stop:
            module.parse_args(provider, argv=argv)
        assert stop.value.code == 2
        errors.append(stderr.getvalue().splitlines()[-1])
    megatron_patches.revert()
    assert module.add_megatron_arguments is original
    return errors


def missing_arguments_module():
    """Scripts need megatron.training; without it the launcher says so."""
    sys.modules[ARGUMENTS] = None
    text = message(hooks.HookError, flags.arguments_module)
    assert message(hooks.HookError, megatron_patches.apply, command_line=True) == text
    assert not megatron_patches.status().applied
    return text
