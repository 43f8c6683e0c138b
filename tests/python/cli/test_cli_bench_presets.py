"""`hybrid-ep bench --preset hybrid-ep-blog --backend sim`: published conditions, by both engines."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hybrid_ep.cli import EXIT_OK, main
from hybrid_ep.cli.bench import presets
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import events, model
from hybrid_ep.perf.shape import Shape

SIM = ["bench", "--backend", "sim", "--op", "dispatch,combine"]


@pytest.fixture
def few(monkeypatch):
    """The condition of 8 H100 with few tokens."""
    c = dataclasses.replace(presets.CONDITIONS["hybrid-ep-blog-h100-8"], tokens=128)
    monkeypatch.setitem(presets.CONDITIONS, c.name, c)
    return c


def claims(path):
    (world,) = json.loads(path.read_text())["worlds"]
    return {(p["op"], p["num_sms"]): p["shares"] for p in world["published"] if p["kind"] == "claim"}


def test_the_blog_s_three_conditions_beside_published_figures(tmp_path, capsys, monkeypatch):
    out = tmp_path / "b.json"
    answers, measure = [], events.measure

    def kept(*args, **options):
        answers.append((args, options, measure(*args, **options)))
        return answers[-1][-1]

    monkeypatch.setattr(events, "measure", kept)  # some seconds: once is enough
    run = ["bench", "--preset", "hybrid-ep-blog", "--backend", "sim", "--op", "dispatch,combine", "-J", str(out)]
    assert main(run) == EXIT_OK
    printed = capsys.readouterr().out
    assert printed.count("# SIMULATED") == 3
    worlds = json.loads(out.read_text())["worlds"]
    assert [(w["preset"], w["shape"]["ranks"], w["shape"]["hidden"], w["shape"]["experts"]) for w in worlds] == [
        ("hybrid-ep-blog-h100-8", 8, 8192, 16),
        ("hybrid-ep-blog-h100-32", 32, 8192, 64),
        ("hybrid-ep-blog-gb200-36", 36, 8192, 72),
    ]
    for world, sms in zip(worlds, (8, 4, 16), strict=True):
        assert {r["num_sms"] for r in world["rows"]} == {sms // 2, sms, 2 * sms}
        assert {p["op"] for p in world["published"] if p["kind"] == "claim" and p["num_sms"] == sms} == set(model.OPS)
    tables = [[p for p in w["published"] if p["kind"] == "table"] for w in worlds]
    assert [len(t) for t in tables] == [0, 12, 8]
    # one row of the README's table, and the prediction beside it
    (row,) = [p for p in tables[1] if (p["op"], p["num_sms"], p["scope"]) == ("dispatch", 4, "kernel")]
    assert row["published_gbps"] == 52.6 and abs(row["residual"]) < 0.1
    mine = model.predict("dispatch", Shape(32, 8, 4096, 7168, 8, 256), clusters.get("h100_8x400g"), num_sms=4)
    assert row["hybrid_ep_gbps"] == pytest.approx(mine.logical["rail"]) and "52.6" in printed
    # of 8 ranks both engines at the claimed SMs, of the others how to ask
    shares = [
        {(p["op"], p["num_sms"]): p["shares"] for p in w["published"] if "event engine" in p.get("shares", {})}
        for w in worlds
    ]
    assert set(shares[0]) == {(op, 8) for op in model.OPS} and shares[1:] == [{}, {}]
    ((args, options, got),) = answers
    assert args == (Shape(8, 8, 4096, 8192, 8, 16), clusters.get("h100_8x400g"))
    assert {name: value for name, value in options.items() if value is not None} == {"num_sms": 8}
    for row in worlds[0]["rows"]:
        if row["num_sms"] == 8:
            found = shares[0][row["op"], 8]
            assert found["hybrid_ep"] == row["kernel_share"]
            assert found["event engine"] * got.kernel_us[row["op"]] == pytest.approx(
                found["hybrid_ep"] * row["kernel_us"]
            )
    for name, sms in (("h100-32", 4), ("gb200-36", 16)):
        assert f"--preset hybrid-ep-blog-{name} --num-sms {sms} --engine events" in printed


def test_whichever_engine_is_asked_for_the_other_stands_beside_it(few, tmp_path, capsys):
    by_engine = {}
    for engine in ("model", "events"):
        out = tmp_path / f"{engine}.json"
        run = [*SIM, "--preset", few.name, "--num-sms", "8", "--engine", engine, "-J", str(out)]
        assert main(run) == EXIT_OK
        by_engine[engine] = claims(out)
        assert "--engine events" not in capsys.readouterr().out
    assert by_engine["model"].keys() == by_engine["events"].keys() == {(op, 8) for op in model.OPS}
    for key, shares in by_engine["model"].items():
        assert shares == pytest.approx(by_engine["events"][key])
        assert shares["event engine"] != pytest.approx(shares["hybrid_ep"], rel=0.01)


def test_an_engine_that_is_not_here_is_named(few, monkeypatch, capsys):
    monkeypatch.setattr(events, "missing", lambda: "no core")
    assert main([*SIM, "--preset", few.name, "--num-sms", "8"]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "is not here: no core" in printed and "event engine  " not in printed


def test_rows_without_permute_stand_beside_no_event_engine(few, capsys):
    assert main([*SIM, "--preset", few.name, "--num-sms", "8", "--no-permute"]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "event engine  " not in printed and "--engine events" not in printed


def test_an_answer_serves_all_operations_of_a_case(few, monkeypatch):
    asked = []
    real = events.measure
    monkeypatch.setattr(events, "measure", lambda *args, **options: asked.append(1) or real(*args, **options))
    assert (
        main([*SIM[:3], "--op", "dispatch,combine,pair", "--preset", few.name, "--num-sms", "8", "--engine", "events"])
        == 0
    )
    assert len(asked) == 1
