"""What one run measures, as plain data that goes into the JSON as it is, and its validation."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hybrid_ep import env
from hybrid_ep.cli import UsageError
from hybrid_ep.cli.bench import routing_spec, rows
from hybrid_ep.cli.bench.routing_spec import RoutingSpec

OPS = ("route", "dispatch", "permute", "unpermute", "combine", "pair", "step")
BACKENDS = ("host", "cuda", "sim")
_STEP_LIMIT = 64  # points of a sweep; more is a typing error
_MOST_THREADS = 1024  # more than the cores of any host


@dataclass(frozen=True)
class Config:
    """The flags after validation. chain: pairs of one chained sample, 0: none."""

    backend: str
    tokens: tuple[int, ...]
    num_sms: tuple[int, ...]
    ops: tuple[str, ...]
    hidden: int
    topk: int
    num_experts: int
    dtype: str
    routing: RoutingSpec
    ragged: str
    permute: bool
    route_as: str
    chain: int
    cuda_graph: bool
    num_ranks: int
    num_local_ranks: int
    warmup: int
    iterations: int
    check: bool
    seed: int
    reduction: int
    timeout_s: float

    @property
    def row_bytes(self) -> int:
        """Of a dispatched row, its scales included."""
        return rows.row_bytes(self.dtype, self.hidden)[0]

    @property
    def sum_row_bytes(self) -> int:
        """Of a row that combine moves."""
        return rows.row_bytes(self.dtype, self.hidden)[1]

    @property
    def timed_ops(self) -> tuple[str, ...]:
        """The rows of the table."""
        return (*self.ops, "chain") if self.chain else self.ops


def make_config(args: argparse.Namespace, num_ranks: int) -> Config:
    """Validated flags of the host and cuda backends; UsageError names the flag, its value and what would do."""
    ranks_per_node = num_ranks if args.ranks_per_node is None else args.ranks_per_node
    require(num_ranks >= 1, f"--ranks {num_ranks}: must be at least 1")
    require(
        ranks_per_node >= 1 and num_ranks % ranks_per_node == 0,
        f"--ranks-per-node {ranks_per_node}: must divide the number of ranks, {num_ranks}",
    )
    require(
        args.experts >= num_ranks and args.experts % num_ranks == 0,
        f"--experts {args.experts}: must be a multiple of the number of ranks, {num_ranks}",
    )
    require(1 <= args.topk <= args.experts, f"--topk {args.topk}: must be in 1 .. --experts, {args.experts}")
    _check_rows(args)
    for flag, value, least in (
        ("-n", args.iterations, 1), ("-w", args.warmup, 0), ("-T", args.timeout, 1), ("--chain", args.chain, 0)
    ):  # fmt: skip
        require(value >= least, f"{flag} {value}: must be at least {least}")
    for sms in args.num_sms:
        require(sms >= 0, f"--num-sms {sms}: must be 0 (auto) or positive")
        require(sms <= env.MOST_BLOCKS, f"--num-sms {sms}: must be at most {env.MOST_BLOCKS}")
    require(
        args.threads is None or 1 <= args.threads <= _MOST_THREADS,
        f"--threads {args.threads}: must be from 1 to {_MOST_THREADS}; without it ranks share the cores",
    )
    require(
        args.backend == "cuda" or not args.cuda_graph,
        f"--cuda-graph: --backend {args.backend} has no CUDA graphs; use --backend cuda, or drop the flag",
    )
    require(
        args.dtype in rows.ROWS, f"--dtype {args.dtype}: only the simulator knows it; use one of {', '.join(rows.ROWS)}"
    )
    rows.amplitude(args.dtype, args.topk)
    spec = routing_spec.parse_routing(args.routing)
    return Config(
        backend=args.backend,
        tokens=token_sweep(args),
        num_sms=args.num_sms,
        ops=args.op,
        hidden=args.hidden,
        topk=args.topk,
        num_experts=args.experts,
        dtype=args.dtype,
        routing=routing_spec.with_imbalance(spec, args.imbalance, args.experts, args.topk, num_ranks),
        ragged=args.ragged,
        permute=args.permute,
        route_as=args.route_as,
        chain=args.chain,
        cuda_graph=args.cuda_graph,
        num_ranks=num_ranks,
        num_local_ranks=ranks_per_node,
        warmup=args.warmup,
        iterations=args.iterations,
        check=bool(args.check),
        seed=args.seed,
        reduction=args.average,
        timeout_s=args.timeout,
    )


def check_environment(backend: str, with_tuning: bool = False) -> None:
    """UsageError for what a buffer would refuse in every rank: a malformed variable, and with_tuning a file that
    HYBRID_EP_TUNING names in vain; and for an executor that is not the backend, which is what would run."""
    try:
        env.check(files=with_tuning)
    except ValueError as error:
        raise UsageError(str(error)) from None
    executor = env.get("HYBRID_EP_EXECUTOR")
    require(
        executor in (None, backend),
        f"--backend {backend} with HYBRID_EP_EXECUTOR={executor}: --backend says what is measured; unset the variable"
        + (f", or give --backend {executor}" if executor in BACKENDS else ""),
    )


def _check_rows(args: argparse.Namespace) -> None:
    """Rows of whole 16-byte units, as they are sent and as they are summed; blocks of whole scales."""
    require(args.hidden >= 1, f"--hidden {args.hidden}: must be at least 1")
    row = rows.ROWS.get(args.dtype, rows.ROWS["bf16"])
    require(
        not row.block or args.hidden % row.block == 0,
        f"--hidden {args.hidden}: {args.dtype} scales blocks of {row.block} elements; give a multiple",
    )
    num_bytes = args.hidden * row.dispatched
    require(num_bytes % 16 == 0, f"--hidden {args.hidden}: a row of {num_bytes} bytes; must be a multiple of 16 bytes")


def token_sweep(args: argparse.Namespace) -> tuple[int, ...]:
    """--tokens, or -b to -e by factors of -f."""
    if args.tokens is not None:
        require(all(tokens >= 0 for tokens in args.tokens), "--tokens: must not be negative")
        return args.tokens
    require(1 <= args.min_tokens <= args.max_tokens, f"-b {args.min_tokens} -e {args.max_tokens}: need 1 <= -b <= -e")
    require(args.factor >= 2, f"-f {args.factor}: must be at least 2; for one size use --tokens")
    sweep = [args.min_tokens]
    while sweep[-1] * args.factor <= args.max_tokens and len(sweep) < _STEP_LIMIT:
        sweep.append(sweep[-1] * args.factor)
    return tuple(sweep)


def refuse_plot_of_a_point(args: argparse.Namespace) -> None:
    """UsageError where --plot would draw nothing: a line over SMs or over tokens has two points."""
    counts = (
        {n for n in args.num_sms if n} if args.chain or set(args.op) & {"dispatch", "combine", "pair", "step"} else ()
    )
    require(
        args.plot is None or len(counts) > 1 or len(set(token_sweep(args))) > 1,
        f"--plot {args.plot}: nothing to draw of one number of tokens and one of SMs; give two of --tokens, or two of "
        "--num-sms other than 0 (auto)",
    )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
