"""What was asked: a shape on a cluster, its routing, SMs and chunk, and which engine answers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np

from hybrid_ep.hardware.clusters import Cluster
from hybrid_ep.perf import recommend, routing
from hybrid_ep.perf.implementations import HYBRID_EP, PUBLISHED, Implementation
from hybrid_ep.perf.recommend import Tuning
from hybrid_ep.perf.routing import Traffic
from hybrid_ep.perf.shape import Shape

ENGINES = ("auto", "events", "model")
KERNELS = {"ours": HYBRID_EP, "published": PUBLISHED}
EXPERTS = 256  # of a group whose ranks divide them
# Of errors, as cli.arguments takes them.
ARGUMENTS = {
    name: f"--{name.replace('_', '-')} "
    for name in ("ranks_per_node", "tokens", "hidden", "topk", "experts", "dtype", "routing", "num_sms", "chunk")
}


def fitting_experts(ranks: int) -> int:
    """The fewest, from `EXPERTS` on, that the ranks share evenly."""
    return -(-EXPERTS // ranks) * ranks


@dataclass(frozen=True)
class Request:
    """num_sms 0 = as tuned. routing_text: as it was given."""

    cluster: Cluster
    shape: Shape
    dtype: str
    routing_text: str
    seed: int
    num_sms: int
    chunk: int
    engine: str
    traffic: Traffic
    choices: np.ndarray | None  # drawn or loaded experts [ranks, tokens, topk]; None for uniform
    kernels: Implementation = HYBRID_EP

    @classmethod
    def from_flags(cls, args: argparse.Namespace, cluster: Cluster) -> Request:
        """Without --experts with as many as fit the ranks. ValueError names flag or argument, value and remedy."""
        if args.nodes < 1:
            raise ValueError(f"--nodes {args.nodes}: must be at least 1")
        if args.num_sms < 0:
            raise ValueError(f"--num-sms {args.num_sms}: must be 0 (as suggested) or positive")
        if args.load and args.routing != "uniform":
            raise ValueError(f"--load {args.load}: --routing {args.routing} says otherwise; give one of them")
        local = cluster.ranks_per_node if args.ranks_per_node is None else args.ranks_per_node
        if local < 1:
            raise ValueError(f"--ranks-per-node {local}: must be at least 1")
        if local > cluster.ranks_per_node:
            raise ValueError(f"--ranks-per-node {local}: {cluster.name} has NVLink domains of {cluster.ranks_per_node}")
        if args.kernels != "ours" and args.engine == "events":
            raise ValueError(f"--kernels {args.kernels}: the event engine runs this library's own; use --engine model")
        ranks = args.nodes * local
        experts = fitting_experts(ranks) if args.experts is None else args.experts
        if experts < 1 or experts % ranks:
            raise ValueError(_misfit(experts, args.nodes, local))
        shape = Shape(ranks, local, args.tokens, args.hidden, args.topk, experts)
        text = f"file:{args.load}" if args.load else args.routing
        choices = _choices(args, text, shape)
        traffic = routing.uniform(shape) if choices is None else routing.count(choices, shape)
        return cls(
            cluster,
            shape,
            args.dtype,
            text,
            args.seed,
            args.num_sms,
            args.chunk,
            args.engine,
            traffic,
            choices,
            KERNELS[args.kernels],
        )

    def tuned(self) -> Tuning:
        """SMs and chunk that the model suggests for this exchange."""
        return recommend.tune(self.shape, self.cluster, self.dtype, self.traffic)

    def settled(self, tuned: Tuning) -> Request:
        """With the SMs as tuned where none were asked for."""
        return self if self.num_sms else replace(self, num_sms=tuned.num_sms)


def _choices(args: argparse.Namespace, text: str, shape: Shape) -> np.ndarray | None:
    """ValueError of a file names the flag that gave it."""
    kind, _, path = text.partition(":")
    try:
        return routing.parse(text, shape, args.seed)
    except ValueError as error:
        if kind != "file" or not path:
            raise
        flag = f"--load {args.load}" if args.load else f"--routing {args.routing}"
        raise ValueError(f"{flag}: {str(error).removeprefix(f'load file {path!r} ')}") from None


def _misfit(experts: int, nodes: int, local: int) -> str:
    """What to say of experts that the ranks do not share evenly: the flags and the nearest values that fit."""
    ranks = nodes * local
    near = [n for n in (experts // ranks * ranks, (experts // ranks + 1) * ranks) if n > 0]
    remedies = [f"--experts {n}" for n in near]
    fewer = next((n for n in range(min(local, experts // nodes), 0, -1) if experts % (nodes * n) == 0), None)
    if fewer:
        remedies.append(f"--ranks-per-node {fewer}")
    *most, last = remedies
    return (
        f"--experts {experts}: must be a positive multiple of the {ranks} ranks of --nodes {nodes} --ranks-per-node "
        f"{local}; give {' or '.join([*([', '.join(most)] if most else []), last])}"
    )
