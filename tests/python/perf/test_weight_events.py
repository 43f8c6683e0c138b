"""Weights instead of tokens on the virtual clock: published numbers, and laws that hold whatever is drawn."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_ep.cli import main
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import dwdp, models, weight_events
from hybrid_ep.perf.weight_events import Job, lengths, tokens_move, weights_move

DEEPSEEK, GB200 = models.get("deepseek_v3"), clusters.get("gb200_nvl72")


def job(tokens, layers=58, **options):
    """4 ranks that are given the same, or [iterations, ranks]."""
    given = np.full((2, dwdp.PUBLISHED_GROUP), tokens) if isinstance(tokens, int) else tokens
    return Job(DEEPSEEK, GB200, given, layers, **options)


@pytest.mark.parametrize("tokens, published", dwdp.PUBLISHED_DEP_OVER_DWDP.items())
def test_the_winner_changes_where_the_published_one_does(tokens, published):
    ratio = tokens_move(job(tokens)).iteration_us / weights_move(job(tokens)).iteration_us
    assert ratio == pytest.approx(published, rel=0.15) and (ratio > 1) == (published > 1)


def test_the_published_break_down():
    """1319.85 to 1131.58 ms: exchange and wait go, copies slow compute. Four sequences of 8,192 tokens a rank, as the
    first command of docs/weights.md has them, which has what comes out."""
    asked = job(np.full((8, dwdp.PUBLISHED_GROUP), 32768), sequence=8192)
    tokens, weights = tokens_move(asked), weights_move(asked)
    assert tokens.iteration_us / 1e3 == pytest.approx(1319.85, rel=0.15)
    assert tokens.exchange_us / 1e3 == pytest.approx(126.7, rel=0.15)
    assert asked.prefetch_us * 58 / 1e3 == pytest.approx(429, rel=0.02)
    change = weights.iteration_us / tokens.iteration_us - 1
    assert change == pytest.approx(1131.58 / 1319.85 - 1, abs=0.05) and change == pytest.approx(-0.156, abs=5e-4)
    assert weights.waited_us < 0.01 * weights.iteration_us, "copies hide behind compute"


def test_lengths_that_vary_by_a_fifth_cost_tokens_a_tenth_which_weights_save():
    asked = job(lengths(16384, 4, 8, cv=0.2), sequence=8192)
    tokens, weights = tokens_move(asked), weights_move(asked)
    assert (tokens.waited_us - weights.waited_us) / tokens.iteration_us >= 0.10


def test_slices_gain_where_ranks_read_from_the_same_owner():
    """Lengths from a half to the whole of 16,384 tokens: pulled whole, an engine stands before a memory in use."""
    asked = job(lengths(16384, 4, 8, shortest=0.5))
    whole, sliced = weights_move(replace(asked, slices=1)), weights_move(asked)
    assert whole.iteration_us / sliced.iteration_us - 1 >= 0.08
    assert whole.blocked_us > 2 * sliced.blocked_us


def test_without_slowing_and_contention_the_roofline_is_what_comes_out(monkeypatch):
    monkeypatch.setattr(weight_events, "SLOWED", 1.0)
    for tokens in (1024, 32768):
        asked = job(tokens, layers=20, cv=0.0)
        longest = max(float(asked.compute_us(DEEPSEEK.experts)[0, 0, 0]), asked.prefetch_us)
        assert weights_move(asked).iteration_us == pytest.approx(20 * longest, rel=0.12)


@settings(max_examples=20)
@given(
    st.sampled_from([2, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 40_000),
    st.integers(1, 6),
    st.data(),
)
def test_laws(ranks, iterations, layers, most, slices, data):
    """Never faster than compute or copies alone; spans of a track do not overlap; nobody is served twice at once."""
    tokens = np.array(
        data.draw(st.lists(st.integers(1, most), min_size=ranks * iterations, max_size=ranks * iterations))
    )
    group = data.draw(st.sampled_from([None, *(n for n in (2, 4, 8) if n <= ranks)]))
    asked = Job(DEEPSEEK, GB200, tokens.reshape(iterations, ranks), layers, slices=slices, group=group)
    got = weights_move(asked)
    alone = asked.compute_us(DEEPSEEK.experts).sum(axis=(0, 1)).mean() / iterations
    assert got.iteration_us >= max(alone, asked.prefetch_us * layers) * (1 - 1e-9)
    assert got.iteration_us == pytest.approx(got.compute_us + got.waited_us)
    assert got.compute_us <= weight_events.SLOWED * alone * (1 + 1e-9)
    tracks: dict[tuple[str, str], list] = {}
    for span in got.spans:
        tracks.setdefault((span.process, span.track), []).append((span.start, span.start + span.duration))
        if span.track == "copy engine" and span.name.startswith("layer"):
            memory = ("memory", span.name.split(" of ")[1])
            assert int(memory[1].split()[1]) in asked.others(int(span.process.split()[1]))
            tracks.setdefault(memory, []).append((span.start, span.start + span.duration))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert sum(span.name == f"layer {layers - 1}" for span in got.spans) == ranks * iterations
    moved = tokens_move(asked)
    assert moved.iteration_us == pytest.approx(moved.compute_us + moved.exchange_us + moved.waited_us)


def test_a_group_pulls_fewer_experts_than_all_ranks_and_a_group_of_all_as_many():
    """Two of four ranks have half of the experts each and pull 128, of 192; where that is what lasts, time is less."""
    whole = job(1024, layers=8)
    pairs, all_four = replace(whole, group=2), replace(whole, group=4)
    assert pairs.prefetch_us == pytest.approx(whole.prefetch_us * 128 / 192)
    assert weights_move(all_four) == weights_move(whole)
    assert weights_move(pairs).iteration_us < 0.8 * weights_move(whole).iteration_us
    assert [pairs.others(rank) for rank in range(4)] == [[1], [0], [3], [2]]
    assert all_four.others(2) == [3, 0, 1]
    for group in (1, 3, 8):
        with pytest.raises(ValueError, match=f"group={group} must be at least 2 and divide the 4"):
            replace(whole, group=group)


def test_wrong_numbers_say_what_is_right():
    for tokens in (np.full((1, 1), 8), np.full((1, 3), 8), np.full(4, 8), np.zeros((1, 4))):
        with pytest.raises(ValueError, match="must be .iterations, ranks."):
            job(tokens)
    with pytest.raises(ValueError, match="slices=0"):
        job(8, slices=0)
    for options, text in (({"cv": 0.1, "shortest": 0.5}, "one of them"), ({"shortest": 0.0}, "shortest=0.0")):
        with pytest.raises(ValueError, match=text):
            lengths(8, 4, 1, **options)


def test_the_command(tmp_path, capsys):
    words = "simulate --move auto --cluster gb200_nvl72 --ranks-per-node 4 --dtype nvfp4 --tokens 16384 --sequences 2"
    assert main([*words.split(), "--trace", str(tmp_path / "t.json"), "--json", str(tmp_path / "j.json")]) == 0
    said, numbers = capsys.readouterr().out, json.loads((tmp_path / "j.json").read_text())
    assert "moving weights takes -" in said and numbers["faster"] == "weights"
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert numbers["weight_group"] == 4
    assert main([*words.split(), "--weight-group", "2", "--json", str(tmp_path / "g.json")]) == 0
    of_two = json.loads((tmp_path / "g.json").read_text())
    assert of_two["weight_group"] == 2 and of_two["prefetch_us"] == pytest.approx(numbers["prefetch_us"] * 2 / 3)
    assert "weights in groups of 2 ranks" in capsys.readouterr().out
    assert "waits for weights" in names and any(name.startswith("waits for rank") for name in names)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--nodes 2", "--nodes 2: weights move inside"),
        ("--ranks-per-node 1", "--ranks-per-node 1: must be from 2 to"),
        ("--slices 0", "--slices 0"),
        ("--ranks-per-node 4 --weight-group 3", "--weight-group 3: must be at least 2 and divide the 4 of --ranks-per"),
        ("--ranks-per-node 4 --weight-group 1", "--weight-group 1: must be at least 2"),
        ("--tokens 2 --sequences 3", "--sequences 3"),
        ("--recommend deepseek_v3 --gpus 8", "question of its own"),
    ],
)
def test_the_command_refuses(words, text, capsys):
    assert main(["simulate", "--move", "weights", "--cluster", "gb200_nvl72", "--dtype", "nvfp4", *words.split()]) == 2
    assert text in capsys.readouterr().err
