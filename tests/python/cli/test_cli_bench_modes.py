"""`hybrid-ep bench` beyond the plain sweep: stages, quantised rows, chains, imbalance, the simulated backend, presets,
plots, and what is refused."""

from __future__ import annotations

import contextlib
import json
import sys
import types

import pytest
import torch
import torch.distributed as dist
from bench_case import one_rank_case

from hybrid_ep.cli import EXIT_OK, EXIT_USAGE, EXIT_WRONG, build_parser, launch, main
from hybrid_ep.cli.bench import (
    built_in,
    by_lines,
    checks,
    config,
    graphs,
    plots,
    presets,
    routing,
    routing_spec,
    rows,
    simulated,
)
from hybrid_ep.cli.bench.ledger import build_ledger
from hybrid_ep.cli.bench.plots import Point
from hybrid_ep.hardware import clusters
from hybrid_ep.payload import quantize
from hybrid_ep.perf import crossover, latency_events, model
from hybrid_ep.perf.shape import Shape
from hybrid_ep.testing import VirtualWorld

SMALL = ["--tokens", "16", "--hidden", "64", "--topk", "2", "--experts", "8", "-n", "2", "-w", "1"]


@pytest.fixture
def one_rank(monkeypatch):
    if dist.is_initialized():
        pytest.skip("this process is already part of a world")
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were launched"))


def rows_of(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if not line.startswith("#")]


# -- host ---------------------------------------------------------------------------------------------------


ALL_OPS = "route,dispatch,permute,unpermute,combine,pair,step"


def test_every_op_dtype_and_the_chain_on_four_ranks(tmp_path, monkeypatch, capfd):
    """2 x 2 ranks, mxfp8, one hot rank: values exact before and after, stages and kernel times beside API times."""
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "out.json"
    flags = [
        "--ranks",
        "4",
        "--ranks-per-node",
        "2",
        "--dtype",
        "mxfp8",
        "--imbalance",
        "0.8",
        "--ragged",
        "random",
        "--op",
        ALL_OPS,
        "--chain",
        "3",
        "--impl",
        "hybrid_ep,torch-alltoall",
        "-J",
        str(out),
        "-T",
        "200",
    ]
    assert main(["bench", *SMALL, "--tokens", "64", "-n", "1", *flags]) == EXIT_OK
    printed = capfd.readouterr().out
    assert "mxfp8/bf16" in printed and "chain: 3 pairs" in printed and "# Set-up time" in printed
    document = json.loads(out.read_text())
    assert document["wrong_total"] == 0 == document["miscounted_total"]
    (case,) = document["cases"]
    assert len(set(case["tokens_per_rank"])) > 2 and len(case["counted_rows"]["hybrid_ep"]) == 3
    assert case["imbalance"] == pytest.approx(0.8, abs=0.25)
    by = {(row["op"], row["implementation"]): row for row in case["rows"]}
    assert len(by) == 16  # seven ops and the chain, of both
    for op in ("dispatch", "combine", "pair", "step", "chain", "route"):
        assert 0 < by[op, "hybrid_ep"]["kernel_us"] <= by[op, "hybrid_ep"]["time_us"]
        assert by[op, "torch-alltoall"]["kernel_us"] is None
    for op in ("route", "permute", "unpermute"):
        assert by[op, "hybrid_ep"]["busbw"] is None
    sizes = {op: by[op, "hybrid_ep"]["size_bytes"] for op in ("dispatch", "combine", "pair", "step", "chain")}
    received = max(case["ledger"]["recv_rows"])
    assert sizes["dispatch"] == received * (64 + 2) and sizes["combine"] == received * 128
    assert sizes["pair"] == sizes["chain"] == received * 194 and sizes["step"] == received * (66 + 3 * 128)
    assert case["setup_s"]["hybrid_ep"] > 0


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "mxfp8"])
def test_the_peers_send_quantised_rows_exactly_too(one_rank, dtype, capsys):
    names = "torch-alltoall,reference"
    shape = [*SMALL, "--hidden", "128", "--dtype", dtype]
    run = ["bench", *shape, "--impl", names, "--op", "pair,permute,unpermute,route,step", "--chain", "2"]
    assert main(run) == EXIT_OK
    assert {(r[2], r[3]) for r in rows_of(capsys.readouterr().out)} == {
        *((op, name) for op in ("pair", "permute", "unpermute", "step", "chain") for name in names.split(",")),
        ("route", "torch-alltoall"),
    }


