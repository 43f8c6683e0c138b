"""`python -m recipes.pretrain RECIPE`: trains a recipe on this machine and leaves a run folder behind.

Exit code: 0 the held-out loss ended below the unigram entropy, or --stop-after paused the run; 1 a rank
failed; 2 bad usage; 3 the loss did not end below the entropy; 128 + n stopped by signal n (Ctrl-C: 130).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid_ep import env
from hybrid_ep.cli import names
from hybrid_ep.cli.parser import Parser
from megatron_patches.settings import OPTIONS

from . import RECIPES, get_recipe, text_files
from .__main__ import list_recipes
from .config import BALANCE_MODES, BALANCE_PUSHES, CLONE_REACHES, DISPATCH_DTYPES, DISPATCHERS, RunConfig
from .run_folder import RunFolder
from .verdict import EXIT_NOT_LEARNED, verdict

if TYPE_CHECKING:
    from .report import Reporter

EXIT_FAILED, EXIT_USAGE = 1, 2
_DEPENDENCIES = ("yaml", "numpy", "torch", "megatron", "megatron.core", "triton")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be without a configuration."""
    parser = Parser(prog=f"python -m {__package__}.pretrain", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", help=f"one of {', '.join(RECIPES)}; optional with --resume")
    parser.add_argument("--list", action="store_true", help="list the recipes and leave")
    parser.add_argument("--name", help="name of the run folder (default: recipe and time)")
    parser.add_argument("--resume", metavar="NAME", help="continue the run NAME from its checkpoint")
    parser.add_argument("--steps", type=int, metavar="N", help="train for N steps in all")
    parser.add_argument("--stop-after", type=int, metavar="N", help="pause after step N, schedule unchanged")
    parser.add_argument("--seed", type=int, metavar="N", help="of the weights and the order of the text")
    parser.add_argument(
        "--dispatcher",
        type=names.dispatcher_of(DISPATCHERS),
        metavar="NAME",
        help=f"who moves the tokens: one of {', '.join(DISPATCHERS)}",
    )
    parser.add_argument("--dispatch-dtype", choices=DISPATCH_DTYPES, help="what the forward dispatch sends")
    parser.add_argument("--balance", choices=BALANCE_MODES, help="level the experts' load over ranks")
    parser.add_argument("--spare-slots", type=int, metavar="N", help="slots for clones on every rank")
    parser.add_argument("--balance-clones", choices=CLONE_REACHES, help="ranks that may hold an expert's clones")
    parser.add_argument("--balance-push", choices=BALANCE_PUSHES, help="what brings weights to clones")
    parser.add_argument("--balance-interval", type=int, metavar="N", help="steps between placements of slow")
    parser.add_argument(
        "--grouped-gemm",
        action="store_true",
        default=None,
        help="experts as grouped GEMMs, exact for experts without tokens",
    )
    parser.add_argument("--forced-bias", type=float, metavar="STD", help="skew the router on purpose")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of the job, all in one expert-parallel group")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks that count as a node's")
    parser.add_argument("--profile-step", type=int, metavar="N", help="write what step N launches into profile.md")
    parser.add_argument("--runs-dir", help="where run folders live (default: the recipe's, runs)")
    args = parser.parse_args(argv)
    if not (args.list or args.recipe or args.resume):
        parser.error("give a recipe, or --resume NAME; --list shows the recipes")
    if args.resume and args.name:
        parser.error("--name names a new run, --resume continues an old one: give one of them")
    return args


