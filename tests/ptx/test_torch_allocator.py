"""The arena of a GPU as torch's own caching allocator serves it, which tests/ptx/mem_pool.py only imitates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch_allocator

PROGRAMS = Path(__file__).with_name("torch_allocator_programs.py")


@pytest.fixture(scope="module")
def built():
    if (why := torch_allocator.why_not()) is not None:
        pytest.skip(why)
    torch_allocator.build()


@pytest.fixture(scope="module")
def found(built):
    return torch_allocator.run(PROGRAMS)


def test_blocks_lie_in_the_arena_until_it_is_full_and_come_back(found):
    offsets, again, is_lent = found["blocks"]
    assert is_lent and offsets[:8] == [2048 * n for n in range(8)] and offsets[8] == -1
    assert again == offsets[3]


def test_a_block_waits_for_the_streams_that_it_was_recorded_on(found):
    elsewhere, offset, beside, later = found["other_streams"]
    assert elsewhere == -1, "the arena is the first stream's"
    assert beside not in (None, -1, offset) and later == offset


def test_an_arena_for_two_streams_is_of_the_first_two_in_equal_parts(found):
    two = found["two_streams"]
    assert two["each"] == [[0, 28, 29, None], [32, 60, 61, None], [None] * 4] and two["lent"] == 64
    assert two["while the other is at work"] is None and two["later"] == 0, "recorded on the other stream"
    assert two["the other's own"] == two["by an operation"] == 32
    assert two["a graph, larger than a part"] and two["to it alone"] == 40, "what nobody holds goes before a capture"


def test_behind_a_graph_two_streams_share_what_is_left_and_wait_for_each_other(found):
    """Where they come in another order than before, each has the other's old part."""
    assert found["two_streams_behind_a_graph"] == [[20, 20], [True, [[0, 1], [1, 0]]]]


def test_a_part_that_torch_does_not_make_is_said_to_be_one(found):
    (one, lent, kept), (both, none, gone) = found["segments_that_are_not_made"]
    assert len(one) == 1 and one[0].startswith(
        "32 MiB of the arena of 64 MiB, a stream's part, stays unused, rows that"
    )
    assert "ARENA_MIB=0" not in one[0] and (lent, kept) == (32, True), "the other's serves"
    assert len(both) == 2 and all("of 64 MiB stays unused" in text and "ARENA_MIB=0 saves it" in text for text in both)
    assert (none, gone) == (0, False)


def test_a_block_outlives_its_engine(found):
    assert found["outlives_the_engine"]


def test_what_torch_makes_in_a_call_lies_in_the_arena_or_all_of_it_elsewhere(found):
    placing = found["placing"]
    assert placing["fits"] == [1, True] and placing["and small"] == [1, True, False, False]
    assert placing["and large"] == [1, True, True], "what has room takes it"
    assert placing["too much"] == [[2, False, False, False]] * 3
    assert placing["thread"] == [-1, None, None] and placing["inner"] == [-1, True]
    assert placing["behind"] == [None, [0, 0, 0, 0, 0]], "nothing beside is preferred to the arena"
    assert placing["small or larger than all"] == [[1, False], [1, False]]
    assert placing["after errors"] == [None, [1, True]] and placing["in a graph"] == [1, False]


def test_in_a_pool_of_the_callers_nothing_is_taken_for_the_arena(found):
    inside, behind = found["within_another_pool"]
    assert len(set(inside)) == 1, "one pool has it all"
    assert behind == [True, True]


def test_an_arena_may_go_while_a_graph_is_captured(found):
    assert found["dropped_while_a_graph_is_captured"] == [16 << 20, 0]


def test_blocks_of_a_graph_are_its_own(found):
    graphs = found["of_graphs"]
    assert graphs["eager"] == 64, "which is given back when the capture asks"
    assert graphs["in turn"] == [0, 3] and graphs["reused"] == [0]
    assert graphs["behind another stream, large, too large"] == [6, 20, None]
    assert graphs["lent"] == graphs["kept by the graph"] == 20 + 12
    assert graphs["eager behind it"] == 16 and graphs["apart"]


def test_who_comes_first_has_the_arena(found):
    graphs = found["of_graphs"]
    assert not graphs["while others are held"] and graphs["another graph"]
    assert graphs["of two graphs"] == 20 + 12 + 20 and graphs["at the end"] == 0


def test_a_graph_that_is_gone_leaves_its_blocks(found):
    assert found["a_graph_behind_one_that_is_gone"] == 12


@pytest.mark.parametrize(
    "conf, names",
    [
        ("expandable_segments:True", ("blocks", "of_graphs")),  # the recipes'; the others make tensors of torch's own
        ("roundup_power2_divisions:4,garbage_collection_threshold:0.8,max_split_size_mb:512", ()),
    ],
)
def test_settings_of_the_allocator_change_nothing(built, found, conf, names):
    other = torch_allocator.run(PROGRAMS, *names, conf=conf)
    assert other == {name: found[name] for name in other} and len(other) == (len(names) or len(found))


@pytest.mark.parametrize(
    "conf, why", [("max_split_size_mb:32", "no piece"), ("backend:cudaMallocAsync", "not yet support")]
)
def test_an_allocator_that_cannot_serve_is_named(built, conf, why):
    with pytest.raises(RuntimeError, match=rf"RuntimeWarning: the arena of 64 MiB stays unused.*{why}"):
        torch_allocator.run(PROGRAMS, "of_graphs", conf=conf)


def test_an_allocator_without_expandable_pools_gets_the_arena_whole(built, found):
    assert found["refused_with_expandable_segments"] == [[False, True], [], 0]
    conf = "expandable_segments:True,garbage_collection_threshold:0.8"
    other = torch_allocator.run(PROGRAMS, "refused_with_expandable_segments", conf=conf)
    told = [conf.replace("True", "False"), conf]
    assert other["refused_with_expandable_segments"] == [[False, True], told, 0]
