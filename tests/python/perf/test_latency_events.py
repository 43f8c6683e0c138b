"""The latency path in the event engine: its costs, what its times must do, and the command that prints them."""

import json

import pytest

from hybrid_ep import cli
from hybrid_ep.hardware.clusters import CLUSTERS
from hybrid_ep.perf import crossover, events, latency_events
from hybrid_ep.perf.shape import Shape

GB200 = CLUSTERS["gb200_nvl72"]
SHAPE = Shape(ranks=8, ranks_per_node=8, tokens=16, hidden=7168, topk=8, experts=64)


def times(sms=32, cluster=GB200, **changes):
    return latency_events.measure(SHAPE.with_(**changes), cluster, num_sms=sms)


def test_times_are_the_same_every_time_and_grow_with_tokens():
    few, more = times(), times(tokens=64)
    assert few == times()
    assert few.dispatch_us < more.dispatch_us and few.combine_us < more.combine_us
    assert few.nvlink_bytes < more.nvlink_bytes


def test_an_operation_takes_no_less_than_its_port():
    got = times(sms=128, tokens=64)
    assert got.dispatch_us + got.combine_us > got.nvlink_us > 0


def test_large_groups_keep_their_ports_busy():
    """EP32, 128 tokens, in times of what a port takes for an operation: combine 1.51, and 2.17 where partials go to one
    source after the other; dispatch 1.80, and 2.23 where a warp keeps lines that it has turned away from."""
    got = times(sms=128, ranks=32, ranks_per_node=32, tokens=128, experts=256)
    of_one = got.nvlink_us / 2
    assert got.combine_us < 1.7 * of_one and got.dispatch_us < 2.0 * of_one


def test_more_sms_share_the_lines_of_rows():
    assert times(sms=128, tokens=64).combine_us < 0.6 * times(sms=16, tokens=64).combine_us


def test_sixteen_tokens_take_a_fraction_of_the_other_path():
    other = events.measure(SHAPE, GB200, num_sms=16).time_us
    by_lines = times(sms=32)
    assert by_lines.dispatch_us + by_lines.combine_us < sum(other.values())


def test_lines_cost_what_the_machine_code_issues():
    loops = latency_events.issued("blackwell")
    costs = latency_events.line_costs(GB200, SHAPE, 32, 4)
    clocks = 4 * loops.send / latency_events.LINES / 4
    assert costs["line_store_ps"] == pytest.approx(clocks / GB200.gpu.clock_ghz.value * 1e3, abs=1)
    one = latency_events.line_costs(GB200, SHAPE, 32, 16)
    assert one["line_store_ps"] == pytest.approx(costs["line_store_ps"] / 4, abs=1)
    assert one["line_wait_ps"] == costs["line_wait_ps"]  # of one trip, whoever makes it


def test_a_world_of_many_blocks_has_one_warp_for_all_of_a_block():
    assert latency_events.warps_in_one(SHAPE, 32) == 4
    assert latency_events.warps_in_one(SHAPE.with_(ranks=72, ranks_per_node=72, experts=288), 128) == 16


@pytest.mark.parametrize(
    ("changes", "sms", "words"), [({}, 0, "num_sms=0"), ({"ranks": 16}, -1, "num_sms=-1"), ({}, 257, "num_blocks")]
)
def test_what_it_cannot_do_is_a_value_error(changes, sms, words):
    with pytest.raises(ValueError, match=words):
        times(sms, **changes)


def test_command_prints_and_writes_the_times(tmp_path, capsys):
    out = tmp_path / "times.json"
    flags = "simulate --path latency --cluster gb200_nvl72 --ranks-per-node 4 --tokens 8 --experts 16 --num-sms 8"
    assert cli.main([*flags.split(), "--json", str(out)]) == cli.EXIT_OK
    document = json.loads(out.read_text())
    shown = capsys.readouterr().out
    assert document["times"]["dispatch_us"] > 0 and f"{document['times']['dispatch_us']:.1f} us" in shown


@pytest.mark.parametrize(
    "extra", ["--engine model", "--dtype fp8", "--routing zipf:1", "--trace t.json", "--num-sms 0"]
)
def test_command_says_what_it_does_not_take(extra, capsys):
    flags = f"simulate --path latency --ranks-per-node 4 --tokens 8 --experts 16 --num-sms 8 {extra}"
    assert cli.main(flags.split()) != cli.EXIT_OK
    assert "--path latency" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ratios, said, won",
    [
        ({64: 2.0, 256: 3.0}, "a dispatch by the throughput path is faster from 64 tokens a rank, the fewest of", 0),
        ({64: 0.5, 256: 3.0}, "by lines is faster up to 64 tokens a rank and not at 256: latency_tokens=64", 64),
        ({64: 0.5, 256: 0.9}, "by lines is faster up to 256 tokens a rank, the most of this sweep", 256),
        ({64: 1.5, 256: 0.44, 1024: 2.0}, "by lines is faster at 256 tokens a rank and not at 64 and 1024: the", 0),
        (
            {8: 0.5, 64: 1.5, 256: 0.4, 1024: 0.3},
            "is faster up to 8 and at 256 and 1024 tokens a rank and not at 64",
            8,
        ),
    ],
)
def test_the_sentence_on_two_paths_follows_from_its_rows(ratios, said, won):
    found = crossover.find([crossover.Row(t, "dispatch", ratio, 1.0) for t, ratio in ratios.items()], "dispatch")
    assert said in found.said and found.latency_tokens == won and found.said.startswith("a dispatch by ")
