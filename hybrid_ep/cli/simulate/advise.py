"""`--recommend`: the plans that fit, fastest first, and why."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from hybrid_ep.cli.progress import track
from hybrid_ep.cli.simulate.job import command_of
from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import models, recommend
from hybrid_ep.perf.step_time import CV_SLOW


def run(name: str, cluster: Cluster, gpus: int | None, tokens: int, overlap: float, precision: str = "bf16",
        recompute: str = "none", cv_slow: float = CV_SLOW) -> dict[str, Any]:
    """Prints the plans; returns them. ValueError when --gpus is missing or nothing fits."""
    if gpus is None:
        raise ValueError("--recommend needs --gpus N, the GPUs of the whole job")
    model = models.get(name)
    job: dict[str, Any] = {"dtype": precision, "recompute": recompute, "cv_slow": cv_slow}
    plans = recommend.recommend(model, cluster, gpus, tokens=tokens, overlap=overlap,
                                watch=functools.partial(track, what="layouts"), **job)
    print(f"# {name} on {gpus} x {cluster.gpu.name} ({cluster.name}), {tokens} tokens a rank and micro-batch, "
          f"{precision}, recompute {recompute}, {overlap:.0%} of what moves hidden")
    print("#    EP  PP  ranks/node  SMs  chunk  dtype  moves    exchange us  tokens/s/GPU  state GB  why")
    for rank, p in enumerate(plans):
        print(f"{rank + 1:2d} {p.ep:5d} {p.pp:3d} {p.ranks_per_node:11d} {p.num_sms or '-':>4} {p.chunk or '-':>6}  "
              f"{p.dispatch_dtype:<6} {p.move:<8} {p.exchange_us:11.0f} {p.tokens_per_s_per_gpu:13.0f} "
              f"{p.state_gb:9.1f}  {p.why}")
    best = plans[0]
    if best.move == "tokens":
        asked = recommend.job_of(model, cluster, gpus, best.ep, best.pp, tokens=tokens, overlap=overlap, **job,
                                 num_sms=best.num_sms, dispatch_dtype=best.dispatch_dtype)
        print(f"# the first by another verb: {command_of(asked)}")
    print("# tokens/s/GPU at half of the GPU's peak; differences between plans mean more than the number itself")
    return {"model": name, "cluster": cluster.name, "gpus": gpus, "tokens": tokens, "overlap": overlap, **job,
            "plans": [asdict(p) for p in plans]}
