"""How many ranks, or nodes, a token needs under uniform routing."""

from __future__ import annotations

import math


def distinct(groups: int, experts: int, topk: int) -> float:
    """Expected number of the `groups` equal groups of experts that `topk` distinct uniform choices hit."""
    miss = math.comb(experts - experts // groups, topk) / math.comb(experts, topk)
    return groups * (1.0 - miss)
