"""What a tuning says, and the file it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_ep.cli import UsageError
from hybrid_ep.cli.tune.grid import CHUNK_WITHIN, OPS, SMS_WITHIN, Grid, Point
from hybrid_ep.tuning import SCHEMA, load

if TYPE_CHECKING:
    from hybrid_ep.cli.tune.paths import Crossing


def header_lines(title: str, simulated: bool) -> Iterator[str]:
    if simulated:
        yield "# SIMULATED: predictions of hybrid_ep's performance model, not measurements (docs/performance_model.md)"
    yield f"# hybrid-ep tune  {title}"
    yield (
        f"# *: Pareto front of time against SMs.  tuned: fewest SMs within {SMS_WITHIN - 1:.0%} of the fastest, "
        f"then the largest chunk within {CHUNK_WITHIN - 1:.0%}"
    )
    yield "# default: what a buffer takes without a file.  analytic: what the performance model suggests"
    yield f"#{'tokens':>7}{'op':>10}{'sms':>5}{'chunk':>7}{'time us':>11}{'p10':>11}{'p90':>11}  vs_default"


def grid_lines(grid: Grid) -> Iterator[str]:
    """Every point, then the comparison."""
    for op in OPS:
        front, tuned, default = set(grid.front(op)), grid.chosen(op), grid.at(op, grid.default)
        analytic = grid.at(op, grid.analytic) if grid.analytic else None
        for p in (p for p in grid.points if p.op == op):
            said = [word for word, it in (("tuned", tuned), ("default", default), ("analytic", analytic)) if p == it]
            spread = "".join(f"{'-' if v is None else format(v, '.1f'):>11}" for v in (p.p10_us, p.p90_us))
            yield (
                f"{grid.tokens:>8}{op:>10}{p.num_sms:>5}{p.chunk:>7}{p.time_us:>11.1f}{spread}"
                f"{p.time_us / default.time_us:>10.2f} {'*' if p in front else ' '} {', '.join(said)}".rstrip()
            )
        for name, other in (("default", default), ("analytic", analytic)):
            if other is not None:
                yield (
                    f"# {op} at {grid.tokens} tokens: tuned {_say(tuned)}; {name} {_say(other)}: {_ratio(tuned, other)}"
                )


def _say(p: Point) -> str:
    return f"{p.num_sms} SMs, chunk {p.chunk}, {p.time_us:.0f} us"


def _ratio(tuned: Point, other: Point) -> str:
    return (
        f"{other.time_us / tuned.time_us:.2f} times the tuned time with "
        f"{other.num_sms / tuned.num_sms:.2g} times its SMs"
    )


def write(path: str, grids: list[Grid], crossing: Crossing | None, environment: dict[str, Any]) -> int:
    """Puts the grids and the crossover into the file: entries of the same device and shape are replaced, others kept.
    Returns how many entries it holds then. UsageError when what is there is no tuning file."""
    file, there = Path(path), {}
    if file.exists():
        write_check(path)
        there = json.loads(file.read_text())
    document = {
        "schema": SCHEMA,
        "entries": _with(there.get("entries", []), [grid.entry() for grid in grids], environment),
    }
    crossovers = _with(there.get("crossovers", []), [] if crossing is None else [crossing.entry()], environment)
    if crossovers:
        document["crossovers"] = crossovers
    staging = file.with_name(f".{file.name}.part")
    staging.write_text(json.dumps(document, indent=1) + "\n")
    staging.replace(file)
    return len(document["entries"])


def _with(kept: list[dict], new: list[dict], environment: dict[str, Any]) -> list[dict]:
    what = [(e["device"], e["shape"]) for e in new]
    return [e for e in kept if (e["device"], e["shape"]) not in what] + [{**e, "made": environment} for e in new]


def write_check(path: str) -> None:
    """UsageError when the file that is at `path` is no tuning file: it stays as it is."""
    try:
        load(path, "")
    except ValueError as error:
        raise UsageError(f"-o {path}: {error}; or give another name") from None