def make_config(args: argparse.Namespace) -> tuple[RunConfig, RunFolder | None]:
    """The configuration, and the folder when a run is resumed."""
    folder = None
    if args.resume:
        folder = RunFolder.open(args.runs_dir or "runs", args.resume)
        config = folder.read_config()
        if args.recipe not in (None, config.recipe):
            raise ValueError(f"recipe={args.recipe!r}: {args.resume} is a {config.recipe}; leave it out")
    else:
        config = get_recipe(args.recipe)
    if args.runs_dir:
        config = config.derive(logging={"runs_dir": args.runs_dir})
    if args.seed is not None:
        config = config.derive(seed=args.seed)
    if args.dispatcher:
        config = config.derive(parallel={"dispatcher": args.dispatcher})
    if args.dispatch_dtype:
        config = config.derive(parallel={"dispatch_dtype": args.dispatch_dtype})
    ranks = {} if args.ranks is None else {"num_ranks": args.ranks, "expert_parallel_size": args.ranks}
    if args.ranks_per_node is not None:
        ranks["ranks_per_node"] = args.ranks_per_node
    if ranks:
        try:
            config = config.derive(parallel=ranks)
        except ValueError as error:
            flags = {"--ranks": args.ranks, "--ranks-per-node": args.ranks_per_node}
            typed = " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
            more = "" if args.ranks_per_node is not None else "; --ranks-per-node changes the ranks of a node"
            raise ValueError(f"{typed}: {error}{more}") from None
    chosen = {
        "balance": args.balance,
        "spare_slots": args.spare_slots,
        "balance_clones": args.balance_clones,
        "balance_push": args.balance_push,
        "balance_interval": args.balance_interval,
        "grouped_gemm": args.grouped_gemm,
    }
    if any(value is not None for value in chosen.values()):
        config = config.derive(parallel={name: value for name, value in chosen.items() if value is not None})
    for option in OPTIONS:
        value = chosen.get(option.name)
        if value is not None and option.modes is not None and config.parallel.balance not in option.modes:
            flag = f"--{option.name.replace('_', '-')} {value}"
            raise ValueError(f"{flag}: needs --balance {' or '.join(option.modes)}, not {config.parallel.balance}")
    if args.forced_bias is not None:
        config = config.derive(model={"forced_bias": args.forced_bias})
    if args.steps is not None:
        warmup = config.schedule.warmup_steps
        if warmup >= args.steps > 0:  # a run this short warms up for a tenth of it
            warmup = args.steps // 10
        config = config.derive(schedule={"train_steps": args.steps, "warmup_steps": warmup})
    if args.profile_step is not None:
        config = config.derive(logging={"profile_step": args.profile_step})
    if args.stop_after is not None and args.stop_after < 1:
        raise ValueError(f"stop_after={args.stop_after}: must be 1 or more")
    if args.stop_after is not None and args.stop_after > config.schedule.train_steps:
        raise ValueError(
            f"stop_after={args.stop_after}: the run has {config.schedule.train_steps} steps; give fewer, or --steps N"
        )
    return config, folder


