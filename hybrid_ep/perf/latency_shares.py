"""What warps of the latency path pay along the rail beside bytes: looks at signals, and counts of what was stored.

Warps share a row by its lines where rows are few (LineShare, csrc/pipeline/line_wait.h), and pay once a share. A GPU's
warp has four lines at once and a simulated one has one, so that the latter cuts rows finer: it has up to four shares
where each warp that it stands for has one. So that it takes as long as they do, side by side, a look and a count cost
it the less the more of them it makes."""

from __future__ import annotations

import math

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import routing
from hybrid_ep.perf.route_time import WARPS
from hybrid_ep.perf.shape import Shape

_SHARES = 4  # that a warp is to have: LineShare::of
_LEAST = {"dispatch": 2, "combine": 1}  # steps of a share at least, in the roles that hand on or sum


def shares(rows: float, lines: int, at_once: int, least: int, workers: int) -> float:
    """Shares of a worker on average, at least one: of `rows` rows of `lines` lines, `at_once` of them a step."""
    most = max(1, math.ceil(math.ceil(lines / at_once) / least))
    return max(1.0, rows * min(math.ceil(_SHARES * workers / rows), most) / workers)


def rail_costs(cluster: Cluster, shape: Shape, num_sms: int, warps: int, lines: int, at_once: int) -> dict[str, int]:
    """Picoseconds, integers: a look at a signal, and a count with its fence. lines: of a row; at_once: that a GPU's
    warp has in work; warps: that a simulated one stands for."""
    look_us = cluster.gpu.flag_us.value
    count_us = cluster.gpu.fence_us.value + look_us
    rows = max(1.0, routing.uniform(shape).rail_in)
    workers = num_sms * WARPS

    def of_one(us: float, rows: float, op: str) -> int:
        real = shares(rows, lines, at_once, _LEAST[op], workers)
        simulated = shares(rows, lines, 1, _LEAST[op], workers // warps)
        return round(us * min(1.0, real / simulated) * 1e6)

    return {
        "dispatch_signal_ps": of_one(look_us, rows, "dispatch"),
        "dispatch_count_ps": round(count_us * 1e6),  # of few warps, those of the blocks that count tokens
        "combine_signal_ps": of_one(look_us, shape.tokens, "combine"),
        "combine_count_ps": of_one(count_us, rows, "combine"),
    }
