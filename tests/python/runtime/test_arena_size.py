"""How large an arena is by default, and in how many parts."""

from __future__ import annotations

import pytest

from hybrid_ep import buffer_sizes

MIB = 1 << 20


def shape(tokens: int, hidden: int = 7168, topk: int = 8) -> dict[str, int]:
    return {"max_tokens": tokens, "max_topk": topk, "row_bytes": 2 * hidden, "scale_bytes": 0}


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 64, 1024, 2048, 3120, 4096, 5120, 8192, 9362, 10_000, 20_000])
def test_a_part_of_the_default_holds_a_result_of_its_stream_or_there_is_none(tokens, streams):
    one = tokens * 8 * 2 * 7168
    whole = buffer_sizes.default_arena_bytes(shape(tokens), streams)
    assert whole <= 1024 * MIB and (whole == 0) == (streams * one > 1024 * MIB)
    assert whole == 0 or whole // streams >= one
    assert whole in (0, min(streams * 5 * one // 2, 1024 * MIB))


@pytest.mark.parametrize("topk", [9, 10, 64, 256, 65535])
@pytest.mark.parametrize("tokens", [1, 1024, 4096, 9362, 20_000])
def test_room_for_wide_maps_takes_no_arena_away(tokens, topk):
    """Padding to capacity may give a token every expert; the rows of a rank are no more for that."""
    narrow, wide = (buffer_sizes.default_arena_bytes(shape(tokens, topk=k)) for k in (8, topk))
    assert wide >= narrow


@pytest.mark.parametrize("streams", [1, 2, 8])
@pytest.mark.parametrize("wanted", [0, 1, 10 * MIB, 10 * MIB + 1, 333 * MIB])
def test_parts_are_what_torch_takes_whole(wanted, streams):
    whole = buffer_sizes.whole_bytes(wanted, streams)
    part = whole // streams
    assert whole >= wanted and whole == part * streams and (whole == 0) == (wanted == 0)
    assert wanted == 0 or (part >= 10 * MIB and part % (2 * MIB) == 0)
    assert whole - wanted < streams * 2 * MIB or part == 10 * MIB or wanted == 0


@pytest.mark.parametrize("streams", [0, 9, -1, 2.0, "2", True, None])
def test_streams_are_a_small_number(streams):
    from hybrid_ep.testing import VirtualWorld

    with pytest.raises(ValueError, match="arena_streams"):
        VirtualWorld(1, 1).buffers(64, 8, 1, arena_streams=streams)
