"""`hybrid-ep simulate`: flags and their validation; report, sweep, move and recommend do the work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hybrid_ep.cli import EXIT_OK, UsageError, names, outputs, questions
from hybrid_ep.cli.arguments import in_flags
from hybrid_ep.cli.parser import seed
from hybrid_ep.cli.simulate import advise, job, latency, move, report, sweep
from hybrid_ep.cli.simulate.request import ARGUMENTS, ENGINES, EXPERTS, KERNELS, Request
from hybrid_ep.hardware import clusters
from hybrid_ep.perf import models
from hybrid_ep.perf.crossover import PATHS
from hybrid_ep.perf.implementations import HYBRID_EP
from hybrid_ep.perf.shape import DTYPES

_ONE, _LINES, _SWEEP, _MOVE, _ADVICE, _SOURCES = (
    "one exchange",
    "--path latency",
    "--sweep",
    "--move",
    "--recommend",
    "--sources",
)
_EXCHANGE = (_ONE, _SWEEP, _LINES)
# Which questions look at a flag; those that name a question are in QUESTIONS. Where lines are asked for, what they do
# not have is refused with the reason (`latency`).
TAKERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(job.FLAGS, (_ADVICE,)),
    "--gpus": (_ADVICE,),
    "--nodes": (*_EXCHANGE, _MOVE),
    "--ranks-per-node": (*_EXCHANGE, _MOVE),
    "--tokens": (*_EXCHANGE, _MOVE, _ADVICE),
    **dict.fromkeys(("--hidden", "--topk", "--experts"), _EXCHANGE),
    "--dtype": (*_EXCHANGE, _MOVE),
    **dict.fromkeys(("--routing", "--load", "--engine", "--kernels"), _EXCHANGE),
    "--seed": (*_EXCHANGE, _MOVE),
    "--num-sms": (*_EXCHANGE, _ADVICE),
    "--chunk": (_ONE, _SWEEP),
    **dict.fromkeys(("--model", "--sequences", "--length-cv", "--shortest", "--slices", "--weight-group"), (_MOVE,)),
    "--json": (*_EXCHANGE, _MOVE, _ADVICE),
    "--trace": (_ONE, _MOVE),
}
QUESTIONS = {"--sources": _SOURCES, "--move": _MOVE, "--recommend": _ADVICE, "--path": _LINES, "--sweep": _SWEEP}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One exchange by default; --move, --sweep and --recommend are other questions about the same cluster."""
    where = parser.add_argument_group("where")
    names.add_cluster(where.add_argument, "GPUs and links", "h100_8x400g")
    where.add_argument("--nodes", type=int, default=1, help="NVLink domains of the EP group")
    where.add_argument("--ranks-per-node", type=int, help="ranks of a domain  (default: all its GPUs)")
    what = parser.add_argument_group("what is exchanged")
    what.add_argument("--tokens", type=int, default=4096, help="of each rank")
    what.add_argument("--hidden", type=int, default=7168, help="elements of a row")
    what.add_argument("--topk", type=int, default=8, help="experts of a token")
    what.add_argument("--experts", type=int, help=f"experts of the whole group  (default: {EXPERTS}, or the next "
                      "number that the ranks share evenly)")  # fmt: skip
    what.add_argument("--dtype", choices=DTYPES, default="bf16", help="of dispatched rows; combine sums bf16")
    what.add_argument("--routing", default="uniform", help="uniform, zipf:A or file:PATH")
    what.add_argument("--load", metavar="FILE", help="tokens per expert as text or .npy, or choices .npy "
                      "[ranks, tokens, topk]; the same as --routing file:FILE")  # fmt: skip
    what.add_argument("--seed", type=seed, default=1, help="of drawn routing")
    how = parser.add_argument_group("how")
    how.add_argument("--num-sms", type=int, default=0, help="SMs of each operation; 0 = as suggested")
    how.add_argument("--chunk", type=int, default=HYBRID_EP.chunk, help="rows of a rail message")
    how.add_argument("--engine", choices=ENGINES, default="auto", help="events: the real kernels on a virtual clock; "
                     "model: the queueing model; auto: events where they take seconds")  # fmt: skip
    how.add_argument("--path", choices=PATHS, default=PATHS[0], help="latency: few tokens by lines, by "
                     "the event engine")  # fmt: skip
    how.add_argument("--kernels", choices=tuple(KERNELS), default="ours", help="published: Hybrid-EP's, as its README "
                     "measured them, by the model (no permute)")  # fmt: skip
    move.add_flags(parser.add_argument_group("weights instead of tokens"))
    out = parser.add_argument_group("what comes out")
    outputs.add_json(out)
    out.add_argument("--trace", metavar="FILE", help="write a timeline for ui.perfetto.dev")
    out.add_argument("--sweep", metavar="FOLDER", help="plot time over SMs, chunk and EP size into this folder")
    out.add_argument("--sources", action="store_true", help="print every number of the cluster with its source")
    advice = parser.add_argument_group("advice")
    advice.add_argument("--recommend", metavar="MODEL", choices=tuple(models.MODELS),
                        help=f"how to lay out a model: {', '.join(models.MODELS)}")  # fmt: skip
    advice.add_argument("--gpus", type=int, help="of the whole job, for --recommend")
    job.add_flags(advice.add_argument, "--recommend", besides=("--tokens", "--num-sms"))
    advice.set_defaults(ep=None)  # given: a job of yours stands beside the plans


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Answers the question asked. A ValueError of the model is the caller's fault here, and says what to change; so
    does a MemoryError of the event engine, whose worlds may be too large for a machine."""
    try:
        return _run(args)
    except ValueError as error:
        flags = job.ARGUMENTS if args.recommend else {**ARGUMENTS, **move.ARGUMENTS}
        raise UsageError(in_flags(str(error), flags)) from None
    except MemoryError as error:
        raise UsageError(f"--tokens {args.tokens}: {error}, or give fewer tokens") from None


def _run(args: argparse.Namespace) -> int:
    cluster = clusters.get(args.cluster)
    outputs.check(args)
    outputs.check_file("--trace", args.trace)
    outputs.check_folder("--sweep", args.sweep)
    asked = _asked(args)
    questions.refuse_idle(args, add_arguments, asked, TAKERS)
    if asked == _SOURCES:
        report.print_sources(cluster)
        return EXIT_OK
    with outputs.for_people(args.json):
        if asked == _ADVICE:
            document = advise.run(args, cluster)
        elif asked == _MOVE:
            document = move.run(args, cluster)
        else:
            request = Request.from_flags(args, cluster)
            if args.experts is None and request.shape.experts != EXPERTS:
                fit, ranks = request.shape.experts, request.shape.ranks
                print(f"# --experts {fit}, not given: {ranks} ranks do not share {EXPERTS} evenly")
            if asked == _LINES:
                document = latency.run(request, args)
            else:
                document = sweep.run(request, args.sweep) if asked == _SWEEP else report.run(request, args.trace)
    outputs.write_json(args.json, document)
    return EXIT_OK


def _asked(args: argparse.Namespace) -> str:
    """The question. UsageError where there are two."""
    given = [flag for flag in QUESTIONS if getattr(args, flag[2:]) not in (None, False, PATHS[0])]
    if len(given) > 1:
        value = getattr(args, given[0][2:])
        said = given[0] if value is True else f"{given[0]} {value}"
        raise UsageError(f"{said}: is a question of its own; leave out {' and '.join(given[1:])}")
    return QUESTIONS[given[0]] if given else _ONE