def test_a_chain_that_leaks_from_one_pair_into_the_next_is_found(one_rank, monkeypatch, capsys):
    plain = built_in.TorchAllToAll.combine
    seen = []

    def leaks(self, dispatched, rows):
        done = plain(self, dispatched, rows)
        seen.append(self.case.x)
        if len(seen) > 1 and seen[-2] is not self.case.x and not self.waited:
            done = done + 1  # a second pair without a barrier before it
        return done

    monkeypatch.setattr(built_in.TorchAllToAll, "combine", leaks)
    monkeypatch.setattr(built_in.TorchAllToAll, "waited", False, raising=False)
    from hybrid_ep.cli.bench.world import World

    meet = World.meet

    def notice(self):
        built_in.TorchAllToAll.waited = True
        meet(self)

    unchained = checks.count_unchained

    def begin(implementation, between):
        built_in.TorchAllToAll.waited = False
        return unchained(implementation, between)

    monkeypatch.setattr(World, "meet", notice)
    monkeypatch.setattr(checks, "count_unchained", begin)
    assert main(["bench", *SMALL, "--impl", "torch-alltoall", "--op", "pair", "--chain"]) == EXIT_WRONG
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("ratio", [0.0, 0.5, 2.0])
def test_imbalance_comes_out_as_asked(ratio):
    spec = routing_spec.with_imbalance(routing_spec.parse_routing("uniform"), ratio, 32, 4, 4)
    drawn = routing.generate(spec, [4096] * 4, 32, 4, seed=3)
    assert build_ledger(drawn, 32, 2, 1).imbalance == pytest.approx(ratio, abs=0.05)
    ordered = drawn[1].topk_idx.sort(1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()


def test_imbalance_beyond_what_routing_can_do_is_refused():
    for ratio, most in ((3.5, "0 .. 3"), (-0.1, "0 .. 3")):
        with pytest.raises(ValueError, match=f"--imbalance {ratio:g}.*{most}"):
            routing_spec.with_imbalance(routing_spec.parse_routing("uniform"), ratio, 32, 4, 4)
    with pytest.raises(ValueError, match="give one of them"):
        routing_spec.with_imbalance(routing_spec.parse_routing("zipf:1"), 0.5, 32, 4, 4)


def test_routing_from_an_npy_file_serves_bench_and_simulator(tmp_path):
    import numpy as np

    np.save(tmp_path / "r.npy", np.array([[[0, 3], [1, 2]], [[3, 2], [0, 1]]]))
    spec = routing_spec.parse_routing(f"file:{tmp_path / 'r.npy'}")
    assert routing.draw(spec, 2, 2, 4, 2, seed=1).tolist() == [[[0, 3], [1, 2]], [[3, 2], [0, 1]]]


def test_row_bytes_of_every_dtype():
    assert {d: rows.row_bytes(d, 256) for d in rows.ROWS} == {
        "bf16": (512, 512),
        "fp16": (512, 512),
        "fp32": (1024, 1024),
        "fp8": (256 + 8, 512),
        "mxfp8": (256 + 8, 512),
    }


def test_rows_in_numbers_are_what_torch_has():
    for dtype, row in rows.ROWS.items():
        assert (row.dispatched, row.summed) == (checks.DTYPES[dtype].itemsize, checks.SUM_DTYPES[dtype].itemsize)
        scaled = quantize.FORMATS.get(dtype)
        assert (row.block, row.scale) == ((scaled.block, scaled.scale_dtype.itemsize) if scaled else (0, 0))
    assert list(rows.ROWS) == list(checks.DTYPES)


@pytest.mark.parametrize("flags, words", [
    (["--cuda-graph"], "--cuda-graph: --backend host has no CUDA graphs"),
    (["--dtype", "nvfp4"], "--dtype nvfp4: only the simulator knows it"),
    (["--dtype", "fp8", "--hidden", "96"], "--hidden 96: fp8 scales blocks of 128"),
    (["--chain", "-1"], "--chain -1: must be at least 0"),
    (["--imbalance", "9"], "--imbalance 9:"),
    (["--imbalance", "1", "--routing", "one-hot"], "--imbalance 1: --routing one-hot says otherwise"),
    (["--nodes", "2"], "--nodes 2: only --backend sim takes it"),
    (["--cluster", "gb200_nvl72"], "only --backend sim takes it"),
    (["--preset", "hybrid-ep-blog"], "is 3 worlds"),
    (["--preset", "hybrid-ep-blog-h100-8", "--hidden", "64"], "--hidden 64 says another"),
    (["--impl", "deep_ep-v1"], "deep_ep-v1 cannot run here: deep_ep is not importable"),
    (["--plot", "/nowhere/x"], "--plot /nowhere/x: no such folder"),
    (["--plot", __file__], "is a file; name a folder"), (["--json", "/"], "--json /: is a folder"),
    (["--tokens", "64", "--num-sms", "0,8", "--plot", "p"], "--plot p: nothing to draw of one number of tokens"),
    (["--backend", "sim", "--tokens", "64,64", "--plot", "p"], "--plot p: nothing to draw"),
    (["--backend", "sim", "--preset", "hybrid-ep-blog", "--num-sms", "8", "--plot", "p"], "--plot p: nothing to draw"),
    (["--path", "latency", "--impl", "hybrid_ep"], "--path latency with --impl"),
    (["--backend", "sim", "--path", "latency"], "--num-sms with --path latency"),
    (["--backend", "sim", "--path", "latency", "--num-sms", "8", "--op", "step"], "--op with --path latency"),
    (["--backend", "sim", "--path", "latency", "--num-sms", "8", "--nodes", "0"], "--nodes with --path latency"),
    (["--backend", "sim", "--path", "latency", "--num-sms", "8", "--dtype", "fp8"], "--dtype with --path latency"),
    (["--backend", "sim", "--path", "latency", "--num-sms", "8", "--routing", "zipf:1"], "--routing with --path"),
    (["--backend", "sim", "--path", "latency", "--num-sms", "8", "--tokens", "0"], "--tokens with --path latency"),
    (["--backend", "sim", "--path", "latency", "--num-sms", "8", "--ranks-per-node", "9"], "--ranks-per-node 9:"),
    (["--backend", "sim", "--ranks", "4"], "--ranks with --backend sim"),
    (["--backend", "sim", "--peers"], "--peers with --backend sim"),
    (["--backend", "sim", "--ragged", "random"], "--ragged with --backend sim"),
    (["--backend", "sim", "--chain"], "--chain with --backend sim"),
    (["--backend", "sim", "--cuda-graph"], "--cuda-graph with --backend sim"),
    (["--backend", "sim", "--op", "route"], "--op route with --backend sim"),
    (["--backend", "sim", "--engine", "events", "--no-permute"], "--no-permute with --backend sim"),
    (["--backend", "sim", "--engine", "events", "--op", "permute"], "--op permute with --backend sim"),
    (["--backend", "sim", "--dtype", "fp32"], "--dtype fp32 with --backend sim"),
    (["--backend", "sim", "--nodes", "0"], "--nodes 0"),
    (["--backend", "sim", "--num-sms", "999"], "--num-sms 999 must"),
    (["--backend", "sim", "--routing", "x"], "--routing 'x'"),
    (["--backend", "sim", "--preset", "hybrid-ep-blog", "--tokens", "7"], "--tokens (7,) says another"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(launcher, flags, words, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # not importable, installed or not
    assert main(["bench", *flags]) == EXIT_USAGE
    said = capsys.readouterr().err.strip()
    assert said.startswith("hybrid-ep bench: ") and "\n" not in said and words in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_the_cuda_backend_without_a_gpu_says_so(launcher, command, capsys):
    assert main([command, "--backend", "cuda"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "--backend cuda: executor='cuda'" in said and "use --backend host or sim" in said


class FakeCuda:
    """torch.cuda's graph calls, which record what is captured instead of capturing it."""

    def __init__(self, monkeypatch, fails: bool = False):
        self.captured, self.fails = [], fails
        stream = types.SimpleNamespace(wait_stream=lambda _: None)
        for name, value in {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda _: contextlib.nullcontext(),
            "graph": self.graph,
            "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: "replayed"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def graph(self, _):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append("begin")
        yield
        self.captured.append("end")


def test_graphs_capture_what_is_offered_and_name_what_cannot_be(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def captured(op):
        return None if op == "pair" else lambda: cuda.captured.append(op)

    each = types.SimpleNamespace(name="hybrid_ep", captured=captured)
    replays = graphs.capture(each, ("route", "dispatch", "combine", "pair", "step"))
    assert set(replays) == {"dispatch", "combine"} and replays["dispatch"]() == "replayed"
    assert cuda.captured == [*["dispatch"] * 3, "begin", "dispatch", "end", *["combine"] * 3, "begin", "combine", "end"]
    FakeCuda(monkeypatch, fails=True)
    with pytest.raises(graphs.CaptureError, match="--cuda-graph: hybrid_ep combine cannot be captured"):
        graphs.capture(each, ("combine",))


@pytest.mark.parametrize("permute", [False, True])
def test_what_a_graph_would_replay_is_the_exchange_with_a_given_handle(permute, monkeypatch):
    world = VirtualWorld(1, 1)
    case = one_rank_case(group=world.groups[0], executor="host", permute=permute)
    each = built_in.HybridEp(case)
    try:
        for op in ("dispatch", "combine", "pair"):
            call = each.captured(op)
            with monkeypatch.context() as patch:
                patch.setattr(each.buffer._session, "route", lambda *_: pytest.fail("routed again"))
                result = call()
        copies = 2 if permute else 1  # both experts are this rank's
        assert torch.equal(result[1], copies * case.x) and result[0][0].shape[0] == 3 * copies
        assert each.captured("step") is None
    finally:
        each.close()


# -- simulated ----------------------------------------------------------------------------------------------


def test_the_simulated_table_is_what_simulate_says(launcher, tmp_path, capsys):
    shape = ["--nodes", "2", "--hidden", "1024", "--experts", "64"]
    assert (
        main(
            [
                "simulate",
                *shape,
                "--tokens",
                "512",
                "--num-sms",
                "8",
                "--engine",
                "model",
                "--dtype",
                "fp8",
                "--json",
                str(tmp_path / "s.json"),
            ]
        )
        == EXIT_OK
    )
    want = json.loads((tmp_path / "s.json").read_text())["operations"]
    assert (
        main(
            [
                "bench",
                "--backend",
                "sim",
                *shape,
                "--tokens",
                "512",
                "--num-sms",
                "8",
                "--dtype",
                "fp8",
                "--op",
                "all,step,permute,unpermute",
                "-J",
                str(tmp_path / "b.json"),
            ]
        )
        == EXIT_OK
    )
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["simulated"] is True
    row = {r["op"]: r for r in document["worlds"][0]["rows"]}
    for op in model.OPS:
        assert row[op]["time_us"] == want[op]["api_us"] and row[op]["kernel_us"] == want[op]["kernel_us"]
        scale = want[op]["kernel_us"] / want[op]["api_us"]
        assert row[op]["busbw"] == pytest.approx(want[op]["physical_gb_per_s"]["rail"] * scale)
        assert row[op]["logical_gbps"] == pytest.approx(want[op]["logical_gb_per_s"]["rail"] * scale)
    assert row["pair"]["time_us"] == pytest.approx(row["dispatch"]["time_us"] + row["combine"]["time_us"])
    assert row["step"]["time_us"] > 2 * row["pair"]["time_us"]  # the backward dispatch is bf16
    assert 0 <= row["permute"]["time_us"] < row["dispatch"]["time_us"] and row["permute"]["busbw"] is None
    assert capsys.readouterr().out.count("# SIMULATED") == 1


def test_routing_changes_the_prediction(launcher, tmp_path, capsys):
    shape = ["--backend", "sim", "--nodes", "2", "--hidden", "1024", "--experts", "64", "--tokens", "256", "--num-sms",
             "8", "--op", "dispatch"]  # fmt: skip
    times = []
    for flags in ([], ["--imbalance", "3"], ["--routing", "one-hot"]):
        assert main(["bench", *shape, *flags]) == EXIT_OK
        times.append(float(rows_of(capsys.readouterr().out)[0][4]))
    assert times[0] < times[1] < times[2]


def test_a_preset_on_the_host_is_its_shape(launcher):
    args = build_parser("bench").parse_args(["bench", "--preset", "hybrid-ep-blog-h100-8"])
    presets.apply_to_ranks(args)
    found = config.make_config(args, args.ranks)
    assert (found.num_ranks, found.num_local_ranks, found.tokens, found.hidden, found.num_experts, found.num_sms) == (
        8,
        8,
        (4096,),
        8192,
        16,
        (8,),
    )


def test_a_preset_in_a_world_of_another_size_is_refused(one_rank, capsys):
    assert main(["bench", "--preset", "hybrid-ep-blog-h100-8"]) == EXIT_USAGE
    assert "is a world of 8 ranks, and the launcher started 1" in capsys.readouterr().err


# -- plots --------------------------------------------------------------------------------------------------


def test_plots_are_drawn_where_there_is_something_to_draw(launcher, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = ["bench", "--backend", "sim", "--tokens", "64,256", "--experts", "64", "--plot", str(tmp_path / "p")]
    assert main([*run, "--num-sms", "4,8"]) == EXIT_OK
    made = sorted(p.name for p in (tmp_path / "p").iterdir())
    assert made == ["bandwidth.png", "bandwidth.svg", "time.png", "time.svg"]
    svg = (tmp_path / "p" / "bandwidth.svg").read_text()
    assert "SMs of an operation" in svg and "simulated" in svg and "dispatch" in svg
    points = [Point(64, 0, op, name, 1.0, 0.9, 1.1, 2.0) for op in simulated.model.OPS for name in "abc"]
    said = plots.draw(points, tmp_path / "q", "a title")
    assert [s.startswith("# not drawn: ") for s in said] == [True, True] and not (tmp_path / "q").exists()
    made = plots.draw([*points, *(Point(99, 2, p.op, p.implementation, 2.0, 1, 3, 1.0) for p in points)],
                      tmp_path / "q", "many lines; beside them a legend")  # fmt: skip
    assert any(s.endswith("time.png") for s in made)


def test_the_latency_path_is_measured_beside_the_other(one_rank, capsys):
    assert main(["bench", "--path", "latency", "--op", "pair", *SMALL]) == EXIT_OK
    said = capsys.readouterr().out
    assert " hybrid_ep-latency " in said and "# Lines against the other path : a pair by " in said


@pytest.mark.parametrize("sms", ["8", "32+32", "256+256"])
def test_columns_of_a_row_stay_apart(sms):
    row = crossover.Row(16, "dispatch", 12.34, 123456.78)
    said = by_lines.line(row, sms)
    assert said.split() == ["16", sms, "dispatch", "12.3", "123456.8", "0.00", "latency"]
    assert said.index("latency") == by_lines.HEADER.index("faster")


def test_lines_stand_beside_the_throughput_path_with_where_they_cross(launcher, tmp_path, capsys):
    shape = ["--ranks-per-node", "4", "--tokens", "8,1024", "--hidden", "2048", "--topk", "4", "--experts", "16"]
    file = tmp_path / "b.json"
    flags = ["--backend", "sim", "--path", "latency", *shape, "--num-sms", "2,4", "--op", "all", "--json", str(file)]
    assert main(["bench", *flags]) == EXIT_OK
    said = capsys.readouterr().out
    (world,) = json.loads(file.read_text())["worlds"]
    rows = {(r["tokens"], r["num_sms"], r["op"]): r for r in world["rows"]}
    assert len(rows) == 2 * 2 * 3 and world["engine"] == "events"
    for (tokens, sms, op), row in rows.items():
        assert row["faster"] == ("latency" if row["latency_us"] < row["throughput_us"] else "throughput")
        assert f"{tokens:>8}{sms:>9}{op:>10}{row['latency_us']:>11.1f}" in said
        if op == "pair":
            parts = [rows[tokens, sms, part] for part in ("dispatch", "combine")]
            assert row["latency_us"] == pytest.approx(sum(p["latency_us"] for p in parts))
    # Two SMs that would feed links, and three that would work locally.
    shown = latency_events.measure(Shape(4, 4, 8, 2048, 4, 16), clusters.get("h100_8x400g"), num_sms=5, seed=1)
    assert rows[8, 2, "dispatch"]["latency_us"] == shown.dispatch_us
    # Lines have more work of their own: few tokens win by them, many do not.
    (found,) = [c for c in world["crossovers"] if (c["op"], c["num_sms"]) == ("pair", 4)]
    assert (found["latency_tokens"], found["throughput_from"]) == (8, 1024)
    assert "# 4 SMs: a pair by lines is faster up to 8 tokens a rank and not at 1024: latency_tokens=8" in said


def test_lines_over_nodes_are_those_of_simulate(launcher, tmp_path, capsys):
    shape = ["--nodes", "2", "--ranks-per-node", "2", "--tokens", "8", "--hidden", "2048", "--topk", "4"]
    file = tmp_path / "b.json"
    flags = [*shape, "--experts", "16", "--num-sms", "2", "--op", "all", "--json", str(file)]
    assert main(["bench", "--backend", "sim", "--path", "latency", *flags]) == EXIT_OK
    assert "EP 4 (2 x 2)" in capsys.readouterr().out
    (world,) = json.loads(file.read_text())["worlds"]
    shown = latency_events.measure(Shape(4, 2, 8, 2048, 4, 16), clusters.get("h100_8x400g"), num_sms=5, seed=1)
    found = {row["op"]: row["latency_us"] for row in world["rows"]}
    assert found["dispatch"] == shown.dispatch_us and found["combine"] == shown.combine_us
    assert (world["shape"]["ranks"], world["shape"]["ranks_per_node"]) == (4, 2)
