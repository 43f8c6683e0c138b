"""Settings: one field, one keyword, one flag; and the record of what was patched."""

from __future__ import annotations

import argparse
import types
from unittest import mock

import pytest
import torch

from hybrid_ep.balance import MicrobatchOptions
from megatron_patches import buffers, cpu, flags, manager, settings
from megatron_patches.patch_set import PatchSet

pytestmark = pytest.mark.version_free


def test_every_keyword_reaches_its_field_and_comes_back():
    given = {
        "ranks_per_node": 4,
        "balance": "both",
        "spare_slots": 2,
        "balance_clones": "node",
        "balance_interval": 7,
        "load_stats": "p.jsonl",
        "load_stats_range": (1, 2),
        "grouped_gemm": True,
        "router_guard": "warn",
        "router_max_load_ratio": 3.0,
    }
    made = settings.Settings.of(**given)
    assert (made.exchange.ranks_per_node, made.balance.mode, made.router.guard) == (4, "both", "warn")
    flat = made.flat()
    assert {name: flat[name] for name in given} == given and flat["enabled"]
    assert set(flat) == {"enabled", *(option.name for option in settings.OPTIONS)}
    assert settings.Settings.of() == settings.Settings() and hash(made) == hash(settings.Settings.of(**given))


@pytest.mark.parametrize("asynchronous, overlap, streams", [(False, False, 1), (True, False, 2), (False, True, 2)])
@pytest.mark.parametrize("by_variable", [False, True])
def test_the_arena_of_a_gpu_is_for_as_many_streams_as_a_layer_has(
    asynchronous, overlap, streams, by_variable, monkeypatch
):
    """On hosts, and of the default's size, nothing is said of them."""
    config = types.SimpleNamespace(overlap_moe_expert_parallel_comm=overlap)
    layer = types.SimpleNamespace(asynchronous=asynchronous, config=config, settings=settings.Settings.of())
    assert manager.HybridEPManager._streams(layer, types.SimpleNamespace(is_cuda=True)) == {}, "of the default size"
    if by_variable:
        monkeypatch.setenv("HYBRID_EP_ARENA_MIB", "2048")
    else:
        layer.settings = settings.Settings.of(arena_mib=2048)
    of_gpu = manager.HybridEPManager._streams(layer, types.SimpleNamespace(is_cuda=True))
    assert of_gpu == ({} if streams == 1 else {"arena_streams": streams})
    assert manager.HybridEPManager._streams(layer, types.SimpleNamespace(is_cuda=False)) == {}
    made = buffers._create(None, 64, 8, 2, None, settings.Settings.of(buffer_class=dict), of_gpu)
    assert made.get("arena_streams", 1) == streams
    monkeypatch.setattr(buffers, "_buffers", {})
    asked = {"hidden": 64, "dtype": torch.bfloat16, "num_local_experts": 2, "num_tokens": 8}
    wanted = settings.Settings.of(buffer_class=dict)
    layers = [buffers.get(None, **asked, wanted=wanted, configured=of) for of in (of_gpu, {}, of_gpu)]
    assert layers[0] is layers[2] and (layers[0] is layers[1]) == (streams == 1), "of models of one process, too"


@pytest.mark.parametrize("mib", [None, 0, 96])
def test_the_arena_s_size_reaches_the_buffer(mib):
    asked = settings.Settings.of(arena_mib=mib, buffer_class=dict)
    made = buffers._create(None, 64, 8, 2, None, asked)
    assert made.get("arena_mib") == mib and ("arena_mib" in made) == (mib is not None)
    assert flags.settings_from_args(_parsed(["--hybrid-ep-arena-mib", "96"])).exchange.arena_mib == 96
    with pytest.raises(ValueError, match="arena_mib is -1: give an integer >= 0"):
        settings.Settings.of(arena_mib=-1)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"spare_slots": 4}, "spare_slots=4 with balance='off' does nothing: give balance='exact' or balance='both'"),
        ({"balance": "exact", "balance_interval": 5}, "balance_interval=5 with balance='exact' does nothing: give bal"),
        ({"balance": "slow", "balance_clones": "node"}, "balance_clones='node' with balance='slow' does nothing"),
        ({"tuning": "/nosuch.json"}, "tuning='/nosuch.json' cannot be read"),
    ],
)
def test_a_keyword_that_nothing_would_read_is_refused(given, text):
    with pytest.raises(ValueError, match=text):
        settings.Settings.of(**given)
    assert settings.Settings.of(balance="off", spare_slots=1) == settings.Settings(), "its default says nothing"


def test_an_unknown_keyword_is_named_with_those_there_are():
    with pytest.raises(TypeError, match="unknown settings balanse: give some of ranks_per_node, .*balance"):
        settings.Settings.of(balanse="exact")


def test_every_option_but_the_buffer_class_has_a_flag_of_its_own():
    parser = flags.add_arguments(argparse.ArgumentParser())
    parsed = {name: action for action in parser._actions for name in action.option_strings}
    assert len({option.flag for option in settings.OPTIONS}) == len(settings.OPTIONS)
    for option in settings.OPTIONS:
        if option.name == "buffer_class":
            assert option.flag is None
        else:
            assert parsed[option.flag].dest == option.attribute and parsed[option.flag].default is None


