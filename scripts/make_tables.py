"""Writes again all that the documentation shows of the performance model: tables, figures and pictures in docs/results.

    python scripts/make_tables.py [--only simulator,training,layouts,bench,scaling] [--quick] [--fit]

Deterministic; a few minutes, most of them the event engine's, which --quick leaves out. --fit writes first what the
published training steps give for the numbers of hybrid_ep/perf/efficiency.py. Prose stays as it is."""

from __future__ import annotations

import argparse
import dataclasses
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
EFFICIENCY = ROOT / "hybrid_ep" / "perf" / "efficiency.py"
# The commands that docs/benchmark.md shows beside their pictures, and what they draw there.
BENCH = (
    "bench --backend sim --nodes 4 --hidden 7168 --experts 256 -b 64 -e 8192 -f 2 --num-sms 4,8,16,24,32,48,64 --plot"
)
SCALING = "report scaling --simulate qwen3_30b_a3b --cluster b200_8x400g --gpus 8,16,32,64,128 --plot"
PICTURES = {
    "bench": {"bandwidth.svg": "bench-sim-bandwidth.svg", "time.svg": "bench-sim-time.svg"},
    "scaling": {"scaling.svg": "scaling-sim.svg"},
}


def simulator(quick: bool) -> None:
    import simulate_tables

    simulate_tables.main(["--out", str(RESULTS), *([] if quick else ["--events"])])


def training(quick: bool) -> None:
    import training_tables

    training_tables.OUT.write_text(training_tables.text())
    print(f"written: {training_tables.OUT}")


def layouts(quick: bool) -> None:
    import layout_tables

    layout_tables.main([])


def _pictures(name: str, command: str) -> None:
    from hybrid_ep import cli

    with tempfile.TemporaryDirectory() as folder:
        if code := cli.main([*command.split(), folder]):
            sys.exit(code)
        for made, kept in PICTURES[name].items():
            shutil.copyfile(Path(folder) / made, RESULTS / kept)


def bench(quick: bool) -> None:
    _pictures("bench", BENCH)


def scaling(quick: bool) -> None:
    _pictures("scaling", SCALING)


PARTS: dict[str, Callable[[bool], None]] = {
    "simulator": simulator,
    "training": training,
    "layouts": layouts,
    "bench": bench,
    "scaling": scaling,
}


def fit(source: str) -> str:
    """The text of efficiency.py with the numbers that published steps give now."""
    from hybrid_ep.perf import training as steps

    for name, number in dataclasses.asdict(steps.fit()).items():
        source, found = re.subn(rf"\b({name}=)[\d.e+-]+", lambda m, n=number: f"{m[1]}{n:.4g}", source)
        if found != 1:
            raise ValueError(f"efficiency.py: FITTED has {found} numbers for {name}; write one")
    return source


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}, by commas [all]")
    parser.add_argument("--quick", action="store_true", help="without the event engine")
    parser.add_argument("--fit", action="store_true", help="first write the efficiencies that published steps give")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only {args.only}: there is no {unknown[0]!r}; use some of {', '.join(PARTS)}")
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]  # of this checkout, wherever it was called
    if args.fit:
        from hybrid_ep.perf import efficiency

        EFFICIENCY.write_text(fit(EFFICIENCY.read_text()))
        new = dataclasses.asdict(runpy.run_path(str(EFFICIENCY))["FITTED"])
        efficiency.FITTED = efficiency.Compute(**new)  # what follows goes by the new ones
        print(f"written: {EFFICIENCY.relative_to(ROOT)}")
    for name in names:
        PARTS[name](args.quick)


if __name__ == "__main__":
    main(sys.argv[1:])
