"""--backend sim: the grid of a cluster that is not here, by the performance model of `hybrid-ep simulate`."""

from __future__ import annotations

from hybrid_ep.cli.tune.grid import OPS, Grid, Point, Setting
from hybrid_ep.config import DEFAULT_CHUNK_TOKENS
from hybrid_ep.hardware import clusters
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import model, recommend, routing
from hybrid_ep.perf.shape import Shape
from hybrid_ep.runtime import sm_plan
from hybrid_ep.tuning import Key


def suggestion(shape: Shape, cluster: Cluster, dtype: str) -> Setting:
    """The model's own advice, without a sweep: what `hybrid-ep simulate` prints as suggested."""
    found = recommend.tune(shape, cluster, dtype)
    return Setting(found.num_sms, found.chunk)


def default(shape: Shape, cluster: Cluster) -> Setting:
    """What a buffer of that cluster's GPUs takes without a file: as options.Options.choose_blocks, which is not told
    topk and dtype either."""
    plan = sm_plan.plan(cluster, shape.nodes, shape.ranks_per_node, shape.experts, 2 * shape.hidden)
    return Setting(plan.num_sms, DEFAULT_CHUNK_TOKENS)


def cluster_of(device: str) -> Cluster | None:
    """The first known cluster whose GPU has this device's name; None for other devices."""
    words = device.upper().split()
    return next((c for c in clusters.CLUSTERS.values() if gpu_word(c) in words), None)


def gpu_word(cluster: Cluster) -> str:
    """The word of a GPU's name that its drivers use too: H100 of "H100 SXM5"."""
    return cluster.gpu.name.split()[0].upper()


def grid(shape: Shape, cluster: Cluster, dtype: str, num_sms: tuple[int, ...], chunks: tuple[int, ...]) -> Grid:
    """Predictions of every combination. ValueError names what the model refuses."""
    untuned, analytic = default(shape, cluster), suggestion(shape, cluster, dtype)
    settings = {Setting(s, c) for s in num_sms for c in chunks} | {untuned, analytic}
    traffic = routing.uniform(shape)
    points = tuple(
        Point(
            op,
            s.num_sms,
            s.chunk,
            model.predict(
                op,
                shape,
                cluster,
                num_sms=s.num_sms,
                chunk=s.chunk,
                traffic=traffic,
                dtype=dtype if op == "dispatch" else "bf16",
            ).api_us,
        )
        for op in OPS
        for s in sorted(settings, key=lambda s: (s.num_sms, s.chunk))
    )
    key = Key(shape.ranks, shape.ranks_per_node, shape.hidden, shape.experts)
    return Grid(gpu_word(cluster), key, shape.tokens, shape.topk, dtype, points, untuned, analytic)
