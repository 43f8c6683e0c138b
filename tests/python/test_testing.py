"""hybrid_ep.testing without a device: what its ranks share."""

from __future__ import annotations

from hybrid_ep.testing import PrivateSegments, VirtualWorld


def test_ranks_of_a_world_share_their_segments_on_a_device():
    """They are asked for before the first rank has made one, when the set is still empty."""
    world = VirtualWorld(1, 2)
    first, second = (group.segments.on_device() for group in world.groups)
    assert len(first) == 0 and first is second
    made = PrivateSegments(lambda num_bytes: bytearray(num_bytes))
    assert made.create("a", 16) is made.attach("a", 16)
