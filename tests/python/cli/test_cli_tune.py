"""`hybrid-ep tune`: fronts and choices by hand, a measured and a predicted grid, the file that a buffer loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid_ep import tuning
from hybrid_ep.cli import EXIT_OK, EXIT_USAGE, EXIT_WRONG, launch, main
from hybrid_ep.cli.tune import predicted
from hybrid_ep.cli.tune.grid import Grid, Point, Setting
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import crossover, latency_events, model, recommend
from hybrid_ep.perf.implementations import HYBRID_EP
from hybrid_ep.perf.shape import Shape
from hybrid_ep.runtime import devices, options, topology
from hybrid_ep.testing import VirtualWorld
from hybrid_ep.tuning import Key, Settings


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were launched"))


def grid_of(times: dict[tuple[int, int], float]) -> Grid:
    points = [Point(op, sms, chunk, us) for op in ("dispatch", "combine") for (sms, chunk), us in times.items()]
    return Grid("x", Key(4, 2, 64, 8), 128, 2, "bf16", tuple(points), Setting(1, 32))


def test_front_and_choice_by_hand():
    grid = grid_of(
        {
            (1, 32): 100.0,
            (1, 64): 90.0,
            (2, 32): 95.0,
            (4, 8): 51.5,
            (4, 32): 51.0,
            (4, 64): 53.0,
            (8, 32): 50.0,
            (8, 8): 49.5,
            (16, 32): 49.5,
        }
    )
    # 2 SMs are slower than 1 with the better chunk; 16 are as fast as 8, with more SMs
    assert [(p.num_sms, p.chunk) for p in grid.front("dispatch")] == [(1, 64), (4, 32), (8, 8)]
    # 4 SMs are within 5 % of 49.5; of their chunks 8 and 32 are within 2 % of 51.0, and 64 is not
    assert grid.settings == Settings(4, 4, 32, 32)
    assert grid.at("combine", Setting(1, 32)).time_us == 100.0
    assert grid_of({(1, 32): 10.0}).settings == Settings(1, 1, 32, 32)
    entry = grid.entry()
    assert entry["settings"]["num_sms_dispatch"] == 4 and entry["operations"]["dispatch"]["default"]["time_us"] == 100.0
    assert entry["operations"]["combine"]["analytic"] is None and len(entry["points"]) == 18


def test_a_cluster_that_is_not_there(launcher, tmp_path, capsys):
    out = tmp_path / "t.json"
    run = ["tune", "--backend", "sim", "--nodes", "2", "--tokens", "256,1024", "--num-sms", "4,16,48", "--chunk",
           "16,64", "-o", str(out)]  # fmt: skip
    assert main(run) == EXIT_OK
    printed = capsys.readouterr().out
    assert "# SIMULATED" in printed and "default" in printed and "analytic" in printed and "*" in printed
    document = json.loads(out.read_text())
    assert [e["shape"]["tokens"] for e in document["entries"]] == [256, 1024]
    entry, shape, cluster = document["entries"][1], Shape(16, 8, 1024, 7168, 8, 256), clusters.get("h100_8x400g")
    assert entry["device"] == "H100" and entry["made"]["source"] == "simulated"
    for point in entry["points"]:
        want = model.predict(point["op"], shape, cluster, num_sms=point["num_sms"], chunk=point["chunk"])
        assert point["time_us"] == want.api_us and point["p10_us"] is None
    advice = recommend.tune(shape, cluster)
    analytic = entry["operations"]["combine"]["analytic"]
    assert (analytic["num_sms"], analytic["chunk"]) == (advice.num_sms, advice.chunk)
    assert entry["operations"]["combine"]["default"]["num_sms"] == predicted.default(shape, cluster).num_sms
    # a machine of that cluster finds it, by its driver's name; 300 tokens are nearer to 256
    table = tuning.load(out, "NVIDIA H100 80GB HBM3")
    key = Key(16, 8, 7168, 256)
    assert table.find(key, 1000) == Settings(**entry["settings"])
    assert table.find(key, 300) == Settings(**document["entries"][0]["settings"])
    with pytest.raises(ValueError, match="has no entry"):
        tuning.load(out, "NVIDIA B200").find(key, 1024)
    # the same shape again replaces its entry, another one is added
    assert main([*run[:-4], "--chunk", "64", "-o", str(out)]) == EXIT_OK
    assert main([*run[:5], "--tokens", "4096", "--num-sms", "8", "--chunk", "32", "-o", str(out)]) == EXIT_OK
    document = json.loads(out.read_text())
    assert [e["shape"]["tokens"] for e in document["entries"]] == [256, 1024, 4096]
    suggested = recommend.tune(shape.with_(tokens=256), cluster).chunk
    assert {p["chunk"] for p in document["entries"][0]["points"]} == {64, HYBRID_EP.chunk, suggested}


def test_the_predicted_example_of_the_page_is_what_the_command_prints(launcher, capsys):
    page = (Path(__file__).resolve().parents[3] / "docs" / "tuning.md").read_text().splitlines()
    assert main("tune --backend sim --nodes 4 --num-sms 8 --chunk 16,32,64".split()) == EXIT_OK
    said = [line for line in capsys.readouterr().out.splitlines() if "dispatch" in line and "default" in line]
    assert said[-1].startswith("# dispatch at 4096 tokens: tuned 8 SMs, chunk 64") and said[-1] in page
    assert said[-2].split()[2:4] == ["10", "16"] and said[-2] in page


@pytest.mark.parametrize(
    "name, cluster, shape",
    [
        ("NVIDIA H100 80GB HBM3", "h100_8x400g", Shape(32, 8, 4096, 7168, 8, 256)),
        ("NVIDIA H100 80GB HBM3", "h100_8x400g", Shape(8, 8, 4096, 7168, 4, 256)),
        ("NVIDIA B300", "b300_8x800g", Shape(16, 8, 512, 2048, 2, 64)),
        ("NVIDIA GB200", "gb200_nvl36", Shape(36, 36, 4096, 8192, 8, 72)),
    ],
)
def test_a_predicted_default_is_what_a_buffer_on_such_gpus_takes(monkeypatch, name, cluster, shape):
    monkeypatch.delenv("HYBRID_EP_NUM_BLOCKS", raising=False)
    o = options.parse(
        hidden_dim=shape.hidden,
        max_num_of_tokens_per_rank=shape.tokens,
        num_local_experts=shape.local_experts,
        use_fp8=False,
        num_sms_dispatch_api=None,
        num_sms_combine_api=None,
        num_blocks_permute=None,
        num_blocks_unpermute=None,
        ranks_per_node=shape.ranks_per_node,
        capacity_factor=None,
        overflow="raise",
        timeout_s=1,
        executor="host",
        tuning_file="",
    )
    o.executor = "cuda"
    monkeypatch.setattr(devices, "name_and_capability", lambda _: (name, (9, 0) if "H100" in name else (10, 0)))
    where = topology.resolve(0, ["a"] * shape.ranks, shape.ranks_per_node, "")
    assert o.choose_blocks(where, virtual=False) is not None
    took = [  # blocks of one grid
        Setting(o.num_blocks_dispatch + o.num_blocks_permute, o.chunks["dispatch"]),
        Setting(o.num_blocks_combine + o.num_blocks_unpermute, o.chunks["combine"]),
    ]
    assert took == 2 * [predicted.default(shape, clusters.get(cluster))] and took[0].num_sms > 1


def test_gpus_are_known_by_their_drivers_names():
    assert predicted.cluster_of("NVIDIA H100 80GB HBM3").name.startswith("h100")
    assert predicted.cluster_of("NVIDIA GB200").name.startswith("gb200")
    assert predicted.cluster_of("AMD EPYC") is None


def test_a_predicted_crossover_is_found_by_the_machines_it_is_of(launcher, tmp_path, capsys):
    out = tmp_path / "t.json"
    run = ["tune", "--backend", "sim", "--ranks-per-node", "4", "--hidden", "2048", "--experts", "16", "--topk", "4",
           "--tokens", "512", "--num-sms", "4", "--chunk", "32", "-o", str(out)]  # fmt: skip
    assert main([*run, "--latency-tokens", "8,4096"]) == EXIT_OK
    assert "a pair by lines is faster up to 8 tokens a rank and not at 4096" in capsys.readouterr().out
    document = json.loads(out.read_text())
    (found,), blocks = document["crossovers"], document["entries"][0]["settings"]
    sms = {name: blocks[f"num_{name[-3:]}_{name[:-4]}"] for name in ("dispatch_sms", "combine_sms")}
    assert found["made"]["source"] == "simulated"
    assert (found["num_sms_dispatch"], found["num_sms_combine"]) == tuple(sms.values())
    shape = Shape(4, 4, 8, 2048, 4, 16)
    for point, tokens in zip(found["points"], (8, 4096), strict=True):
        row = crossover.predict(shape.with_(tokens=tokens), clusters.get("h100_8x400g"), **sms)["pair"]
        assert point == row.to_json() and row.op == "pair"
    table, key = tuning.load(out, "NVIDIA H100 80GB HBM3"), Key(4, 4, 2048, 16)
    assert table.crossover(key) == 8 and table.crossover(key._replace(hidden=4096)) is None
    assert tuning.load(out, "NVIDIA B200").crossover(key) is None
    # a run that compares nothing keeps what the file says; one that does replaces it
    assert main(run) == EXIT_OK
    assert tuning.load(out, "NVIDIA H100").crossover(key) == 8
    assert main([*run, "--latency-tokens", "4096"]) == EXIT_OK
    assert tuning.load(out, "NVIDIA H100").crossover(key) == 0 and len(json.loads(out.read_text())["crossovers"]) == 1
    assert "path='auto' of a buffer with this file takes lines up to 0 tokens" in capsys.readouterr().out


def test_a_crossover_over_nodes_is_found_by_groups_of_as_many_nodes(launcher, tmp_path, capsys):
    out = tmp_path / "t.json"
    run = ["tune", "--backend", "sim", "--nodes", "2", "--ranks-per-node", "2", "--hidden", "2048", "--experts", "16",
           "--topk", "4", "--tokens", "512", "--num-sms", "4", "--chunk", "32", "-o", str(out)]  # fmt: skip
    assert main([*run, "--latency-tokens", "8,4096"]) == EXIT_OK
    assert "a pair by lines is faster up to 8 tokens a rank and not at 4096" in capsys.readouterr().out
    (found,) = json.loads(out.read_text())["crossovers"]
    sms = {f"{op}_sms": found[f"num_sms_{op}"] for op in ("dispatch", "combine")}
    row = crossover.predict(Shape(4, 2, 8, 2048, 4, 16), clusters.get("h100_8x400g"), **sms)["pair"]
    assert found["points"][0] == row.to_json()
    table = tuning.load(out, "NVIDIA H100 80GB HBM3")
    assert table.crossover(Key(4, 2, 2048, 16)) == 8 and table.crossover(Key(4, 4, 2048, 16)) is None


def test_each_operation_is_predicted_with_its_own_blocks():
    shape, cluster = Shape(4, 4, 64, 2048, 4, 16), clusters.get("h100_8x400g")
    alike = {n: crossover.predict(shape, cluster, dispatch_sms=n, combine_sms=n) for n in (2, 8)}
    found = crossover.predict(shape, cluster, dispatch_sms=2, combine_sms=8)
    assert found["dispatch"] == alike[2]["dispatch"] != alike[8]["dispatch"]
    assert found["combine"] == alike[8]["combine"] != alike[2]["combine"]
    # Lines have the whole grid: 2 blocks and 3 for local work, 8 and 12.
    by_lines = {n: latency_events.measure(shape, cluster, num_sms=n) for n in (5, 20)}
    assert found["dispatch"].latency_us == by_lines[5].dispatch_us
    assert found["combine"].latency_us == by_lines[20].combine_us
    assert found["pair"].latency_us == found["dispatch"].latency_us + found["combine"].latency_us


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_measured_crossover_compares_the_paths_bits(nodes, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "t.json"
    run = ["tune", "--ranks", "2", "--tokens", "24", "--hidden", "128", "--experts", "4", "--topk", "2", "--dtype",
           "fp8", "--num-sms", "1,2", "--chunk", "8", "-n", "2", "-w", "1", "-T", "200", "--latency-tokens", "24,3,3",
           "-o", str(out), "--ranks-per-node", str(2 // nodes)]  # fmt: skip
    assert main(run) == EXIT_OK
    assert "# Elements that a setting changed : 0 OK" in capfd.readouterr().out
    (found,) = json.loads(out.read_text())["crossovers"]
    assert [(p["tokens"], p["op"]) for p in found["points"]] == [(3, "pair"), (24, "pair")]
    said = [p["tokens"] for p in found["points"] if p["ratio"] < 1]
    assert found["latency_tokens"] in (0, *said) and found["made"]["source"] == "host"
    (buffer, _) = VirtualWorld(nodes, 2 // nodes).buffers(128, 24, 2, timeout_s=20, tuning=str(out), latency_tokens=24)
    assert buffer._session.options.auto_latency_tokens == found["latency_tokens"]


def test_paths_that_differ_are_an_error_and_write_nothing(tmp_path, monkeypatch, capsys):
    from hybrid_ep import HybridEPBuffer

    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    dispatch = HybridEPBuffer.dispatch_with_permute

    def wrong(self, **call):
        rows, *rest = dispatch(self, **call)
        return (rows + 1 if call.get("path") == "latency" else rows, *rest)

    monkeypatch.setattr(HybridEPBuffer, "dispatch_with_permute", wrong)
    out = tmp_path / "t.json"
    run = ["tune", "--tokens", "8", "--hidden", "64", "--experts", "4", "--topk", "2", "--num-sms", "1", "--chunk", "8",
           "-n", "1", "--latency-tokens", "8", "-o", str(out)]  # fmt: skip
    assert main(run) == EXIT_WRONG
    assert "FAILED" in capsys.readouterr().out and not out.exists()


def test_a_measured_file_is_what_a_buffer_on_this_machine_loads(tmp_path, monkeypatch, capfd):
    """Two ranks as two nodes, so that chunks cross a rail; then a virtual world of the same shape with the file."""
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "t.json"
    run = ["tune", "--ranks", "2", "--ranks-per-node", "1", "--tokens", "48", "--hidden", "128", "--experts", "4",
           "--topk", "2", "--dtype", "fp8", "--num-sms", "2,3", "--chunk", "4,64", "-n", "2", "-w", "1", "-T", "200",
           "-o", str(out)]  # fmt: skip
    assert main(run) == EXIT_OK
    printed = capfd.readouterr().out
    assert "# Elements that a setting changed : 0 OK" in printed
    (entry,) = json.loads(out.read_text())["entries"]
    points = {(p["op"], p["num_sms"], p["chunk"]) for p in entry["points"]}
    grid = {(2, 4), (2, 64), (3, 4), (3, 64), (1, 16)}  # what was asked for and the default
    assert points == {(op, *point) for op in ("dispatch", "combine") for point in grid}
    assert all(p["p10_us"] <= p["time_us"] <= p["p90_us"] for p in entry["points"])
    assert entry["device"] == tuning.cpu_model() and entry["operations"]["dispatch"]["analytic"] is None
    world = VirtualWorld(2, 1)
    config = world.buffers(128, 48, 2, timeout_s=20, tuning=str(out))[0].config
    assert (
        config.num_of_blocks_dispatch_api,
        config.num_of_blocks_combine_api,
        config.chunk("dispatch"),
        config.chunk("combine"),
    ) == tuple(entry["settings"].values())
    with pytest.raises(ValueError, match="has no entry for"):
        world.buffers(256, 48, 2, timeout_s=20, tuning=str(out))


def test_a_setting_that_changes_a_result_is_an_error_and_writes_nothing(tmp_path, monkeypatch, capsys):
    from hybrid_ep import HybridEPBuffer

    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    combine = HybridEPBuffer.combine_with_unpermute

    def wrong(self, **call):
        out, probs = combine(self, **call)
        return (out + 1 if self.config.num_of_blocks_combine_api == 3 else out), probs

    monkeypatch.setattr(HybridEPBuffer, "combine_with_unpermute", wrong)
    out = tmp_path / "t.json"
    run = ["tune", "--tokens", "8", "--hidden", "64", "--experts", "4", "--topk", "2", "--num-sms", "3",
           "--chunk", "8", "-n", "1", "-o", str(out)]  # fmt: skip
    assert main(run) == EXIT_WRONG
    assert "FAILED" in capsys.readouterr().out and not out.exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num-sms", "0"], "--num-sms 0: must be at least 1"),
        (["--chunk", "8,0"], "--chunk 8,0"),
        (["--tokens", "0"], "--tokens 0"),
        (["-n", "0"], "-n 0"),
        (["--topk", "99"], "--topk 99"),
        (["--experts", "63"], "--experts 63"),
        (["-o", "/nowhere/t.json"], "no such folder"),
        (["--ranks-per-node", "3"], "--ranks-per-node 3"),
        (["--nodes", "2"], "only --backend sim"),
        (["--backend", "sim", "--ranks", "2"], "--nodes"),
        (["--backend", "sim", "--dtype", "fp16"], "--dtype fp16"),
        (
            ["--backend", "sim", "--dtype", "fp8", "--latency-tokens", "9,8"],
            "--dtype fp8 with --backend sim --latency-t",
        ),
        (["--backend", "sim", "--num-sms", "999"], "--num-sms 999 must"),
        (["--dtype", "nvfp4"], "only the simulator"),
        (["--latency-tokens", "8,0"], "--latency-tokens 8,0: must be at least 1"),
    ],
)
def test_bad_flags_cost_one_sentence(launcher, flags, words, capsys):
    assert main(["tune", *flags]) == EXIT_USAGE
    said = capsys.readouterr().err.strip()
    assert said.startswith("hybrid-ep tune: ") and "\n" not in said and words in said


def test_a_file_that_is_something_else_is_left_alone(launcher, tmp_path, capsys):
    other = tmp_path / "notes.json"
    other.write_text('{"mine": 1}')
    assert main(["tune", "--backend", "sim", "-o", str(other)]) == EXIT_USAGE
    assert "give another name" in capsys.readouterr().err and json.loads(other.read_text()) == {"mine": 1}


def test_the_device_s_own_name_is_the_key():
    assert tuning.device_name(torch.device("cpu")) == tuning.cpu_model()
