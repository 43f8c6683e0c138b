"""The flags of `hybrid-ep bench`, named after nccl-tests where it has a name."""

from __future__ import annotations

import argparse

from hybrid_ep.cli import names, outputs, questions
from hybrid_ep.cli.bench import heap
from hybrid_ep.cli.bench.config import BACKENDS, OPS
from hybrid_ep.cli.bench.presets import NAMES, SHAPE_DEFAULTS
from hybrid_ep.cli.bench.routing_spec import RAGGED
from hybrid_ep.cli.parser import one_of, seed
from hybrid_ep.cli.simulate.request import ENGINES
from hybrid_ep.perf.crossover import PATHS
from hybrid_ep.perf.shape import DTYPES as SIM_DTYPES

_DEFAULT_OPS = ("dispatch", "combine", "pair")
_CHAINED_PAIRS = 8
DTYPES = tuple(dict.fromkeys(("bf16", "fp16", "fp32", *SIM_DTYPES)))
DEFAULT_RANKS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shape_flags(parser.add_argument_group("what is exchanged"))
    _add_run_flags(parser.add_argument_group("how it is measured"))
    _add_output_flags(parser.add_argument_group("what comes out"))
    _add_simulator_flags(parser.add_argument_group("--backend sim"))
    parser.set_defaults(**SHAPE_DEFAULTS)


def _add_shape_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--preset", **one_of(NAMES, "published conditions; with --backend sim, beside their figures"))
    group.add_argument("-b", "--min-tokens", type=int, help="smallest number of tokens a rank")
    group.add_argument("-e", "--max-tokens", type=int, help="largest number of tokens a rank")
    group.add_argument("-f", "--factor", type=int, help="from one number of tokens to the next")
    group.add_argument("--tokens", type=int_list, help="explicit list T[,T..] in place of -b -e -f")
    group.add_argument("--hidden", type=int, help="elements of a row")
    group.add_argument("--topk", type=int, help="experts of a token")
    group.add_argument("--experts", type=int, help="experts of the whole group")
    group.add_argument("--dtype", choices=DTYPES, help="of dispatched rows; of fp8 and mxfp8 combine sums bf16. "
                       "nvfp4: --backend sim alone")  # fmt: skip
    group.add_argument("--routing", help="uniform, zipf:A, one-hot or file:PATH")
    group.add_argument("--imbalance", type=float, metavar="R", help="one hot rank: (max - mean) / mean over ranks")
    group.add_argument("--ragged", choices=RAGGED, help="uneven tokens over ranks")
    group.add_argument(
        "--permute",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="rows by expert, the default, or as received",
    )
    group.add_argument("--route-as", choices=("map", "topk"), default="map", help="the form of routing")
    group.add_argument("--ranks", type=int, help=f"processes to launch, {DEFAULT_RANKS} if not given (ignored where "
                       "RANK is set)")  # fmt: skip
    group.add_argument("--ranks-per-node", type=int, help="ranks of one NVLink domain, all if not given")
    group.add_argument("--seed", type=seed, default=1, help="of rows and routing")


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=BACKENDS, default="host", help="who runs the kernels")
    group.add_argument("--op", type=op_list, default="all", help="list of route, dispatch, permute, unpermute, "
                       "combine, pair, step, or all = dispatch,combine,pair. step: forward and backward")  # fmt: skip
    group.add_argument("--num-sms", type=int_list, default="0", help="list of SMs (host: blocks); 0 = auto")
    group.add_argument("--peers", action="store_true", help="measure every known peer beside hybrid_ep")
    group.add_argument("--impl", type=name_list, help="explicit list; the first is the base of ratios")
    group.add_argument("--peer", action="append", default=[], metavar="SPEC",
                       help="plug-in FILE.py or module with a list PEERS; may be repeated")  # fmt: skip
    group.add_argument("--chain", type=int, nargs="?", const=_CHAINED_PAIRS, default=0, metavar="PAIRS",
                       help=f"also time PAIRS pairs ({_CHAINED_PAIRS} if not said) with no barrier between, one's sums "
                       "the next one's tokens")  # fmt: skip
    group.add_argument("--cuda-graph", action="store_true", help="--backend cuda: replay dispatch, combine and pair")
    group.add_argument("-w", "--warmup", type=int, default=2, help="iterations before timing")
    group.add_argument("-n", "--iterations", type=int, default=10, help="timed iterations")
    group.add_argument("-c", "--check", type=int, choices=(0, 1), default=1, help="check all values exactly")
    group.add_argument("-a", "--average", type=int, choices=(0, 1, 2, 3), default=3,
                       help="time over ranks: 0 rank 0, 1 average, 2 min, 3 max")  # fmt: skip
    group.add_argument("-T", "--timeout", metavar="SECONDS", type=float, default=600.0, help="for the whole run")
    group.add_argument("--heap", choices=heap.MODES, default="default", help="warm: keep freed memory in the process")
    group.add_argument("--threads", type=int, help="torch threads a rank  (default: cores / ranks)")


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-I", "--per-iteration", action="store_true", help="print every sample")
    group.add_argument("--wide", action="store_true", help="all columns; without, those that 120 hold")
    outputs.add_json(group, "-J")
    group.add_argument("-M", "--memory", action="store_true", help="report peak resident memory")
    outputs.add_plot(group, "bandwidth over SMs and time over tokens")


def _add_simulator_flags(group: argparse._ArgumentGroup) -> None:
    names.add_cluster(group.add_argument, "GPUs and links")
    group.add_argument("--nodes", type=int, help="NVLink domains of the EP group, as in hybrid-ep simulate")
    group.add_argument("--engine", choices=ENGINES, default="model", help="as in hybrid-ep simulate")
    group.add_argument("--path", choices=PATHS, default=PATHS[0], help="latency: by lines beside the throughput path, "
                       "measured or by the event engine, and where they cross")  # fmt: skip


def refuse_simulated(args: argparse.Namespace) -> None:
    """UsageError for flags of a cluster that is not here, where ranks run."""
    for flag in ("cluster", "nodes"):
        if (value := getattr(args, flag)) is not None:
            remedy = "; give --ranks and --ranks-per-node, or --backend sim"
            questions.refuse(f"--{flag}", value, ("--backend sim",), remedy)


def int_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1024,4096") from error


def name_list(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def op_list(text: str) -> tuple[str, ...]:
    listed = [name for part in text.split(",") for name in (_DEFAULT_OPS if part == "all" else (part,))]
    names = tuple(dict.fromkeys(listed))
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{','.join(unknown)!r}: use {', '.join(OPS)} or all")
    return names