def prepare_process(config: RunConfig) -> None:
    """Sets what torch and Megatron-Core read when imported, then installs CPU shim and dispatcher. GPUs are hidden: a
    recipe for CPUs trains on them, whatever else the machine has."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch asks the driver once, later
    if not config.runtime.torch_compile:
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(config.runtime.threads_per_rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # a profiled step says on stderr that there is no GPU, otherwise
    # Megatron warns at length of GPU packages that a CPU does not miss; errors are still raised.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    import megatron_patches
    from megatron_patches import cpu

    cpu.install()
    parallel = config.parallel
    if parallel.dispatcher == "hybrid_ep":
        of_the_mode = [option.name for option in OPTIONS if parallel.balance in (option.modes or ())]
        megatron_patches.apply(
            ranks_per_node=parallel.ranks_per_node,
            timeout_s=config.runtime.timeout_s,
            dispatch_dtype=parallel.dispatch_dtype,
            balance=parallel.balance,
            grouped_gemm=parallel.grouped_gemm,
            **{name: getattr(parallel, name) for name in of_the_mode if hasattr(parallel, name)},
        )


def run(
    config: RunConfig, folder: RunFolder, resume: bool, stop_after: int | None, profile_step: int | None = None
) -> int:
    """Trains and reports; the exit code. profile_step: what was asked for now, as opposed to by the run's folder."""
    print(f"{'Resuming' if resume else 'Run'} {folder.path}: loading torch and Megatron-Core ...", flush=True)
    prepare_process(config)
    from . import checkpoint, launch, plots, report, text_data, trainer

    corpus = text_data.build_corpus(config.data)
    if resume:
        folder.rewind_metrics(
            resumable_step(checkpoint.latest_step(folder.checkpoint_dir), config, folder, profile_step)
        )
    print(
        f"Text: {corpus.train_bytes / 1e6:.1f} MB in {corpus.num_train_files} files, held out "
        f"{corpus.held_out_bytes / 1e6:.2f} MB in {corpus.num_held_out_files} files, unigram entropy "
        f"{corpus.unigram_entropy:.4f} nats/byte",
        flush=True,
    )

    def rank_main(context: launch.RankContext) -> None:
        trainer.join_process_groups(config, context.rank, context.store(config.runtime.timeout_s))
        job = trainer.Trainer(config, corpus, folder.checkpoint_dir, resume, context.emit, context.stop_requested)
        context.emit("end", {"outcome": job.train(stop_after)})
        trainer.leave_process_groups(config)

    reporter = report.Reporter(config, folder, corpus)
    try:
        stopped_by = launch.run_ranks(config.parallel.num_ranks, rank_main, reporter.on_event)
    except launch.RankFailed as error:
        reporter.close()  # first, so that the error is the last thing on the screen
        print(f"Failed: {error}", file=sys.stderr, flush=True)
        return 128 + error.signal if error.signal else EXIT_FAILED
    finally:
        reporter.close()
    records = folder.read_metrics()
    parallel, entropy = config.parallel, corpus.unigram_entropy
    print(plots.draw_all(folder.path, records, entropy, parallel.expert_parallel_size, parallel.ranks_per_node))
    return _verdict(reporter, corpus.unigram_entropy, folder, stopped_by, config.schedule.must_learn)


def resumable_step(step: int | None, config: RunConfig, folder: RunFolder, profile_step: int | None = None) -> int:
    """The step of the checkpoint; ValueError where there is none, or nothing of what was asked for comes after it."""
    if step is None:
        raise ValueError(f"resume={folder.name!r}: it has no checkpoint; start a new run")
    if step >= config.schedule.train_steps:
        raise ValueError(
            f"resume={folder.name!r}: it has finished its {config.schedule.train_steps} steps; to train "
            f"on, give --steps N with N > {step}"
        )
    if profile_step and profile_step <= step:
        raise ValueError(
            f"profile_step={profile_step}: {folder.name!r} goes on behind step {step}; give a later step, up to "
            f"{config.schedule.train_steps}"
        )
    return step


def _verdict(reporter: Reporter, entropy: float, folder: RunFolder, stopped_by: int | None, must_learn: bool) -> int:
    """Says it; the exit code."""
    outcome, step, loss = reporter.outcome, reporter.step, reporter.held_out_loss
    sentence, failed = verdict(outcome, step, loss, entropy, folder.name, must_learn)
    print(sentence)
    folder.verdict_path.write_text(sentence + "\n")
    if reporter.outcome != "done":
        return 128 + stopped_by if stopped_by else 0
    return EXIT_NOT_LEARNED if failed else 0


def main(argv: Sequence[str]) -> int:
    """The command; never raises for what the user can mend."""
    args = parse_args(argv)
    if args.list:
        print(list_recipes())
        return 0
    try:
        config, folder = make_config(args)
        env.check()  # before there is a folder, as the text
        text_files.read(config.data)
        folder = folder or RunFolder.create(config, args.name)
        with folder.lock():
            if args.resume:
                folder.write_config(config)
            return run(config, folder, bool(args.resume), args.stop_after, args.profile_step)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        if error.name not in _DEPENDENCIES:
            raise
        remedy = "pip install '.[megatron,train]' in the checkout, or make pretrain, which does it"
        print(f"error: {error.name} is not installed; {remedy}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:  # before the ranks exist; afterwards the launcher handles signals
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
