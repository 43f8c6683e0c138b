"""Load statistics of Megatron's routers: the files hold exactly what was routed, whatever way the run ends."""

import argparse
import signal

import parity_world
import pytest
from test_dispatcher import Program

from hybrid_ep.balance import sources, statistics
from hybrid_ep.cli import main


def run(name, num_ranks, *arguments):
    return parity_world.run_world(Program(name, "load_stats_programs"), num_ranks, arguments, timeout_s=120)


def assert_holds(path, counts, iterations, layers=(1, 2)):
    """The file at `path` is `counts`, {iteration: {layer: [E]}}, of these iterations."""
    read = statistics.load(path)
    assert read.iterations == tuple(iterations) and read.layers == layers
    for i, number in enumerate(iterations):
        for n, layer in enumerate(read.layers):
            assert read.counts[i, n].tolist() == counts[number][layer], (number, layer)
    assert read.counts.sum() > 0


@pytest.mark.parametrize(
    "num_ranks, name, balance, recompute", [(2, "loads.jsonl", "exact", False), (2, "folder", "off", True)]
)
def test_files_hold_what_the_routers_decided(tmp_path, capsys, num_ranks, name, balance, recompute):
    """Iterations 2 to 4 of 6, gradients accumulated over micro-batches, evaluations between: and the report says it."""
    if name == "folder":
        pytest.importorskip("safetensors")
    path = tmp_path / "new" / name
    counts = run("collect_and_revert", num_ranks, str(path), (2, 4), balance, recompute)[0]
    assert_holds(path, counts, (2, 3, 4))
    assert main(["balance", "report", str(path), "--ep", "2", "--per-expert"]) == 0
    said = capsys.readouterr().out
    assert "3 iterations, 2 layers, 8 experts" in said
    for layer in (1, 2):
        total = [sum(column) for column in zip(*(counts[i][layer] for i in (2, 3, 4)), strict=True)]
        assert f"layer {layer}: {total}" in said
    assert sources.load(path, 8).tolist() == counts["sources"]  # as if each expert were a rank's
    assert len(set(map(str, counts["sources"]))) == num_ranks, "or another order of ranks would do"
    assert main(["balance", "report", str(path), "--ep", "2", "--sources"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens from ranks to ranks" in said and "stay on their rank" in said
    assert sources.own_ranks(path, num_ranks, num_ranks).tolist() == list(range(num_ranks))


def test_a_pipelines_stages_make_one_file(tmp_path):
    """PP2 x EP2: layers carry their number in the whole model, in the summed file and in the parts of a run that ends
    inside the range."""
    paths = tmp_path / "loads.jsonl", tmp_path / "early.jsonl"
    for path, (counts, of_ranks), last in zip(
        paths, run("collect_in_a_pipeline", 4, *map(str, paths))[0], (3, 4), strict=True
    ):
        numbered = {i: dict(enumerate(layers, 1)) for i, layers in enumerate(counts, 1)}
        assert_holds(path, numbered, range(2, last + 1), (1, 2, 3, 4))
        assert len({str(numbered[2][layer]) for layer in (1, 2, 3, 4)}) == 4, "or another order of layers would do"
        assert sources.load(path, len(of_ranks[0]), between=(2, 3)).tolist() == of_ranks


def test_a_stage_without_moe_layers_takes_part(tmp_path):
    path = tmp_path / "loads.jsonl"
    counts = run("collect_beside_a_dense_stage", 2, str(path), (1, 2))[1]
    assert_holds(path, counts, (1, 2), (1,))
    total = [sum(of_expert) for of_expert in zip(*(counts[i][1] for i in (1, 2)), strict=True)]
    assert sources.load(path, 8).tolist() == [[0] * 8, total]


def test_a_run_that_fails_inside_the_range_leaves_what_it_had(tmp_path):
    path = tmp_path / "loads.jsonl"
    counts = run("collect", 2, str(path), (2, 5), "off", False, 4)[0]
    assert not path.exists()
    assert_holds(path, counts, (2, 3))
    lost = next(statistics.parts_folder(path).iterdir())
    lost.unlink()
    with pytest.raises(ValueError, match="1 files of 2 ranks"):
        statistics.load(path)


def test_a_run_that_ends_inside_the_range_leaves_what_it_had(tmp_path):
    """No flag, TensorRT-LLM's variables: 3-9 holds iterations 3 to 8, of which the script runs 3 to 6."""
    counts = run("until_exit", 1, str(tmp_path / "s.jsonl"))[0]
    assert_holds(tmp_path / "s.jsonl", counts, (3, 4, 5, 6))


def test_sigterm_writes_first(tmp_path):
    with pytest.raises(parity_world.WorldError, match=f"exit code -{int(signal.SIGTERM)} "):
        run("until_sigterm", 1, str(tmp_path / "s.jsonl"))
    assert statistics.load(tmp_path / "s.jsonl").iterations == (3, 4, 5, 6)


def parse(*argv):
    from megatron_patches import flags

    parser = flags.add_arguments(argparse.ArgumentParser())
    parser.set_defaults(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    return flags.settings_from_args(parser.parse_args(argv))


def test_flags_reach_the_settings():
    asked = ["--hybrid-ep-load-stats", "p.jsonl", "--hybrid-ep-load-stats-range", "100-200"]
    for more, enabled in (([], False), (["--hybrid-ep"], True)):
        wanted = parse(*asked, *more)
        assert wanted.enabled == enabled
        assert (wanted.load_stats.path, wanted.load_stats.iterations) == ("p.jsonl", (100, 200))


@pytest.mark.parametrize(
    "argv, flag",
    [
        (["--hybrid-ep-load-stats", "p"], "needs --hybrid-ep-load-stats-range 100-200"),
        (["--hybrid-ep-load-stats-range", "1-2"], "needs --hybrid-ep-load-stats PATH"),
        (["--hybrid-ep-load-stats", "p", "--hybrid-ep-load-stats-range", "2-1"], "FIRST-LAST"),
    ],
)
def test_flags_that_make_no_sense_are_named(argv, flag):
    with pytest.raises(ValueError, match=flag):
        parse(*argv)
