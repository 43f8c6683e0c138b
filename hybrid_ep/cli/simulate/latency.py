"""`--path latency`: a dispatch and a combine by lines, of few tokens a rank."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from hybrid_ep.cli.simulate.request import Request
from hybrid_ep.hardware.clusters import with_article
from hybrid_ep.perf import latency_events


def run(request: Request, args: argparse.Namespace) -> dict[str, Any]:
    """Prints both times; returns what `--json` writes. ValueError for what the path, or its event engine, has not."""
    if args.engine == "model" or args.kernels != "ours":
        raise ValueError("--path latency: the event engine answers, with this library's kernels; give no other")
    if request.dtype != "bf16" or request.choices is not None:
        raise ValueError("--path latency: rows are bf16 and routing uniform; leave out --dtype, --routing and --load")
    if not request.num_sms:
        raise ValueError("--path latency: says what an operation takes on so many SMs; give --num-sms")
    most = int(request.cluster.gpu.num_sms.value)
    if request.num_sms > most:
        raise ValueError(
            f"--num-sms {request.num_sms}: must be at most {most}, the SMs of {with_article(request.cluster.gpu.name)}"
        )
    shape = request.shape
    times = latency_events.measure(shape, request.cluster, num_sms=request.num_sms, seed=request.seed)
    where = "one domain" if shape.nodes == 1 else f"{shape.nodes} x {shape.ranks_per_node}"
    print(
        f"{request.cluster.name}: {shape.ranks} ranks of {where}, {shape.tokens} tokens a rank of {shape.hidden} "
        f"bf16, top-{shape.topk} of {shape.experts} experts, {request.num_sms} SMs, by lines"
    )
    print(f"dispatch {times.dispatch_us:8.1f} us")
    print(f"combine  {times.combine_us:8.1f} us")
    print(
        f"NVLink   {times.nvlink_us:8.1f} us of the busiest port, {times.nvlink_bytes / 1e6:.1f} MB out, both together"
    )
    if shape.nodes > 1:
        print(
            f"NIC      {times.nic_us:8.1f} us of the busiest NIC, {times.nic_bytes / 1e6:.1f} MB out, both together; "
            "between nodes rows go as plain bytes, a message each"
        )
    print("a prediction of the event engine without launches; trips to memory are assumed, read it as +-30 %")
    return {
        "path": "latency",
        "cluster": request.cluster.name,
        "shape": asdict(shape),
        "num_sms": request.num_sms,
        "seed": request.seed,
        "times": asdict(times),
    }
