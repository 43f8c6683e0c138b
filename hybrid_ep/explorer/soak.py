"""Random simulated worlds until one fails; the failing one made small, and one command that replays it.

    python -m hybrid_ep.explorer.soak --seeds 100000 [--first 0] [--strategy pct] [--jobs 2]
    python -m hybrid_ep.explorer.soak --replay num_nodes=2,topk=3,seed=17        prints every event, then the failure

Exit code 0: all right; 1: a world failed; 2: bad usage."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

from hybrid_ep import _core
from hybrid_ep.explorer.world import STRATEGIES, Failure, explore, random_spec, spec_of

BATCH = 500  # worlds a process runs between two reports
# What a smaller world has less of, most telling first: (field, candidates for its value).
REDUCTIONS = (
    ("num_nodes", (1, 2, 3)), ("num_local_ranks", (1, 2, 3)), ("spare_slots", (0, 1)), ("experts_per_rank", (1, 2)),
    ("rounds", (1, 2)),
    ("plans", (1, 2)), ("combine", (0,)), ("tokens", (1, 2, 3, 4, 6, 8)), ("topk", (1, 2, 3)), ("num_blocks", (1, 2)),
    ("uneven", (0,)), ("drop_one_in", (0,)), ("routing", (0,)), ("dense", (0,)), ("pad_multiple", (1,)),
    ("scale_bytes", (0,)), ("row_bytes", (0,)), ("hidden", (8, 16)), ("dtype", (0,)), ("multiply", (0,)),
    ("fp32_partials", (0,)), ("weights", (0,)), ("permute", (1,)), ("chunk_tokens", (1, 2, 4)), ("rail_slots", (1, 2)),
    ("exchange_first", (0,)), ("unlike", (0,)), ("landing", (0,)), ("reading", (0,)), ("looks", (0,)),
    ("counter_base", (0,)), ("smem_bytes", (24 * 1024,)), ("strategy", (0,)),
)  # fmt: skip
SEEDS_PER_WORLD = 12  # a smaller world may need another interleaving to fail

Spec = dict[str, int]
Runner = Callable[[Spec], Failure | None]


def run(spec: Spec) -> Failure | None:
    return explore(spec).failure


def minimise(spec: Spec, runner: Runner = run) -> tuple[Spec, Failure]:
    """The smallest world found that fails by the same rule as `spec` does: field after field is reduced for as long
    as anything helps, trying a few interleavings for each smaller world. ValueError if `spec` does not fail."""
    failure = runner(spec)
    if failure is None:
        raise ValueError("spec: this world does not fail; there is nothing to make smaller")
    changed = True
    while changed:
        changed = False
        for field, values in REDUCTIONS:
            for value in values:
                if value == spec[field] or (field not in ("permute", "strategy") and value > spec[field]):
                    continue
                found = next(_failing({**spec, field: value}, failure, runner), None)
                if found:
                    spec, failure = found
                    changed = True
                    break
    return spec, failure


def _failing(spec: Spec, like: Failure, runner: Runner) -> Iterator[tuple[Spec, Failure]]:
    """Variants of the spec, in interleaving only, that fail by the same rule."""
    for offset in range(SEEDS_PER_WORLD):
        variant = {**spec, "seed": spec["seed"] + offset}
        try:
            failure = runner(variant)
        except ValueError:  # the smaller world makes no sense, e.g. multiply without weights
            return
        if failure and (failure.kind, failure.rule) == (like.kind, like.rule):
            yield variant, failure


def replay_text(spec: Spec) -> str:
    """The fields of the spec that are not defaults, as --replay reads them."""
    defaults = _core.sim_defaults()
    return ",".join(f"{name}={value}" for name, value in spec.items() if value != defaults[name]) or "seed=0"


def replay_command(spec: Spec) -> str:
    return f"python -m hybrid_ep.explorer.soak --replay {replay_text(spec)}"


def parse_replay(text: str) -> Spec:
    """The spec that `replay_text` wrote. ValueError names what is malformed or unknown."""
    settings: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if not value.lstrip("-").isdecimal():
            raise ValueError(f"--replay: {part!r} is not NAME=NUMBER")
        settings[name.strip()] = int(value)
    return spec_of(**settings)


def replay(spec: Spec) -> int:
    """Prints every event of the world and how it ended."""
    world = explore(spec, log=True)
    for line in world.log:
        print(line)
    for rank, end in enumerate(world.ranks):
        if end["error"]:
            print(f"rank {rank}: {end['error']}")
    print(f"{world.steps} steps, " + (f"{world.failure.kind}: {world.failure.what}" if world.failure else "all right"))
    return 1 if world.failure else 0


def report(seed: int, strategy: str | None) -> None:
    """Says how the world of this seed fails, and how a small one does."""
    spec = random_spec(seed, strategy)
    failure = run(spec)
    print(
        f"seed {seed} ({STRATEGIES[spec['strategy']]}) failed: {failure.kind if failure else 'not again?'}: "
        f"{failure.what if failure else ''}\nas it was:  {replay_command(spec)}",
        flush=True,
    )
    if failure:
        small, small_failure = minimise(spec)
        print(f"made small: {replay_command(small)}\n{small_failure.kind}: {small_failure.what}", flush=True)


def soak(first: int, num_seeds: int, strategy: str | None, jobs: int) -> int:
    """Runs the worlds first .. first + num_seeds - 1; returns the number that ran before the first failure was
    reported, or raises SystemExit(1) after reporting it."""
    number = -1 if strategy is None else STRATEGIES.index(strategy)
    start, ran, steps = time.monotonic(), 0, 0
    batches = [(at, min(BATCH, first + num_seeds - at)) for at in range(first, first + num_seeds, BATCH)]
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(_core.sim_soak, at, count, number) for at, count in batches]
        for i, future in enumerate(futures, 1):
            count, batch_steps, failed = future.result()
            ran, steps = ran + count, steps + batch_steps
            if failed is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                report(failed, strategy)
                sys.exit(1)
            if i % 20 == 0 or i == len(futures):
                minutes = (time.monotonic() - start) / 60
                print(f"{ran} worlds, {steps} steps, {ran / minutes:.0f} seeds per minute, none failed", flush=True)
    return ran


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybrid_ep.explorer.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=2000, help="worlds to run [%(default)s]")
    parser.add_argument("--first", type=int, default=0, help="first seed [%(default)s]")
    parser.add_argument("--strategy", choices=STRATEGIES, help="one strategy; default: chosen by each seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes [%(default)s]")
    parser.add_argument("--replay", metavar="NAME=NUMBER,...", help="one world, with a log of its events")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.jobs < 1 or args.first < 0:
        parser.error("--seeds and --jobs must be at least 1, --first at least 0")
    if args.replay is not None:
        try:
            return replay(parse_replay(args.replay))
        except ValueError as error:
            parser.error(str(error))
    soak(args.first, args.seeds, args.strategy, args.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