def test_patches_are_known_by_the_part_that_made_them_and_undone_newest_first():
    patches, order = PatchSet(), []
    owner = types.ModuleType("owner")
    owner.kept = "before"
    patches.replace("one", owner, "kept", "first")
    patches.replace("two", owner, "kept", "second")
    patches.replace("two", owner, "new", 1)
    patches.record("three", "elsewhere", "thing", lambda: order.append(owner.kept))
    assert "one" in patches and "two" in patches and "four" not in patches
    assert patches.describe() == ("one: owner.kept", "two: owner.kept", "two: owner.new", "three: elsewhere.thing")
    patches.revert()
    assert order == ["second"] and owner.kept == "before" and not hasattr(owner, "new")
    assert "one" not in patches and patches.describe() == ()


@pytest.mark.parametrize(
    "given, text",
    [
        (["--hybrid-ep-local-experts", "3"], "--hybrid-ep-local-experts needs --hybrid-ep-move weights or auto"),
        (["--hybrid-ep-move", "weights", "--overlap-grad-reduce"], "does not work with --overlap-grad-reduce"),
        (["--hybrid-ep-move", "weights", "--overlap-param-gather"], "does not work with --overlap-param-gather"),
        (["--hybrid-ep-move", "weights"], "needs grouped_gemm"),
    ],
)
def test_flags_of_weights_that_travel(given, text):
    with pytest.raises(ValueError, match=text):
        flags.settings_from_args(_parsed(given))


def test_flags_of_weights_reach_the_settings():
    asked = ["--hybrid-ep-grouped-gemm", "--hybrid-ep-move", "auto", "--hybrid-ep-weight-cluster", "gb200_nvl72"]
    asked += ["--hybrid-ep-weight-group", "4", "--hybrid-ep-local-experts", "9", "--hybrid-ep-weight-buffers", "3"]
    made = flags.settings_from_args(_parsed(asked)).weights
    assert (made.move, made.group, made.local_experts, made.buffers, made.cluster) == ("auto", 4, 9, 3, "gb200_nvl72")
    assert made.may_move and not settings.Settings().weights.may_move


def _parsed(given):
    parser = flags.add_arguments(argparse.ArgumentParser())
    for flag in ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"):
        parser.add_argument(flag)
    for flag in ("--overlap-grad-reduce", "--overlap-param-gather"):
        parser.add_argument(flag, action="store_true")
    common = ["--hybrid-ep", "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]
    return parser.parse_args(common + given)


@pytest.mark.parametrize(
    "reach, static_rows, within", [("auto", None, True), ("auto", "grow", False), ("node", "grow", True)]
)
def test_where_clones_may_lie(reach, static_rows, within):
    balance = settings.Balance(mode="exact", reach=reach, static_rows=static_rows)
    assert balance.within_node(2) is within and not balance.within_node(1)
    for anywhere in ("near", "anywhere"):
        far = settings.Balance(mode="exact", reach=anywhere)
        assert not far.within_node(2) and MicrobatchOptions(**far.planner_options(2)).near is (anywhere == "near")
    options = MicrobatchOptions(**balance.planner_options(2))
    assert (options.num_nodes, options.within_node) == (2, within)
    assert not MicrobatchOptions(
        **balance.planner_options(1)
    ).within_node  # one node: the whole planner, its search too


def test_the_flag_of_where_clones_may_lie():
    both = ["--hybrid-ep-balance", "both", "--hybrid-ep-balance-clones", "anywhere"]
    assert flags.settings_from_args(_parsed(both)).balance.reach == "anywhere"
    assert settings.Settings().balance.reach == "auto"
    with pytest.raises(
        ValueError, match="--hybrid-ep-balance-clones needs --hybrid-ep-balance exact or both, not slow"
    ):
        flags.settings_from_args(_parsed(["--hybrid-ep-balance", "slow", "--hybrid-ep-balance-clones", "node"]))
    with pytest.raises(ValueError, match="balance_clones is 'far': choose one of auto, node, near, anywhere"):
        settings.Settings.of(balance="exact", balance_clones="far")


@pytest.mark.parametrize("asks", ["fp8", "fp4", "use_transformer_engine_op_fuser", "moe_use_grouped_tensor"])
def test_groups_are_padded_for_whoever_asks(monkeypatch, asks):
    """moe_use_grouped_tensor is of Megatron-Core's main branch, whose experts leave padding to the dispatcher."""
    monkeypatch.setattr(manager, "get_align_size_for_quantization", lambda config: 256)
    assert manager._pad_multiple(types.SimpleNamespace(fp8=None), own_experts=False) is None
    asking = types.SimpleNamespace(**{"fp8": None, asks: "e4m3"})
    assert manager._pad_multiple(asking, own_experts=False) == 256
    assert manager._pad_multiple(asking, own_experts=True) is None, "groups of any size are multiplied"


def test_names_that_hold_no_class_without_transformer_engine_get_one():
    """Megatron-Core's main branch asks MTP's linear for its class; releases that do not ask keep what they have."""

    def asks(module):
        return isinstance(module, (layers.InferenceColumnParallelLinear, layers.InferenceLayerNormColumnParallelLinear))

    names = {
        "InferenceColumnParallelLinear": mock.MagicMock(),
        "InferenceLayerNormColumnParallelLinear": torch.nn.Bilinear,
    }
    layers = types.SimpleNamespace(**names, is_inference_column_parallel_linear=asks)
    linear, older = torch.nn.Linear(1, 1), types.SimpleNamespace(**names)
    with pytest.raises(TypeError):
        asks(linear)
    for each in (layers, older):
        cpu._name_classes(each)
    assert not asks(linear) and asks(torch.nn.Bilinear(1, 1, 1))
    assert vars(older) == names
