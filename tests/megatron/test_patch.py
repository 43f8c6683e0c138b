"""apply, revert, status, the guard against unknown Megatron-Core releases, and the flags."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import parity_world
import pytest
from test_dispatcher import Program

from megatron_patches.__main__ import main

HERE = Path(__file__).resolve().parent
MEGATRON_MINOR = int(importlib.metadata.version("megatron-core").split(".")[1])


def run(name, *arguments):
    return parity_world.run_world(Program(name, "patch_programs"), 1, arguments, timeout_s=120)[0]


@pytest.mark.parametrize("hook", ["token_dispatcher", "deep_ep"])
def test_apply_is_idempotent_and_revert_restores_everything(hook):
    before, during, after = run("apply_and_revert", hook)
    version = importlib.metadata.version("megatron-core")
    for page in (before, during, after):
        assert f"megatron-core  {version}" in page
    assert "hook           none" in before and "patched        nothing" in before and "moe_layer: ok" in before
    assert f"hook           {hook}" in during and ": ok" in during
    assert ("moe_layer.MoEFlexTokenDispatcher" if hook == "token_dispatcher" else "deep_ep") in during
    assert "patched        nothing" in after


def test_bad_arguments_name_the_argument_and_the_remedy():
    texts = run("bad_arguments")
    for text, name in zip(
        texts,
        ("hook", "ranks_per_node", "ranks_per_node", "num_sms", "timeout_s", "'deep_ep'", "'deep_ep'"),
        strict=True,
    ):
        assert name in text


@pytest.mark.parametrize("version", [(0, 15), (0, 20), (1, 17)])
def test_unknown_versions_are_refused(version):
    for text in run("fake_version", *version):
        assert f"megatron-core {version[0]}.{version[1]}." in text and "0.16 - 0.19" in text
        assert "nothing was changed" in text


def test_a_moved_hook_is_named():
    texts = run("moved_hooks")
    assert set(texts) == {"moe_layer", "base_class", "manager_interface", "backend_name", "fused_a2a"}
    for name, text in texts.items():
        assert f"{name}: " in text and "nothing was changed" in text
    assert "combine_postprocess" in texts["base_class"]
    assert "dispatched_probs" in texts["manager_interface"]


def test_a_failure_inside_apply_is_undone():
    run("failed_install_is_undone")


def test_cpu_pieces_refuse_a_machine_with_a_gpu():
    assert "without a GPU" in run("cpu_refuses_a_gpu")


def test_flags_reach_args_and_settings_and_refuse_being_ignored():
    errors = run("parsed_flags")
    assert len(errors) == 8
    expected = (
        "--moe-token-dispatcher-type flex",
        "--moe-flex-dispatcher-backend hybridep",
        "add --hybrid-ep",
        "add --hybrid-ep",
        "add --hybrid-ep",
        "--hybrid-ep-dispatch-dtype: invalid choice: 'fp4'",
        "num_sms",
        "--yaml-cfg",
    )
    for text, part in zip(errors, expected, strict=True):
        assert part in text


def test_a_missing_argument_module_is_said():
    assert "megatron.training.arguments is not importable" in run("missing_arguments_module")


def launch(*arguments):
    environment = {
        **os.environ,
        **parity_world.ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE.parents[1])])),
    }
    return subprocess.run(
        [sys.executable, "-m", "megatron_patches", *arguments],
        env=environment,
        text=True,
        capture_output=True,
        timeout=240,
    )


def test_launcher_usage():
    assert launch().returncode == 2
    assert launch("--help").returncode == 0
    absent = launch("no_such_script.py")
    assert absent.returncode == 2 and "no such script" in absent.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (["--hook", "s9", "x.py"], "--hook s9: no such hook; choose one of token_dispatcher, deep_ep"),
        (["--stat"], "--stat: not known before the script; give --hook NAME, --status or --help, or SCRIPT"),
        (["--hook"], "--hook: not known before the script; give --hook NAME"),
    ],
)
def test_what_the_launcher_does_not_know_is_named(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megatron_patches: {said}") and error.count("\n") == 1


def test_a_help_whose_reader_has_gone_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-m", "megatron_patches", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=100)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(MEGATRON_MINOR < 17, reason="the megatron-core 0.16 wheel has no megatron.training")
@pytest.mark.usefixtures("megatron_flags")
def test_launcher_runs_a_script_that_parses_like_pretrain_gpt():
    flags = ["--hybrid-ep", "--hybrid-ep-ranks-per-node", "1", "--hybrid-ep-num-sms", "2", "--hybrid-ep-timeout", "30"]
    flex = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]
    done = launch(str(HERE / "script_like_pretrain.py"), *flex, *flags, "--own-flag", "5")
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["main"] and facts["own_flag"] == 5
    assert facts["args"] == [True, 1, 2, 30.0]
    assert facts["manager"] == "megatron_patches.manager.HybridEPManager"
    assert facts["buffers"] == 1 and facts["same"], "tokens must have come back through our buffer"
