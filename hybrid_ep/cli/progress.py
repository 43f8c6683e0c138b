"""How far a command is, for a person who waits: on a terminal a bar with the time that is left, or a sentence.

All goes to stderr. Where that is no terminal, as in the log of a job, one line says what takes longer than LONG_S
seconds, with an estimate, and no bar fills it. The bar is rich's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
LONG_S = 5.0
_REDRAW_S = 0.2  # a recorded terminal keeps every picture of a bar
_ESTIMATE_S, _ESTIMATE_SHARE = 3.0, 0.05  # from the items of so long a time, and so many


def track(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, with a bar named `what` while they last. It is drawn between two items and by no other thread, so
    that it takes no time from what is measured."""
    todo = list(items)
    if len(todo) < 2:
        yield from todo
        return
    if not sys.stderr.isatty():
        yield from _announced(todo, what)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        say(f"{what}: {len(todo)} to do; a bar with the time left needs rich: pip install 'hybrid_ep[bench]'")
        yield from todo
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task, drawn = bar.add_task(what, total=len(todo)), time.monotonic()
        for item in todo:
            yield item
            bar.advance(task)
            if time.monotonic() - drawn >= _REDRAW_S:
                bar.refresh()
                drawn = time.monotonic()


def _announced(todo: list[Item], what: str) -> Iterator[Item]:
    """The items; of many that take long, a line once there is something to go by. The first is often a slow one."""
    start, first, said = time.monotonic(), 0.0, False
    for done, item in enumerate(todo, 1):
        yield item
        passed = time.monotonic() - start
        if done == 1:
            first = passed
        enough = passed >= (LONG_S if done == 1 else _ESTIMATE_S)
        enough = enough and (done >= _ESTIMATE_SHARE * len(todo) or passed >= 2 * LONG_S)
        more = (passed - first if done > 1 else passed) / max(1, done - 1) * (len(todo) - done)
        if not said and more and enough and passed + more > LONG_S:
            said = True
            _print(f"{what}: {done} of {len(todo)} done in {passed:.0f} s; at this pace {more:.0f} s more")


def say(sentence: str, takes_s: float = 0.0) -> None:
    """What is about to take long, before it does. takes_s: roughly, where that is known."""
    if sys.stderr.isatty() or takes_s > LONG_S:
        _print(sentence)


def _print(sentence: str) -> None:
    print(f"hybrid-ep: {sentence}", file=sys.stderr, flush=True)
