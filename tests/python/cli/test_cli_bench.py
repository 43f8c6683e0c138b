"""`hybrid-ep bench`: routing generators, closed forms, statistics, the JSON, exit codes, the launcher.

Most runs are a world of one rank inside this process; what needs several ranks is launched once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_ep import traffic, tuning
from hybrid_ep.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE, EXIT_WRONG, build_parser, launch, main
from hybrid_ep.cli.bench import checks, config, environment, report, rows
from hybrid_ep.cli.bench.ledger import build_ledger, expected_groups
from hybrid_ep.cli.bench.routing import Routing, RoutingSpec, generate, token_counts
from hybrid_ep.cli.bench.routing_spec import parse_routing

SMALL = ["--tokens", "16", "--hidden", "16", "--topk", "2", "--experts", "8", "-n", "2", "-w", "1"]
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def one_rank(monkeypatch):
    """main() becomes the only rank of a world of one, in this process."""
    if dist.is_initialized():
        pytest.skip("this process is already part of a world")
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture(scope="module", autouse=True)
def hanging(request, tmp_path_factory):
    """A bench whose rank hangs, and the seconds that it took: begun before all tests of this file, for it does nothing
    but wait for its deadline while they run."""
    if not any("test_ranks_that_hang" in item.name for item in request.session.items):
        yield None
        return
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_until_the_deadline, tmp_path_factory.mktemp("hanging"))


def run_until_the_deadline(folder):
    hang = PEER.replace("done = super().dispatch()", "import time; time.sleep(600)")
    flags = ["--ranks", "1", "--peer", write_peer(folder, hang), "--impl", "test-peer", "-T", "20"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "hybrid_ep", "bench", *SMALL, *flags],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    return ended, time.monotonic() - start


def config_of(*flags: str, ranks: int = 4):
    return config.make_config(build_parser("bench").parse_args(["bench", *flags]), ranks)


def route(*tokens: list[int]) -> Routing:
    topk_idx = torch.tensor(tokens, dtype=torch.int64)
    return Routing(topk_idx, torch.ones(topk_idx.shape))


# -- routing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["uniform", "zipf:1.2", "one-hot"])
def test_generated_routing_is_reproducible_and_distinct(text):
    counts = [50, 0, 7]
    first, second = (generate(parse_routing(text), counts, 12, 4, seed=3) for _ in range(2))
    for count, a, b in zip(counts, first, second, strict=True):
        assert a.topk_idx.shape == (count, 4) and a.topk_idx.dtype == torch.int64
        assert torch.equal(a.topk_idx, b.topk_idx) and torch.equal(a.topk_weights, b.topk_weights)
        ordered = a.topk_idx.sort(1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all()
        assert ((ordered >= 0) & (ordered < 12)).all()
    assert text == "one-hot" or not torch.equal(first[0].topk_idx[:7], first[2].topk_idx)


def test_seed_changes_the_routing():
    spec = RoutingSpec("uniform")
    one, two = (generate(spec, [40], 16, 4, seed)[0].topk_idx for seed in (1, 2))
    assert not torch.equal(one, two)


def test_zipf_is_skewed_as_its_exponent_says_and_flat_at_zero():
    def shares(exponent: float) -> torch.Tensor:
        drawn = generate(RoutingSpec("zipf", exponent), [20_000], 8, 1, seed=1)[0].topk_idx
        return torch.bincount(drawn.flatten(), minlength=8) / drawn.numel()

    popularity = 1 / torch.arange(1, 9, dtype=torch.float32)
    torch.testing.assert_close(shares(1.0), popularity / popularity.sum(), atol=0.015, rtol=0)
    torch.testing.assert_close(shares(0.0), torch.full((8,), 0.125), atol=0.015, rtol=0)


def test_one_hot_sends_every_token_to_the_same_experts():
    drawn = generate(RoutingSpec("one-hot"), [5], 8, 3, seed=1)[0].topk_idx
    assert drawn.tolist() == [[0, 1, 2]] * 5


def test_routing_from_file(tmp_path):
    table = torch.tensor([[[0, 3], [1, 2]], [[3, 2], [0, 1]]])
    torch.save(table, tmp_path / "r.pt")
    spec = parse_routing(f"file:{tmp_path / 'r.pt'}")
    drawn = generate(spec, [2, 1], 4, 2, seed=1)
    assert drawn[0].topk_idx.tolist() == [[0, 3], [1, 2]] and drawn[1].topk_idx.tolist() == [[3, 2]]
    for counts, num_experts, topk, words in (
        ([3, 1], 4, 2, "needs"), ([2, 1], 3, 2, "beyond"), ([2, 1, 1], 4, 2, "needs"), ([2, 1], 4, 3, "needs")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            generate(spec, counts, num_experts, topk, seed=1)
    torch.save(torch.tensor([[[1, 1]]]), tmp_path / "twice.pt")
    with pytest.raises(ValueError, match="twice"):
        generate(parse_routing(f"file:{tmp_path / 'twice.pt'}"), [1], 4, 2, seed=1)


@pytest.mark.parametrize("text", ["zipf", "zipf:-1", "zipf:x", "file:", "file:/nowhere.pt", "random", ""])
def test_bad_routing_is_refused(text):
    with pytest.raises(ValueError, match="--routing"):
        parse_routing(text)


def test_ragged_token_counts():
    assert token_counts("none", 9, 3, seed=1) == [9, 9, 9]
    assert token_counts("zero-last", 9, 3, seed=1) == [9, 9, 0]
    drawn = token_counts("random", 1000, 8, seed=1)
    assert drawn[0] == 1000 and len(set(drawn)) > 4 and all(0 <= count <= 1000 for count in drawn)
    assert drawn == token_counts("random", 1000, 8, seed=1) != token_counts("random", 1000, 8, seed=2)


# -- bytes --------------------------------------------------------------------------------------------------


def test_ledger_by_hand():
    # 2 nodes x 2 ranks, 1 expert a rank. Rank 0 has a token for all, rank 1 one for ranks 2 and 3,
    # rank 2 one for itself and rank 0, rank 3 none.
    empty = Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    routings = [route([0, 1, 2, 3]), route([2, 3]), route([2, 0]), empty]
    ledger = build_ledger(routings, num_experts=4, num_local_ranks=2, row_bytes=10)
    assert ledger.recv_rows == (2, 1, 3, 2) == ledger.permuted_rows
    assert ledger.node_pairs == (2, 1, 2, 0) and ledger.rail_pairs == (1, 1, 1, 0)
    hierarchical = ledger.traffic["hierarchical"]
    assert hierarchical.rail == (10, 10, 10, 0)
    # rank 0 hands out its own token (0 and 1) and rank 2's (0); rank 2 its own (2) and rank 0's (2, 3);
    # rank 3 hands out rank 1's (2, 3); rank 1 none.
    assert hierarchical.node == (10, 0, 10, 10) and hierarchical.self_ == (20, 0, 20, 10)
    direct = ledger.traffic["per-expert"]
    assert direct.rail == (20, 20, 10, 0) and direct.node == (10, 0, 0, 0) and direct.self_ == (10, 0, 10, 0)
    assert ledger.size_bytes == [20, 10, 30, 20] and ledger.logical_bytes == [20, 10, 20, 0]
    assert ledger.bottleneck_bytes("per-expert") == [20, 20, 10, 0]
    assert ledger.floor_bytes("dispatch", permute=True) == (3 + 8) * 10
    assert ledger.floor_bytes("pair", permute=False) == 2 * (3 + 8) * 10
    assert ledger.one_pass_bytes("dispatch", permute=True) == (3 + 8 + 2 * 3) * 10
    assert ledger.one_pass_bytes("pair", permute=False) == 2 * (3 + 8 + 2 * 3) * 10
    assert ledger.staged_bytes("combine", permute=True) == (2 * 3 + 2 * 8 + 8 + 8) * 10


@pytest.mark.parametrize("num_ranks, num_local_ranks", [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("text", ["uniform", "zipf:1.5"])
def test_ledger_agrees_with_the_library_s_closed_form(num_ranks, num_local_ranks, text):
    num_experts = 2 * num_ranks
    counts = token_counts("random", 60, num_ranks, seed=5)
    routings = generate(parse_routing(text), counts, num_experts, min(3, num_experts), seed=5)
    ledger = build_ledger(routings, num_experts, num_local_ranks, row_bytes=1)
    maps = [routing.to_map(num_experts)[0] for routing in routings]
    links = traffic.link_rows(maps, num_local_ranks)
    hierarchical = ledger.traffic["hierarchical"]
    assert [rows["rail"] for rows in links] == list(hierarchical.rail)
    assert [rows["node"] for rows in links] == list(hierarchical.node)
    assert [rows["self"] for rows in links] == list(hierarchical.self_)
    # Whatever the way, what arrives is the same.
    for wire, arrived in (("per-rank", ledger.recv_rows), ("per-expert", ledger.permuted_rows)):
        assert sum(ledger.link_rows(wire).values()) == sum(arrived)
    one_node_less = sum(hierarchical.node) + sum(hierarchical.self_)
    assert one_node_less == sum(ledger.recv_rows)


def test_expected_groups_is_the_mean_over_uniform_routing():
    routings = generate(RoutingSpec("uniform"), [4000] * 4, 32, 4, seed=1)
    ledger = build_ledger(routings, 32, 2, row_bytes=1)
    assert sum(ledger.recv_rows) / 16_000 == pytest.approx(expected_groups(4, 32, 4), rel=0.01)
    assert sum(ledger.node_pairs) / 16_000 == pytest.approx(expected_groups(2, 32, 4), rel=0.01)
    assert expected_groups(1, 32, 4) == 1
    assert expected_groups(16, 256, 8) == pytest.approx(6.523, abs=1e-3)


# -- values and statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(checks.DTYPES))
def test_inputs_are_exact_in_every_order_of_summation(dtype):
    topk = 8
    x = checks.make_rows(0, 64, 32, dtype, topk, seed=1)
    assert torch.equal(x, x.float().round().to(x.dtype)) and x.abs().max() == rows.amplitude(dtype, topk)
    total = torch.zeros_like(x)
    for _ in range(topk):
        total += 2 * x
    assert torch.equal(total.double(), 2.0 * topk * x.double())
    with pytest.raises(ValueError, match="--dtype fp32"):
        rows.amplitude("bf16", 129)


def test_statistics():
    assert report.quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and report.quantile([0.0, 10.0], 0.9) == 9.0
    samples = [[1.0, 2.0], [3.0, 1.0]]
    assert [report.reduce_ranks(samples, how) for how in range(4)] == [
        [1.0, 2.0], [2.0, 1.5], [1.0, 1.0], [3.0, 2.0]
    ]  # fmt: skip


def test_one_thread_and_one_iteration_are_said_in_the_singular():
    described = environment.describe() | {"heap": "default", "threads": 1}
    said = " ".join(report.header_lines(config_of("-n", "1"), described, ["hybrid_ep"], False))
    assert ", 1 torch thread a rank" in said and "median of 1 iteration (" in said
    said = " ".join(report.header_lines(config_of(), described | {"threads": 2}, ["hybrid_ep"], False))
    assert ", 2 torch threads a rank" in said and "median of 10 iterations (" in said


def test_the_documented_run_has_today_s_header():
    asked = config_of("-b", "256", "-e", "1024", "-f", "4", "-n", "5", "-w", "1")
    lines = report.header_lines(asked, environment.describe() | {"heap": "default"}, ["hybrid_ep"], False)
    same = [line for line in lines if not line.startswith(("# hybrid-ep bench", "# backend"))]  # release and machine
    shown = (REPOSITORY / "docs" / "benchmark.md").read_text()
    assert len(same) > 4 and [line for line in same if report.fitted(line, False) not in shown] == []


# -- flags --------------------------------------------------------------------------------------------------


def test_token_sweep_and_lists():
    assert config_of("-b", "8", "-e", "100", "-f", "3").tokens == (8, 24, 72)
    assert config_of("--tokens", "5,0", "--num-sms", "0,4").tokens == (5, 0)
    assert config_of("--op", "all,step,pair").ops == ("dispatch", "combine", "pair", "step")
    assert config_of("--ranks-per-node", "2").num_local_ranks == 2 and config_of().num_local_ranks == 4


@pytest.mark.parametrize(
    "flags",
    [
        ["--experts", "63"], ["--topk", "65"], ["--topk", "0"], ["--hidden", "12"], ["--hidden", "0"],
        ["--ranks-per-node", "3"], ["--ranks", "0"], ["-b", "0"], ["-b", "9", "-e", "8"], ["-f", "1"],
        ["-n", "0"], ["-w", "-1"], ["-T", "0"], ["--tokens", "-1"], ["--num-sms", "-1"], ["--routing", "x"],
        ["--num-sms", "1025"], ["--threads", "-1"], ["--threads", "0"],
        ["--impl", "nobody"], ["--peer", "/nowhere.py"], ["--peer", "json"], ["--json", "/nowhere/out.json"],
    ],
)  # fmt: skip
def test_bad_flags_cost_one_sentence_and_exit_2(flags, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were launched"))
    assert main(["bench", *flags]) == EXIT_USAGE
    said = capsys.readouterr().err.strip()
    assert said.startswith("hybrid-ep bench: ") and "\n" not in said and flags[0] in said


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_malformed_variable_is_refused_before_ranks_start(command, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were launched"))
    monkeypatch.setenv("HYBRID_EP_TIMEOUT_S", "abc")
    assert main([command]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"hybrid-ep {command}: environment variable HYBRID_EP_TIMEOUT_S='abc'")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["bench", "tune"])
@pytest.mark.parametrize(
    "executor, said",
    [
        ("abacus", "environment variable HYBRID_EP_EXECUTOR='abacus' is not a valid name of an executor"),
        ("host_checked", "--backend host with HYBRID_EP_EXECUTOR=host_checked: --backend says what is measured; unset"),
        ("cuda", "--backend host with HYBRID_EP_EXECUTOR=cuda: --backend says what is measured; unset the variable, or "
         "give --backend cuda"),
    ],
)  # fmt: skip
def test_an_executor_that_would_not_run_is_refused_before_ranks_start(command, executor, said, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were launched"))
    monkeypatch.setenv("HYBRID_EP_EXECUTOR", executor)
    assert main([command]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"hybrid-ep {command}: {said}") and error.count("\n") == 1


def test_a_tuning_file_that_is_none_is_refused_before_ranks_start(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were launched"))
    monkeypatch.setenv("HYBRID_EP_TUNING", "/nowhere.json")
    assert main(["bench"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "HYBRID_EP_TUNING" in said and said.count("\n") == 1


def test_a_tuning_file_of_another_device_is_refused_before_ranks_start(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: EXIT_OK)
    (tmp_path / "t.json").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": []}))
    monkeypatch.setenv("HYBRID_EP_TUNING", str(tmp_path / "t.json"))
    assert main(["bench", *SMALL, "--ranks", "2"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "HYBRID_EP_TUNING: tuning=" in said and "2 ranks in nodes of 2, hidden 16, 8 experts, 16 tokens" in said
    assert said.startswith("hybrid-ep bench: ") and said.count("\n") == 1
    assert main(["bench", *SMALL, "--ranks", "2", "--impl", "torch-alltoall"]) == EXIT_OK  # has no buffer of ours


def test_a_peer_that_raises_when_it_is_loaded_is_named_with_the_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    peer = write_peer(tmp_path, "\nx = 1 / 0\n")
    assert main(["bench", "--peer", peer]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"hybrid-ep bench: --peer {peer}: ") and f"{peer}:2 raises ZeroDivisionError" in said
    assert said.count("\n") == 1


def test_an_error_in_a_rank_exits_3_and_is_explained_by_the_first_to_fail(one_rank, tmp_path, capsys, monkeypatch):
    broken = PEER.replace("done = super().dispatch()", "raise NotImplementedError('no dispatch here')")
    flags = ["bench", *SMALL, "--impl", "test-peer", "--peer", write_peer(tmp_path, broken)]
    assert main(flags) == EXIT_FAILED
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback") and any(f"{tmp_path}/peer.py" in line for line in said)
    assert said[-1] == "hybrid-ep bench: rank 0 failed with NotImplementedError: no dispatch here"
    monkeypatch.setattr("hybrid_ep.cli.bench.world._is_first_to_fail", lambda: False)
    assert (main(flags), capsys.readouterr().err) == (EXIT_FAILED, "")


def test_a_base_that_cannot_run_is_an_error_not_a_skip(one_rank, tmp_path, capsys):
    refusal = "name = 'never'\n    unavailable = classmethod(lambda *_: 'no')"
    never = PEER.replace('name = "test-peer"', refusal)
    assert main(["bench", *SMALL, "--impl", "never", "--peer", write_peer(tmp_path, never)]) == EXIT_USAGE
    assert "never cannot run here: no" in capsys.readouterr().err


# -- runs ---------------------------------------------------------------------------------------------------

PEER = textwrap.dedent(
    """
    from hybrid_ep.cli.bench.built_in import TorchAllToAll

    class Peer(TorchAllToAll):
        name = "test-peer"
        WRONG = None

        def dispatch(self):
            done = super().dispatch()
            if self.WRONG == "row":
                done.rows[0, 0] += 1
            if self.WRONG == "weight":
                done.weights[-1] *= 2
            return done

        def combine(self, dispatched, rows):
            combined = super().combine(dispatched, rows)
            if self.WRONG == "sum":
                combined[-1, -1] += 1
            return combined[1:] if self.WRONG == "shape" else combined

    PEERS = [Peer]
    """
)


def write_peer(folder: Path, text: str) -> str:
    path = folder / "peer.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("wrong, count", [("None", 0), ("'row'", 1), ("'weight'", 1), ("'sum'", 1), ("'shape'", 256)])
def test_a_wrong_value_is_counted_before_and_after_and_exits_1(one_rank, tmp_path, capsys, wrong, count):
    peer = write_peer(tmp_path, PEER.replace("WRONG = None", f"WRONG = {wrong}"))
    code = main(["bench", *SMALL, "--impl", "torch-alltoall", "--peer", peer, "--op", "pair"])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    assert [(line[3], int(line[-1])) for line in lines] == [("torch-alltoall", 0), ("test-peer", 2 * count)]
    assert f"# Out of bounds values : {2 * count} {'FAILED' if count else 'OK'}" in printed
    assert code == (EXIT_WRONG if count else EXIT_OK)


def test_a_counter_that_differs_from_the_closed_form_exits_1(one_rank, tmp_path, capsys):
    counting = PEER.replace(
        "    WRONG = None\n",
        "    WRONG = None\n    calls = 0\n\n"
        "    def link_rows(self):\n        return {'rail': 0, 'node': self.calls, 'self': 0}\n",
    ).replace("done = super().dispatch()", "done = super().dispatch()\n        self.calls += 1")
    peer = write_peer(tmp_path, counting)
    assert main(["bench", *SMALL, "--impl", "test-peer", "--peer", peer, "--op", "pair"]) == EXIT_WRONG
    # Alone all rows are "self", so two of the three counters are off: node by one, self by all.
    assert "differ from the closed form : 2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--no-permute", "--route-as", "topk", "--dtype", "fp32"]])
def test_json_holds_everything(one_rank, tmp_path, flags, capsys):
    out = tmp_path / "out.json"
    names = ["reference", "torch-alltoall"]
    run = ["bench", *SMALL, "--impl", ",".join(names), "--op", "all,step", "-J", str(out), "-M", "-I"]
    assert main([*run, *flags]) == EXIT_OK
    document = json.loads(out.read_text())
    assert document["schema"] == report.SCHEMA and document["wrong_total"] == 0
    assert {"config", "environment", "wires", "cases", "peak_rss_bytes", "argv"} <= set(document)
    assert {"commit", "torch", "cpu_model", "cores", "date", "python"} <= set(document["environment"])
    (case,) = document["cases"]
    assert case["tokens_per_rank"] == [16] and case["wrong"] == {"reference": 0, "torch-alltoall": 0}
    assert [(row["op"], row["implementation"]) for row in case["rows"]] == [
        (op, name) for op in ("dispatch", "combine", "pair", "step") for name in names
    ]
    for samples in case["samples_s"]:
        (of_rank_0,) = samples["by_rank"]
        assert len(of_rank_0) == 2 and min(of_rank_0) > 0
    for row in case["rows"]:
        assert row["min_us"] <= row["p10_us"] <= row["time_us"] <= row["p90_us"] <= row["p99_us"]
        assert row["algbw"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
    assert case["memcpy_gbps"]["median"] > 0
    assert [limit["op"] for limit in case["limits"]] == ["dispatch", "combine", "pair", "step"]
    for limit in case["limits"]:  # of one node
        assert limit["one_pass_us"] == limit["floor_us"] <= limit["staged_us"]
    printed = capsys.readouterr().out
    share = case["limits"][0]["one_pass_share"]
    assert f"# reference dispatch: {share:.1%} of the one-pass limit (by memmove, rows land where" in printed
    assert "hierarchical path" not in printed
    assert "# iterations 16 pair reference" in printed and "# Peak resident memory" in printed


def test_interleaving_rotates_who_starts(one_rank, tmp_path, capsys):
    log = tmp_path / "order"
    noisy = PEER.replace(
        "done = super().dispatch()", f"open({str(log)!r}, 'a').write(self.name[0]); done = super().dispatch()"
    )
    second = noisy.replace('"test-peer"', '"other"')
    (tmp_path / "b").mkdir()
    run = ["bench", *SMALL, "--impl", "test-peer,other", "-w", "0", "-n", "4", "-c", "0", "--op", "dispatch"]
    peers = ["--peer", write_peer(tmp_path, noisy), "--peer", write_peer(tmp_path / "b", second)]
    assert main([*run, *peers]) == EXIT_OK
    assert log.read_text() == "toottoot"


def test_ranks_are_launched_and_a_reference_too_large_is_skipped_aloud(tmp_path, monkeypatch, capfd):
    """Four ranks as 2 nodes x 2, uneven, several sizes: the whole program as a user calls it."""
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "out.json"
    peer = """
        from hybrid_ep.cli.bench.built_in import Reference
        Reference.max_gathered_bytes = 1 << 20
        PEERS = []
    """
    flags = f"""
        --ranks 4 --ranks-per-node 2 --ragged zero-last --routing zipf:1 --tokens 24,16384 --topk 2
        --experts 8 --hidden 8 -n 1 -w 0 --op pair -T 200 --impl torch-alltoall,reference
        --peer {write_peer(tmp_path, textwrap.dedent(peer))} -J {out}
    """
    assert main(["bench", *flags.split()]) == EXIT_OK
    printed = capfd.readouterr().out
    assert printed.count("# Out of bounds values : 0 OK") == 1  # one rank prints
    assert "# reference skipped at 16384 tokens: rank 0: it would gather" in printed
    document = json.loads(out.read_text())
    assert document["config"]["num_ranks"] == 4 and document["wrong_total"] == 0
    small_case, large_case = document["cases"]
    assert small_case["tokens_per_rank"] == [24, 24, 24, 0]
    assert set(small_case["wrong"]) == {"torch-alltoall", "reference"} and not small_case["skipped"]
    assert set(large_case["wrong"]) == {"torch-alltoall"} == set(large_case["buffer_bytes"])
    by_rank = next(s["by_rank"] for s in small_case["samples_s"] if s["implementation"] == "reference")
    assert len(by_rank) == 4


def test_ranks_that_hang_are_named_and_ended_at_the_deadline(hanging):
    ended, seconds = hanging.result()
    assert ended.returncode == EXIT_FAILED
    assert "ranks [0] still run after 20 s" in ended.stderr and "peer.py" in ended.stderr
    assert seconds < 150


def test_where_measured_lines_cross_the_other_path():
    def row(tokens, name, time_us, op="pair"):
        return report.Row(tokens, 0, op, name, 0, *[time_us] * 5, *[None] * 9, 0)

    rows = [row(16, "hybrid_ep", 300.0), row(16, "hybrid_ep-latency", 200.0), row(16, "megatron-alltoall", 100.0)]
    rows += [row(64, "hybrid_ep", 400.0), row(64, "hybrid_ep-latency", 500.0), row(64, "hybrid_ep", 1.0, op="route")]
    ((num_sms, found),) = report.crossings(rows)
    assert (num_sms, found.op, found.latency_tokens, found.throughput_from) == (0, "pair", 16, 64)
    assert list(report.crossings(rows[:1])) == [], "nothing to compare with"
